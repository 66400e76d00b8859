"""The crossovers of an operation, shown by `tilewright ops OP`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewright.cli.shared import console, table
from tilewright.report.formatting import crossover_text

if TYPE_CHECKING:
    from tilewright.runtime.crossovers import Crossover

MEASURED = "measured"
COMPUTED = "computed from the datasheet"
NO_HOST_TIME = "computed without host time"
AS_EAGER = "not measured: as in eager mode"


def crossovers(op_name: str) -> list[dict[str, Any]]:
    """Return the crossovers of an operation on the current GPU; without one, on every GPU with a datasheet."""
    from tilewright import hardware, registry
    from tilewright.runtime.crossovers import CROSSOVERS, measured
    from tilewright.runtime.gpus import datasheet_facts, gpu_facts

    registry.load(op_name)
    if hardware.has_gpu():
        import torch

        gpus = [gpu_facts(torch.cuda.current_device())]
    else:
        gpus = [datasheet_facts(name) for name in hardware.DATASHEETS]
    found = [one for name, one in CROSSOVERS.items() if name == op_name or name.startswith(f"{op_name} ")]
    return [
        {
            "call": one.name,
            "gpu": gpu.name,
            "used": crossover_text(one.on(gpu), one.unit),
            "captured": crossover_text(one.captured.on(gpu), one.unit),
            "source": MEASURED if one.name in measured(gpu.name) else COMPUTED,
            "captured_source": _captured_source(one, gpu.name),
        }
        for one in found
        for gpu in gpus
    ]


def _captured_source(one: Crossover, gpu: str) -> str:
    from tilewright.runtime.crossovers import measured

    if one.captured.name in measured(gpu):
        return MEASURED
    return AS_EAGER if one.captured.computed == one.on else NO_HOST_TIME


def print_crossovers(op_name: str) -> None:
    """Print from which size on calls run our kernel instead of torch."""
    found = crossovers(op_name)
    if not found:
        print(f"{op_name} has no crossover: every call that our kernel can take runs it")
        return
    shown = table("call", "GPU", "our kernel is used", "source", "captured or compiled", "source")
    for one in found:
        shown.add_row(*(one[name] for name in ("call", "gpu", "used", "source", "captured", "captured_source")))
    console().print(shown)

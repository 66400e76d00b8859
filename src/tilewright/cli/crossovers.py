"""The crossovers of an operation, shown by `tilewright ops OP`."""

from __future__ import annotations

from typing import Any

from tilewright.cli.shared import console, table
from tilewright.report.formatting import crossover_text

AS_EAGER = "not measured: as in eager mode"


def crossovers(op_name: str) -> list[dict[str, Any]]:
    """Return the crossovers of an operation on the current GPU; without one, on every GPU with a datasheet."""
    from tilewright import hardware, registry
    from tilewright.runtime.crossovers import CAPTURED, CROSSOVERS, measured
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
            "source": "measured" if one.name in measured(gpu.name) else "computed from the datasheet",
            "captured_source": "measured" if one.name + CAPTURED in measured(gpu.name) else AS_EAGER,
        }
        for one in found
        for gpu in gpus
    ]


def print_crossovers(op_name: str) -> None:
    """Print from which size on calls run our kernel instead of torch."""
    found = crossovers(op_name)
    if not found:
        print(f"{op_name} has no crossover: every call that our kernel can take runs it")
        return
    shown = table("call", "GPU", "our kernel is used", "source", "in CUDA graphs", "source")
    for one in found:
        shown.add_row(*(one[name] for name in ("call", "gpu", "used", "source", "captured", "captured_source")))
    console().print(shown)

"""`tilewright gpu`"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tilewright.cli.shared import AsJson, console, say_next
from tilewright.errors import NoGPU


def gpu(
    name: Annotated[str | None, typer.Argument(help="A GPU of the table, by its short name.")] = None,
    measure: Annotated[
        bool, typer.Option(help="Also measure this GPU's bandwidths and the rates of its units.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What GPU is this, and how fast can it be? Or, with a name, what its datasheet says."""
    from tilewright import hardware
    from tilewright.report import terminal

    if measure and name:
        raise typer.BadParameter("--measure is for the GPU in hand: leave out the name.")
    if measure and not hardware.has_gpu():
        raise NoGPU("--measure")
    if name:
        sheet = hardware.datasheet(name)
        content = {**vars(sheet), "tera": dict(sheet.tera)}
    elif hardware.has_gpu():
        content = hardware.in_hand()
        if measure:
            from tilewright.timer import Timer
            from tilewright.workbench.bench import measure as measure_ceilings

            content["ceilings"] = measure_ceilings(Timer())
    else:
        content = {"gpu": None, "known": sorted(hardware.DATASHEETS)}
    if as_json:
        print(json.dumps(content))
        return
    if content.get("gpu", "") is None:
        console().print("No GPU here: kernels are checked without one, and recorded timings are shown.")
        console().print(f"Datasheets: {', '.join(content['known'])}")
        say_next("tilewright gpu h200")
        return
    console().print(terminal.pairs(content, ""))
    say_next("tilewright bench softmax")

"""The command `tilewright gpu`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.options import AsJson
from tilewright.cli.shared import console, say_next, table
from tilewright.cost import BANDWIDTHS
from tilewright.errors import NoGPU
from tilewright.report.formatting import digits

if TYPE_CHECKING:
    from tilewright.hardware import GPU

LABELS = {
    "name": "name",
    "gpu": "short name",
    "sms": "SMs",
    "registers_per_sm": "registers per SM",
    "capability": "compute capability",
    "driver": "driver",
}
UNITS = {
    "clock_mhz": ("boost clock", "MHz"),
    "sm_clock_mhz": ("SM clock", "MHz"),
    "memory_clock_mhz": ("memory clock", "MHz"),
    "temperature_c": ("temperature", "°C"),
    "power_w": ("power", "W"),
    "power_limit_w": ("power limit", "W"),
}
BINARY_SIZES = {
    "l2": ("L2 cache", 2**20, "MiB"),
    "shared_per_sm": ("shared memory per SM", 2**10, "KiB"),
    "shared_per_block": ("shared memory per block", 2**10, "KiB"),
}


def gpu(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show the datasheet of this GPU.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also measure the ceilings of this GPU.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show this machine's GPU and its ceilings, or the datasheet of another GPU."""
    from tilewright import hardware

    if measure and name:
        raise typer.BadParameter("--measure is for this machine's GPU; leave out the name.")
    if measure and not hardware.has_gpu():
        raise NoGPU("--measure")
    if name:
        sheet = hardware.datasheet(name)
        content, rows = {**vars(sheet), "tflops": dict(sheet.tflops)}, _datasheet_rows(sheet)
    elif hardware.has_gpu():
        content = hardware.current_gpu()
        if measure:
            from tilewright.timer import Timer
            from tilewright.workbench.bench.ceilings import current

            content["ceilings"] = current(Timer(), fresh=True).rates
        rows = _device_rows(content)
    else:
        content, rows = {"gpu": None, "known": sorted(hardware.DATASHEETS)}, None
    if as_json:
        print(json.dumps(content))
    elif rows is None:
        print("No GPU found: kernels are checked in the interpreter, and timings are those on record.")
        print(f"Datasheets: {', '.join(content['known'])}")
        say_next("tilewright gpu h200")
    else:
        shown = table("", "")
        shown.show_header = False
        for row in rows:
            shown.add_row(*row)
        console().print(shown)
        say_next(f"tilewright floor softmax --gpu {name}" if name else "tilewright bench softmax")


def _datasheet_rows(sheet: GPU) -> Iterator[tuple[str, str]]:
    yield "name", sheet.name
    yield "reported by the driver as", " or ".join(sheet.matches)
    yield "architecture", sheet.arch
    yield from _device_rows({key: getattr(sheet, key) for key in ("sms", "clock_mhz", "memory")})
    yield "memory bandwidth", _rate("copy", sheet.bandwidth)
    sizes = ("l2", "shared_per_sm", "shared_per_block", "registers_per_sm")
    yield from _device_rows({key: getattr(sheet, key) for key in sizes})
    yield "warps per SM", f"{sheet.warps_per_sm} of {sheet.warp} threads"
    yield "blocks per SM", str(sheet.blocks_per_sm)
    yield "special functions", f"{sheet.special_per_clock} per clock per SM"
    for unit, tflops in sheet.tflops.items():
        yield f"peak {unit}", _rate(unit, tflops * 1e12)
    yield "source", sheet.source
    if sheet.pages:
        yield "compared with", ", ".join(sheet.pages)


def _device_rows(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if key == "memory":
            yield "memory", f"{value / 1e9:.0f} GB"
        elif key in BINARY_SIZES:
            label, scale, unit = BINARY_SIZES[key]
            yield label, f"{value / scale:.0f} {unit}"
        elif key in UNITS:
            label, unit = UNITS[key]
            yield label, f"{value} {unit}"
        elif key == "ceilings":
            yield from ((f"measured {unit}", _rate(unit, rate)) for unit, rate in value.items())
        else:
            yield LABELS.get(key, key), str(value)


def _rate(unit: str, per_second: float) -> str:
    scale = "TB/s" if unit in BANDWIDTHS else "TOP/s" if unit in ("tensor.int8", "special") else "TFLOP/s"
    return f"{digits(per_second / 1e12)} {scale}"

"""Render profiles in a terminal: every figure with its source, and why a source is not available."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tilewright.cost import size
from tilewright.counters import Counters
from tilewright.workbench.profile import Profile

TORCH_ROWS = 8
Figure = tuple[str, str, str]  # name, value, source


def overview(found: Sequence[Profile], predicted: Sequence[Mapping[str, Sequence[float]]]) -> Group:
    """Show a table per call, then the sources that are not available; `predicted` has the wavefronts by inspect."""
    parts: list[Any] = []
    for one, shared in zip(found, predicted, strict=True):
        parts += [_figures(one, shared), *([_rows(one)] if one.rows else []), ""]
    for source in dict.fromkeys(source for one in found for source in one.absent):
        reasons = {one.title: one.absent[source] for one in found if source in one.absent}
        if len({*reasons.values()}) == 1 and len(reasons) == len(found):  # the source is missing on this machine
            parts.append(Text(f"No {source}: {next(iter(reasons.values()))}"))
        else:
            parts += [Text(f"No {source} for {title}: {reason}") for title, reason in reasons.items()]
    return Group(*parts)


def _figures(one: Profile, predicted: Mapping[str, Sequence[float]]) -> Table:
    table = Table(title=Text(one.title, "bold"), title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name in ("", "", "source"):
        table.add_column(name)
    figures = [("time", f"{one.us[0]:.1f} us", one.us[1])] if one.us else []
    for figure in (*figures, *_rates(one), *(_counters(one.counters) if one.counters else ())):
        table.add_row(*figure)
    for kind, (wavefronts, ideal) in predicted.items():
        table.add_row(f"wavefronts per shared {kind}", f"{wavefronts:.2f}, ideal {ideal:.2f}", "predicted by inspect")
    return table


def _rates(one: Profile) -> Iterator[Figure]:
    if one.scope and one.scope.bytes:
        yield "minimum bytes / time", f"{one.scope.gigabytes_per_second:.0f} GB/s", "proton"
    if one.scope and one.scope.flops:
        yield "minimum FLOP / time", f"{one.scope.teraflops:.1f} TFLOP/s", "proton"


def _counters(counted: Counters) -> Iterator[Figure]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.0%}"

    def joined(*parts: tuple[str, str]) -> str:
        return ", ".join(f"{name} {text}" if name else text for name, text in parts if text)

    stalls = sorted(counted.stalls.items(), key=lambda item: -item[1])[:4]
    moved = {"read": counted.dram_read, "written": counted.dram_written}
    figures = {
        "bottleneck": counted.bottleneck or "",
        "DRAM": joined(*((n, size(v)) for n, v in moved.items() if v is not None), ("throughput", share(counted.dram))),
        "L2": joined(
            ("", size(counted.l2_bytes or 0)), ("hit rate", share(counted.l2_hits)), ("throughput", share(counted.l2))
        ),
        "busy": joined(("SM", share(counted.sm)), ("L1", share(counted.l1)), ("tensor cores", share(counted.tensor))),
        "occupancy": joined(("", share(counted.occupancy)), ("waves", _plain(counted.waves))),
        "registers": _plain(counted.registers),
        "stall reasons (warps per issue)": joined(*((reason, f"{value:.1f}") for reason, value in stalls)),
        "wavefronts per shared load": _conflicts(counted.wavefronts_per_load, counted.load_conflicts),
        "wavefronts per shared store": _conflicts(counted.wavefronts_per_store, counted.store_conflicts),
    }
    for name, text in figures.items():
        if text:
            yield name, text, "ncu"


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _conflicts(wavefronts: float | None, conflicts: float | None) -> str:
    return f"{wavefronts:.2f}, {conflicts or 0:,.0f} conflicts" if wavefronts else ""


def _rows(one: Profile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("torch profiler, per call", max_width=90, no_wrap=True)
    for name in ("count", "GPU us", "host us"):
        table.add_column(name, justify="right")
    for row in (one.rows or ())[:TORCH_ROWS]:
        table.add_row(Text(row.name), f"{row.count:.4g}", f"{row.device_us:.1f}", f"{row.host_us:.1f}")
    return table

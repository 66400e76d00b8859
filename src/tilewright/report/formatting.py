"""Numbers, labels and Markdown tables that every report shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewright.cost import BANDWIDTHS

STALE = "†"
STALE_NOTE = f"{STALE} Stale: the source changed after the measurement."
DIRECTION_LABELS = {"forward": "", "backward": " backward", "both": " forward + backward"}


def digits(value: float | None, count: int = 3) -> str:
    """Return a number with `count` significant digits and no exponent: 2363.4 becomes 2,360."""
    if value is None:
        return ""
    rounded = float(f"{value:.{count - 1}e}")
    magnitude = int(f"{rounded:e}".partition("e")[2])
    return f"{rounded:,.{max(0, count - 1 - magnitude) if rounded else 0}f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}".rstrip("%")


def crossover_text(size: float, unit: str) -> str:
    """Return from which size on our kernel is used."""
    if not 0 < size < math.inf:
        return "never" if size else "at every size"
    power = math.log2(size)
    return f"from {f'2^{power:.0f}' if power.is_integer() else f'{size:,.0f}'} {unit}"


def rate(unit: str, per_second: float) -> str:
    """Return the rate of a bandwidth or an arithmetic unit with its unit of measurement."""
    if unit in BANDWIDTHS:
        return f"{per_second / 1e9:,.0f} GB/s"
    name = "TOP/s" if unit in ("special", "tensor.int8") else "TFLOP/s"
    return f"{per_second / 1e12:,.{0 if per_second >= 1e14 else 1}f} {name}"


def op_label(op: str, direction: str) -> str:
    return op + DIRECTION_LABELS[direction]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; columns whose name begins with ">" are right-aligned."""
    names = [column.removeprefix(">") for column in columns]
    rules = ["--:" if column.startswith(">") else "---" for column in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rules, *rows))


def provenance(verb: str, records: Iterable[Mapping[str, Any]], *libraries: str, note: str = "") -> list[str]:
    """Return one line per device and set of library versions: `Measured on NVIDIA H200, 2026-01-02, triton 3.6.0.`"""
    dates: dict[tuple[str, str], list[str]] = {}
    for r in records:
        versions = "".join(f", {library} {r['versions'][library]}" for library in libraries)
        device = r["device"].get("name", "a machine without a GPU")
        dates.setdefault((device, versions), []).append(r["date"][:10])
    return [f"{verb} {device}, {date_range(days)}{versions}{note}." for (device, versions), days in dates.items()]


def date_range(days: Sequence[str]) -> str:
    first, last = min(days), max(days)
    return first if first == last else f"{first} to {last}"

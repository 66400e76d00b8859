"""A roofline chart in characters: logarithmic axes, ceilings as lines, kernels as letters."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

HEIGHT = 20
LEFT = 9  # width of the vertical axis and its labels
NARROWEST = 20
LABEL_SPACING = 8  # characters between labels of the horizontal axis, at least
PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True)
class Mark:
    x: float  # operations per byte
    y: float  # operations per second
    letter: str


class _Axis:
    """A logarithmic axis over a number of characters."""

    def __init__(self, base: int, values: Iterable[float], cells: int):
        powers = [math.log(value, base) for value in values]
        self._base, self._first, self._last = base, min(powers), max(powers)
        self._per_power = (cells - 1) / (self._last - self._first)

    def cell(self, value: float) -> int:
        return round((math.log(value, self._base) - self._first) * self._per_power)

    def value(self, cell: int) -> float:
        return self._base ** (self._first + cell / self._per_power)

    def ticks(self, apart: int) -> dict[int, int]:
        """Return the integer powers by their cell, at least `apart` cells from each other."""
        step = math.ceil(apart / self._per_power)
        powers = range(math.ceil(self._first), math.floor(self._last) + 1, step)
        return {self.cell(float(self._base) ** power): power for power in powers}


def roofline(
    bandwidth: float, peaks: Mapping[str, float], marks: Sequence[Mark], legend: Mapping[str, str], width: int
) -> str:
    """Draw the memory slope, the ceilings of the units, and the marks; later marks cover earlier ones."""
    ridges = {unit: peak / bandwidth for unit, peak in peaks.items()}
    across = [*(m.x for m in marks), min(ridges.values()) / 8, max(ridges.values()) * 8]
    y = _Axis(10, [*(m.y for m in marks), bandwidth * min(across), max(peaks.values()) * 2], HEIGHT)
    right = [""] * HEIGHT
    for unit, peak in peaks.items():
        right[y.cell(peak)] += f" {unit} {_short(peak)}"
    columns = max(NARROWEST, width - LEFT - max(map(len, right)))
    x = _Axis(2, across, columns)
    cells = [[" "] * columns for _ in range(HEIGHT)]
    for column in range(x.cell(max(ridges.values()))):
        cells[y.cell(bandwidth * x.value(column))][column] = "·"
    for unit, peak in peaks.items():
        begin = x.cell(ridges[unit])
        cells[y.cell(peak)][begin:] = "─" * (columns - begin)
    for mark in marks:
        cells[y.cell(mark.y)][x.cell(mark.x)] = mark.letter
    left = {cell: f"{_short(10.0**power)}/s" for cell, power in y.ticks(1).items()}
    lines = [
        f"{left.get(row, ''):>{LEFT - 2}} │{''.join(cells[row])}{right[row]}".rstrip()
        for row in reversed(range(HEIGHT))
    ]
    axis, below = ["─"] * columns, [" "] * columns
    for cell, power in x.ticks(LABEL_SPACING).items():
        label = str(2**power) if power >= 0 else f"1/{2**-power}"
        axis[cell], begin = "┴", min(cell, columns - len(label))
        below[begin : begin + len(label)] = label
    lines += [f"{'':{LEFT - 1}}└{''.join(axis)}", f"{'':{LEFT}}{''.join(below)} per byte"]
    key = "   ".join(f"{letter} {meaning}" for letter, meaning in legend.items())
    return "\n".join([*lines, *textwrap.wrap(key, width, initial_indent="  ", subsequent_indent="  ")])


def _short(value: float) -> str:
    thousands = min(max(math.floor(math.log10(value) / 3 + 1e-9), 0), len(PREFIXES) - 1)
    return f"{value / 1000**thousands:.3g} {PREFIXES[thousands]}"

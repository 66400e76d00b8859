"""The least work an operation can take. Apart from the other nouns, since reports need it and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BANDWIDTHS = ("copy", "read", "write", "l2")  # ceilings in bytes; all others are in operations
DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Cost:
    """The least any kernel must spend on a case: bytes through device memory, and operations by unit.

    Units: `fp32`, `special` (exp, tanh, …) and `tensor.<dtype>` (the matrix unit).
    """

    read: int
    written: int
    flops: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        units = {*self.flops, *other.flops}
        flops = {unit: self.flops.get(unit, 0) + other.flops.get(unit, 0) for unit in units}
        return Cost(self.read + other.read, self.written + other.written, flops)

    @property
    def memory(self) -> str:
        """The bandwidth that counts: of reading, of writing, or of both at once."""
        return "read" if self.written * 20 < self.read else "write" if self.read * 20 < self.written else "copy"

    def seconds(self, rates: Mapping[str, float]) -> dict[str, float]:
        """The time each unit needs at the given rates (per second); units without a rate are left out."""
        work = {self.memory: self.bytes, **self.flops}
        return {unit: amount / rates[unit] for unit, amount in work.items() if rates.get(unit)}

    def floor(self, rates: Mapping[str, float]) -> tuple[str, float]:
        """The unit that binds and the seconds it needs: no kernel can be faster."""
        by_unit = self.seconds(rates)
        if not by_unit:
            return "unknown", 0.0
        unit = max(by_unit, key=by_unit.__getitem__)
        return unit, by_unit[unit]


def size(count: float) -> str:
    """Bytes as a reader takes them in."""
    return _scaled(count, ("B", "KB", "MB", "GB"))


def amount(count: float) -> str:
    """Of operations, likewise."""
    return _scaled(count, ("", "K", "M", "G", "T"))


def _scaled(count: float, units: Sequence[str]) -> str:
    power = 0
    while count >= 1000 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.{1 if power else 0}f} {units[power]}".rstrip()

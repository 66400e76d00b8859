"""Minimum work of an operation, separate from the spec, since reports need it without importing torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BANDWIDTHS = ("copy", "read", "write", "l2")  # rates in bytes/s; all other rates are in operations/s
DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Cost:
    """The minimum work of any kernel on a case: bytes of device memory traffic, and operations by unit.

    It is false if nothing is counted: the work is unknown, or there is none. Units: `fp32`, `special` (exp, tanh, …)
    and `tensor.<dtype>` (tensor cores).
    """

    read: int
    written: int
    flops: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.bytes or self.flops)

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        units = {*self.flops, *other.flops}
        flops = {unit: self.flops.get(unit, 0) + other.flops.get(unit, 0) for unit in units}
        return Cost(self.read + other.read, self.written + other.written, flops)

    @property
    def memory(self) -> str:
        """The bandwidth that limits the traffic: read, write or copy."""
        return "read" if self.written * 20 < self.read else "write" if self.read * 20 < self.written else "copy"

    def seconds(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return the time of each unit at the given rates per second; units without a rate are left out."""
        work = {self.memory: self.bytes, **self.flops}
        return {unit: amount / rates[unit] for unit, amount in work.items() if rates.get(unit)}

    def floor(self, rates: Mapping[str, float]) -> tuple[str, float]:
        """Return the bottleneck unit and the seconds it needs, which no kernel can beat."""
        by_unit = self.seconds(rates)
        if not by_unit:
            return "unknown", 0.0
        unit = max(by_unit, key=by_unit.__getitem__)
        return unit, by_unit[unit]


def size(count: float) -> str:
    """Format a number of bytes."""
    return _scaled(count, ("B", "KB", "MB", "GB"))


def amount(count: float) -> str:
    """Format a number of operations."""
    return _scaled(count, ("", "K", "M", "G", "T"))


def _scaled(count: float, units: Sequence[str]) -> str:
    power = 0
    while count >= 1000 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.{1 if power else 0}f} {units[power]}".rstrip()

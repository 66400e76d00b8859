"""The ceilings of a GPU: measured, or its datasheet scaled by what another GPU reaches of its own datasheet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from tilewright import hardware
from tilewright.hardware import GPU

L2_RATIO = 2.0  # L2 bandwidth / DRAM bandwidth, if not measured
TIMER_US = 1.3  # between two events with nothing between them, if not measured


@dataclass(frozen=True)
class Ceilings:
    """Rates per second, with the keys of Cost and `l2`."""

    rates: Mapping[str, float]
    source: str
    timer_us: float = TIMER_US

    def memory_seconds(self, read: float, written: float) -> float:
        """Return the DRAM time. Mixed reads and writes pay for bus turnarounds, by the smaller of the two."""
        copy, read_rate, write_rate = (self.rates[name] for name in ("copy", "read", "write"))
        turnaround = max(0.0, 2 / copy - 1 / read_rate - 1 / write_rate)
        return read / read_rate + written / write_rate + turnaround * min(read, written)


def estimate_ceilings(gpu: GPU, records: Iterable[Mapping[str, Any]]) -> Ceilings:
    """Return the newest measured ceilings of this GPU, or its datasheet scaled by those of another."""
    timings = sorted((r for r in records if r["kind"] == "timing" and r["ceilings"]), key=lambda r: r["date"])
    own = [r for r in timings if r["device"]["gpu"] == gpu.name]
    if own:
        floors = [r["timer"]["floor_us"] for r in own if r["timer"].get("floor_us")]
        rates = _complete(hardware.rates(own[-1]["ceilings"], gpu.name), gpu)
        source = f"measured on {own[-1]['device']['name']}, {own[-1]['date'][:10]}"
        return Ceilings(rates, source, median(floors) if floors else TIMER_US)
    for other in reversed(timings):
        sheet = hardware.DATASHEETS.get(other["device"]["gpu"])
        if sheet:
            reached = _reached(other["ceilings"], sheet)
            rates = {unit: rate * reached.get(unit, 1.0) for unit, rate in _complete(gpu.rates(), gpu).items()}
            return Ceilings(rates, f"datasheet, DRAM times {reached['copy']:.2f} as measured on {sheet.name}")
    return Ceilings(_complete(gpu.rates(), gpu), "datasheet peak, which no kernel reaches")


def _complete(rates: Mapping[str, float], gpu: GPU) -> dict[str, float]:
    return {"l2": L2_RATIO * gpu.bandwidth} | dict(rates)


def _reached(measured: Mapping[str, float], gpu: GPU) -> dict[str, float]:
    sheet = _complete(gpu.rates(), gpu)
    return {unit: rate / sheet[unit] for unit, rate in measured.items() if unit in sheet}

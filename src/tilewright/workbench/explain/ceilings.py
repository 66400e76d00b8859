"""How fast a GPU can be: as measured where a record says so, else its datasheet times what others reach of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from tilewright import hardware
from tilewright.hardware import GPU

CACHE = 2.0  # the L2's bandwidth in that of memory, where no one measured it
TIMER_US = 1.3  # what two events with nothing between them say, where no record does


@dataclass(frozen=True)
class Ceilings:
    """Rates per second, keyed as in Cost, and `l2`."""

    rates: Mapping[str, float]
    source: str
    timer_us: float = TIMER_US

    def memory_seconds(self, read: float, written: float) -> float:
        """Each way has its rate; where both go on at once, the bus turns round for every byte of the lesser."""
        copy, reading, writing = (self.rates[name] for name in ("copy", "read", "write"))
        turn = max(0.0, 2 / copy - 1 / reading - 1 / writing)
        return read / reading + written / writing + turn * min(read, written)


def ceilings(gpu: GPU, records: Iterable[Mapping[str, Any]]) -> Ceilings:
    """From timings: the newest of this GPU, or of another whose shares of its datasheet are taken for this one's."""
    timings = sorted((r for r in records if r["kind"] == "timing" and r["ceilings"]), key=lambda r: r["date"])
    own = [r for r in timings if r["device"]["gpu"] == gpu.name]
    if own:
        floors = [r["timer"]["floor_us"] for r in own if r["timer"].get("floor_us")]
        rates = _complete(hardware.rates(own[-1]["ceilings"], gpu.name), gpu)
        said = f"measured on {own[-1]['device']['name']}, {own[-1]['date'][:10]}"
        return Ceilings(rates, said, median(floors) if floors else TIMER_US)
    for other in reversed(timings):
        sheet = hardware.DATASHEETS.get(other["device"]["gpu"])
        if sheet:
            reached = _reached(other["ceilings"], sheet)
            rates = {unit: rate * reached.get(unit, 1.0) for unit, rate in _complete(gpu.rates(), gpu).items()}
            return Ceilings(rates, f"datasheet, times {reached['copy']:.2f} for memory, as {sheet.name} has of its own")
    return Ceilings(_complete(gpu.rates(), gpu), "datasheet, of which no kernel reaches all")


def _complete(rates: Mapping[str, float], gpu: GPU) -> dict[str, float]:
    return {"l2": CACHE * gpu.bandwidth} | dict(rates)


def _reached(measured: Mapping[str, float], gpu: GPU) -> dict[str, float]:
    sheet = _complete(gpu.rates(), gpu)
    return {unit: rate / sheet[unit] for unit, rate in measured.items() if unit in sheet}

"""Why is it slow, and what to try next: what binds a call, how far it is from its ceiling, and the checklist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.workbench.explain.analysis import Known
from tilewright.workbench.explain.checklist import BOUND, FAIL, Point, checklist
from tilewright.workbench.explain.evidence import CALCULATED, COMPILED, COUNTED, MEASURED, Evidence
from tilewright.workbench.explain.prediction import Prediction

PREDICTED = "predicted"
UNITS = {
    "memory": "memory bandwidth",
    "latency": "latency and occupancy",
    "atomics": "latency: atomics that meet at one address",
    "start": "host overhead: starting its launches",
    "issue": "compute: starting instructions",
    "fp32": "compute: fp32",
    "fp64": "compute: fp64",
    "special": "compute: special functions",
    "tensor": "compute: tensor cores",
}
STAY = "leave tensors on the GPU, or move them while it computes: pinned memory, and a stream of their own"
FEWER = "more work for each launch, or fewer: one launch for several, or a CUDA graph of them"
UNTOLD = 1.5  # times the longest that the units could take: what no unit accounts for


@dataclass(frozen=True)
class Binding:
    """What the time goes to."""

    what: str
    why: str
    source: str
    move: str = ""  # what to try next, where it is not the kernel's to mend


@dataclass(frozen=True)
class Diagnosis:
    evidence: Evidence
    prediction: Prediction | None
    floor_us: float | None
    binding: Binding | None  # None: not even its bytes are known
    points: Sequence[Point]

    @property
    def failed(self) -> list[Point]:
        """Causes before what they come to."""
        return sorted((p for p in self.points if p.verdict == FAIL), key=lambda point: point.name == BOUND)

    @property
    def us(self) -> tuple[float, str] | None:
        """Its time, and how we know."""
        if self.evidence.measured_us:
            return self.evidence.measured_us, MEASURED
        return (self.prediction.us, PREDICTED) if self.prediction else None

    @property
    def share(self) -> float | None:
        """Of its ceiling; of a prediction only if that is of all it does."""
        if not self.floor_us or not self.us or (self.us[1] == PREDICTED and self.evidence.rest):
            return None
        return self.floor_us / self.us[0]

    def as_json(self) -> dict[str, Any]:
        known, counted = self.evidence, self.evidence.counted
        return {
            "title": known.title,
            "gpu": known.gpu.name,
            "launches": [one.name for one in known.launches],
            "ceilings": known.ceilings.source,
            "binds": vars(self.binding) if self.binding else None,
            "us": {"value": self.us[0], "source": self.us[1]} if self.us else None,
            "floor_us": self.floor_us,
            "share": self.share,
            "prediction": self.prediction.as_json() if self.prediction else None,
            "moved": {**vars(known.audited.moved), "case": known.audited.case} if known.audited else None,
            "counted": {**counted.as_json(), "source": COUNTED} if counted else None,
            "points": [point.as_json() for point in self.points],
            "unaudited": known.unaudited,
            "untimed": "" if known.timing else known.untimed,
        }


def diagnosed(evidence: Evidence) -> Diagnosis:
    known = Known(evidence)
    if evidence.cost is None and evidence.audited and not all(work.is_told for work in known.works):
        why = "its machine code does not tell how many products it makes"
        evidence = replace(evidence, audited=None, unaudited=why)
        known = Known(evidence)
    return Diagnosis(evidence, known.prediction, known.floor_us, _binding(known), checklist(known))


def _binding(known: Known) -> Binding | None:
    """The first of these that takes the most: the way to the GPU, the host, a unit; or nothing that can be named."""
    found, timing, way = known.prediction, known.evidence.timing, known.evidence.besides
    if obstacle := known.evidence.obstacle:
        return Binding("nothing, as it cannot be launched", obstacle, COMPILED)
    if found is None and not way.bytes:
        return None
    if found is None or way.us > found.us:
        why = f"{way.bytes} B by {', '.join(dict.fromkeys(way.moves))} take {way.us:.1f} us at PCIe's best"
        return Binding("data movement between host and device", why, CALCULATED, STAY)
    if timing and timing["host_us"] and timing["host_us"] > timing["median_us"]:
        why = f"a call takes the host {timing['host_us']:.1f} us and the GPU {timing['median_us']:.1f} us"
        return Binding("host overhead", why, MEASURED, FEWER)
    if known.evidence.rest:
        return _by_counters(known, found) or Binding("not known", f"{known.evidence.rest} takes time, too", COMPILED)
    if timing and timing["median_us"] > UNTOLD * found.high:
        why = f"{timing['median_us']:.1f} us were measured; all units one after the other need {found.high:.1f} us"
        return Binding(UNITS["latency"], why, MEASURED)
    if counted := _by_counters(known, found):
        return counted
    if found.is_unfilled:
        why = f"memory would be {found.busy:.0%} busy: the call is over before it is filled"
        return Binding(UNITS["latency"], why, CALCULATED)
    term = found.terms[found.binds]
    source = COMPILED if found.binds in ("latency", "start") else term.source
    why = f"{term.us:.1f} of {found.us:.1f} us as predicted"
    return Binding(UNITS[found.binds.partition(".")[0]], why, source, FEWER if found.binds == "start" else "")


def _by_counters(known: Known, found: Prediction) -> Binding | None:
    """As the hardware counted it; which unit computes, and which of two that are equally busy, only the code says."""
    counted = known.evidence.counted
    if counted is None or counted.binds is None:
        return None
    compute = [unit for unit in found.terms if unit not in ("memory", "latency", "start", "atomics")]
    unit = {
        "memory": "memory",
        "latency": "latency",
        "compute": max(compute, key=lambda unit: found.terms[unit].us, default="issue"),
    }.get(counted.binds, found.binds)
    why = f"memory is {counted.memory:.0%} busy, the SMs {counted.sm:.0%}"
    return Binding(UNITS[unit.partition(".")[0]], why, COUNTED)

"""Diagnose a call: its bottleneck, its distance from the ceiling, and a checklist with the next thing to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.workbench.explain.access_width import WORD
from tilewright.workbench.explain.advice import FEWER_LAUNCHES, advise
from tilewright.workbench.explain.analysis import Analysis
from tilewright.workbench.explain.checklist import BOUND, FAIL, Check, checklist
from tilewright.workbench.explain.collect import CALCULATED, COMPILED, COUNTED, MEASURED, CallData
from tilewright.workbench.explain.prediction import Prediction

PREDICTED = "predicted"
TERMS = {
    "memory": "memory bandwidth",
    "latency": "latency",
    "atomics": "atomic contention",
    "start": "launch overhead",
    "issue": "instruction issue",
    "fp32": "FP32 arithmetic",
    "fp64": "FP64 arithmetic",
    "special": "special functions",
    "tensor": "tensor cores",
}
KEEP_ON_GPU = "keep tensors on the GPU, or overlap the copies with compute: pinned memory and a separate stream"
UNEXPLAINED = 1.5  # measured time / predicted time without overlap, from which no unit explains the time


def term_name(term: str) -> str:
    """Return the display name of a term of a prediction."""
    return TERMS[term.partition(".")[0]]


@dataclass(frozen=True)
class Bottleneck:
    name: str
    reason: str
    source: str
    term: str | None = None  # a term of the prediction; None if it is none of them
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    call: CallData
    prediction: Prediction | None
    floor_us: float | None
    bottleneck: Bottleneck | None  # None if not even the bytes are known
    checks: Sequence[Check]
    advice: str = ""  # against the bottleneck; empty if the failed checks have all of it

    @property
    def failed(self) -> list[Check]:
        """The failed checks, causes before the symptom (`memory- or compute-bound`)."""
        return sorted((check for check in self.checks if check.verdict == FAIL), key=lambda check: check.name == BOUND)

    @property
    def us(self) -> tuple[float, str] | None:
        """The time of the call, with its source."""
        if self.call.measured_us:
            return self.call.measured_us, MEASURED
        return (self.prediction.us, PREDICTED) if self.prediction else None

    @property
    def share(self) -> float | None:
        """The share of the ceiling; None for a prediction that does not cover the whole call."""
        if not self.floor_us or not self.us or (self.us[1] == PREDICTED and self.call.other_work):
            return None
        return self.floor_us / self.us[0]

    def as_json(self) -> dict[str, Any]:
        call, counters = self.call, self.call.counters
        return {
            "title": call.title,
            "gpu": call.gpu.name,
            "launches": [one.name for one in call.launches],
            "ceilings": call.ceilings.source,
            "bottleneck": vars(self.bottleneck) if self.bottleneck else None,
            "us": {"value": self.us[0], "source": self.us[1]} if self.us else None,
            "floor_us": self.floor_us,
            "share": self.share,
            "prediction": self.prediction.as_json() if self.prediction else None,
            "moved": {**vars(call.audited.moved), "case": call.audited.case} if call.audited else None,
            "counters": {**counters.as_json(), "source": COUNTED} if counters else None,
            "advice": self.advice,
            "checks": [check.as_json() for check in self.checks],
            "unchecked": call.unchecked,
            "no_audit_reason": call.no_audit_reason,
            "no_timing_reason": "" if call.timing else call.no_timing_reason,
        }


def diagnose(call: CallData) -> Diagnosis:
    analysis = Analysis(call)
    if call.cost is None and call.audited and not all(model.has_known_flops for model in analysis.models):
        reason = "the FLOPs of its matrix multiplications cannot be read from the machine code"
        call = replace(call, audited=None, no_audit_reason=reason)
        analysis = Analysis(call)
    found, checks, prediction = _bottleneck(analysis), checklist(analysis), analysis.prediction
    if prediction and analysis.narrow_access:
        narrow = f"the cost of accesses of less than {WORD} B per thread"
        prediction = replace(prediction, excludes=(*prediction.excludes, narrow))
    causes = [check for check in checks if check.verdict == FAIL and check.name != BOUND]
    advice = (found and found.advice) or ("" if call.launch_error else advise(analysis, found and found.term, causes))
    return Diagnosis(call, prediction, analysis.floor_us, found, checks, advice)


def _bottleneck(analysis: Analysis) -> Bottleneck | None:
    """Return the first that applies: host-device copies, host overhead, unexplained latency, counters, prediction."""
    found, timing, host = analysis.prediction, analysis.call.timing, analysis.call.host_work
    if error := analysis.call.launch_error:
        return Bottleneck("none: it cannot be launched", error, COMPILED)
    if found is None and not host.bytes:
        return None
    if found is None or host.transfer_us > found.us:
        transfers = ", ".join(dict.fromkeys(host.transfers))
        reason = f"{host.bytes} B copied by {transfers} take {host.transfer_us:.1f} us at PCIe bandwidth"
        return Bottleneck("host-device copies", reason, CALCULATED, advice=KEEP_ON_GPU)
    if timing and timing["host_us"] and timing["host_us"] > timing["median_us"]:
        reason = f"a call takes {timing['host_us']:.1f} us on the host and {timing['median_us']:.1f} us on the GPU"
        return Bottleneck("host overhead", reason, MEASURED, advice=FEWER_LAUNCHES)
    if analysis.call.other_work:
        unknown = Bottleneck(
            "unknown", f"the call also does {analysis.call.other_work}", COMPILED, advice=analysis.call.how_to_count
        )
        return _from_counters(analysis, found) or unknown
    if timing and timing["median_us"] > UNEXPLAINED * found.high:
        reason = f"measured {timing['median_us']:.1f} us, but all units one after the other need {found.high:.1f} us"
        advice = f"{analysis.call.how_to_count} and look at the stall reasons"
        return Bottleneck(TERMS["latency"], reason, MEASURED, "latency", advice)
    if bottleneck := _from_counters(analysis, found):
        return bottleneck
    if found.is_too_short:
        reason = f"DRAM would be {found.busy:.0%} busy: the call ends before memory is saturated"
        return Bottleneck(TERMS["latency"], reason, CALCULATED, "latency")
    term = found.terms[found.bottleneck]
    source = COMPILED if found.bottleneck in ("latency", "start") else term.source
    reason = f"{term.us:.1f} of the predicted {found.us:.1f} us"
    return Bottleneck(term_name(found.bottleneck), reason, source, found.bottleneck)


def _from_counters(analysis: Analysis, found: Prediction) -> Bottleneck | None:
    """Return the bottleneck by hardware counters. The compute unit, or either of two balanced ones, is predicted."""
    counters = analysis.call.counters
    if counters is None or counters.bottleneck is None:
        return None
    compute = [unit for unit in found.terms if unit not in ("memory", "latency", "start", "atomics")]
    term = {
        "memory": "memory",
        "latency": "latency",
        "compute": max(compute, key=lambda unit: found.terms[unit].us, default="issue"),
    }.get(counters.bottleneck, found.bottleneck)
    reason = f"memory is {counters.memory:.0%} busy, the SMs {counters.sm:.0%}"
    return Bottleneck(term_name(term), reason, COUNTED, term)

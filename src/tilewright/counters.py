"""Hardware counters of a kernel, in bytes, microseconds, fractions of one and counts.

Separate from the profiler, since reports need them without importing torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

SCALES = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}
SCALES |= {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12, "%": 0.01}
_PEAK = "avg.pct_of_peak_sustained"
STALLS = (
    *("long_scoreboard", "short_scoreboard", "wait", "barrier", "mio_throttle", "lg_throttle", "math_pipe_throttle"),
    *("not_selected", "no_instruction", "branch_resolving", "dispatch_stall", "drain", "imc_miss", "membar", "gmma"),
)
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# ncu's rule: latency-bound if no unit exceeds the first utilization, balanced if both are closer than the second.
LATENCY_BOUND, BALANCED = 0.6, 0.1


def _sum(*metrics: str) -> Any:
    """Declare a counter that is summed over the kernels of a call."""
    return field(default=None, metadata={"metrics": metrics, "combine": sum})


def _mean(*metrics: str) -> Any:
    """Declare a counter that is averaged over the kernels of a call, weighted by their time."""
    return field(default=None, metadata={"metrics": metrics, "combine": None})


def _max(*metrics: str) -> Any:
    """Declare a counter whose maximum over the kernels of a call is taken."""
    return field(default=None, metadata={"metrics": metrics, "combine": max})


@dataclass(frozen=True)
class Counters:
    """The counters of one kernel, or of all kernels of a call; None if not available on this GPU.

    A counter with several metrics takes the largest, since GPUs differ in the metrics they have.
    """

    us: float | None = _sum("gpu__time_duration.sum")
    dram_read: float | None = _sum("dram__bytes_read.sum")
    dram_written: float | None = _sum("dram__bytes_write.sum")
    l2_bytes: float | None = _sum("lts__t_bytes.sum")
    l2_hits: float | None = _mean("lts__t_sector_hit_rate.pct")
    memory: float | None = _mean(f"gpu__compute_memory_throughput.{_PEAK}_elapsed")  # utilization of the busiest unit
    dram: float | None = _mean(f"dram__throughput.{_PEAK}_elapsed", f"gpu__dram_throughput.{_PEAK}_elapsed")
    l2: float | None = _mean(f"lts__throughput.{_PEAK}_elapsed")
    l1: float | None = _mean(f"l1tex__throughput.{_PEAK}_active")
    sm: float | None = _mean(f"sm__throughput.{_PEAK}_elapsed")
    tensor: float | None = _mean(
        f"sm__pipe_tensor_cycles_active.{_PEAK}_active", f"sm__pipe_tensor_op_hmma_cycles_active.{_PEAK}_active"
    )
    occupancy: float | None = _mean(f"sm__warps_active.{_PEAK}_active")
    registers: float | None = _max("launch__registers_per_thread")
    shared_bytes: float | None = _max("launch__shared_mem_per_block")
    waves: float | None = _max("launch__waves_per_multiprocessor")
    shared_loads: float | None = _sum("smsp__inst_executed_op_shared_ld.sum")
    shared_stores: float | None = _sum("smsp__inst_executed_op_shared_st.sum")
    load_wavefronts: float | None = _sum("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum")
    store_wavefronts: float | None = _sum("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum")
    load_conflicts: float | None = _sum("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum")
    store_conflicts: float | None = _sum("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum")
    stalls: Mapping[str, float] = field(default_factory=dict)  # warps stalled per warp that issues, by reason
    kernels: tuple[str, ...] = ()

    @property
    def dram_bytes(self) -> float | None:
        return None if self.dram_read is None or self.dram_written is None else self.dram_read + self.dram_written

    @property
    def wavefronts_per_load(self) -> float | None:
        """Average wavefronts per shared-memory load of a warp."""
        return self.load_wavefronts / self.shared_loads if self.load_wavefronts and self.shared_loads else None

    @property
    def wavefronts_per_store(self) -> float | None:
        return self.store_wavefronts / self.shared_stores if self.store_wavefronts and self.shared_stores else None

    @property
    def bottleneck(self) -> str | None:
        """The bottleneck by ncu's rule: memory, compute, both (balanced) or neither (latency)."""
        if self.memory is None or self.sm is None:
            return None
        if max(self.memory, self.sm) < LATENCY_BOUND:
            return "latency"
        if abs(self.memory - self.sm) < BALANCED:
            return "balanced"
        return "memory" if self.memory > self.sm else "compute"

    def as_json(self) -> dict[str, Any]:
        """Return the counters that are available."""
        return {name: value for name, value in asdict(self).items() if value not in (None, {}, ())}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Counters | None:
        """Return the counters of a record of kind `counters`."""
        counted = record.get("counters")
        return Counters(**{**counted, "kernels": tuple(counted.get("kernels", ()))}) if counted else None


COUNTED = [f for f in fields(Counters) if f.metadata]
METRICS = [*(name for f in COUNTED for name in f.metadata["metrics"]), *(_STALL.format(reason) for reason in STALLS)]


def from_row(row: Mapping[str, str], units: Mapping[str, str]) -> Counters:
    """Parse one kernel of ncu's CSV: values and their units by metric."""
    values: dict[str, Any] = {}
    for f in COUNTED:
        found = [value for name in f.metadata["metrics"] if (value := _number(row, units, name)) is not None]
        values[f.name] = max(found, default=None)
    stalls = {reason: _number(row, units, _STALL.format(reason)) for reason in STALLS}
    known = {reason: value for reason, value in stalls.items() if value}
    return Counters(**values, stalls=known, kernels=(row.get("Kernel Name", ""),))


def _number(row: Mapping[str, str], units: Mapping[str, str], name: str) -> float | None:
    text = (row.get(name) or "").replace(",", "")
    if not re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", text):  # n/a on this GPU
        return None
    return float(text) * SCALES.get(units.get(name, ""), 1.0)


def combined(found: Sequence[Counters]) -> Counters:
    """Combine the counters of all kernels of a call."""
    times = [one.us or 0.0 for one in found]

    def mean(values: Sequence[float | None]) -> float:
        weights = [t if v is not None else 0.0 for v, t in zip(values, times, strict=True)]
        return sum((v or 0.0) * w for v, w in zip(values, weights, strict=True)) / (sum(weights) or 1.0)

    values: dict[str, Any] = {}
    for f in COUNTED:
        parts = [getattr(one, f.name) for one in found]
        known = [part for part in parts if part is not None]
        combine = f.metadata["combine"]
        values[f.name] = (combine(known) if combine else mean(parts)) if known else None
    reasons = dict.fromkeys(reason for one in found for reason in one.stalls)
    stalls = {reason: mean([one.stalls.get(reason, 0.0) for one in found]) for reason in reasons}
    return Counters(**values, stalls=stalls, kernels=tuple(name for one in found for name in one.kernels))

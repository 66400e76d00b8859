"""Quantities derived from the data of a call: launch models, prediction, time floor and repeated traffic."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from tilewright.interpreter.results import Traffic
from tilewright.workbench.explain.access_width import NarrowAccess, narrow_access
from tilewright.workbench.explain.collect import AUDITED, COUNTED, CallData
from tilewright.workbench.explain.launch_model import LaunchModel
from tilewright.workbench.explain.prediction import DRAM_LATENCY, Prediction, launch_models, predict

SIGNIFICANT = 0.05  # share of all bytes; tensors that move less are ignored


@dataclass(frozen=True)
class Analysis:
    call: CallData

    @cached_property
    def models(self) -> list[LaunchModel]:
        return launch_models(self.call)

    @cached_property
    def prediction(self) -> Prediction | None:
        return predict(self.call)

    @cached_property
    def longest(self) -> LaunchModel:
        """The launch that requests the most bytes, then the one with the most instructions."""
        return max(self.models, key=lambda m: (m.moved.requested if m.moved else 0, sum(m.executed.values())))

    @cached_property
    def narrow_access(self) -> NarrowAccess | None:
        """Accesses of less than a word per thread in a launch that moves a significant part of all bytes."""
        total = sum(m.moved.requested for m in self.models if m.moved)
        busy = [m for m in self.models if m.moved is None or m.moved.requested > SIGNIFICANT * total]
        return next(filter(None, map(narrow_access, busy)), None)

    @property
    def traffic(self) -> list[Traffic]:
        """The traffic of tensors that are significant, alone or together with others of the same argument name."""
        audited = self.call.audited
        if audited is None:
            return []
        moved: Counter[str] = Counter()
        for t in audited.audit.traffic:
            moved[t.name] += t.moved
        return [t for t in audited.audit.traffic if moved[t.name] > SIGNIFICANT * audited.audit.moved]

    @cached_property
    def floor_us(self) -> float | None:
        """The minimum time of the call: its minimum bytes, or its busiest unit."""
        min_bytes = self.call.min_bytes
        if min_bytes is None or self.prediction is None:
            return None
        ceilings, cost, audited = self.call.ceilings, self.call.cost, self.call.audited
        if cost:
            units = [n / ceilings.rates[u] for u, n in cost.flops.items() if ceilings.rates.get(u)]
            return 1e6 * max(ceilings.memory_seconds(cost.read, cost.written), *units, 0.0)
        assert audited
        written = audited.moved.written / max(1.0, audited.moved.distinct) * min_bytes
        return 1e6 * max(ceilings.memory_seconds(min_bytes - written, written), self._mma_seconds)

    @property
    def _mma_seconds(self) -> float:
        rates = self.call.ceilings.rates
        return sum(flops / rates[unit] for model in self.models for unit, flops in model.mma_flops.items())

    @property
    def dram_passes(self) -> tuple[float, str] | None:
        """DRAM bytes / minimum bytes, with the source of the number."""
        audited, counters, cost = self.call.audited, self.call.counters, self.call.cost
        if counters and counters.dram_bytes and cost:
            return counters.dram_bytes / cost.bytes, COUNTED
        if audited is None or self.call.host_work.torch_ops:  # whose traffic is not audited
            return None
        return audited.moved.distinct / max(1.0, self.call.min_bytes or 0.0), AUDITED

    @property
    def repeats_us(self) -> float:
        """The predicted time for repeated bytes."""
        audited = self.call.audited
        if audited is None or self.prediction is None:
            return 0.0
        once = self.call.ceilings.memory_seconds(audited.moved.read, audited.moved.written)
        return max(0.0, self.prediction.terms["memory"].us - 1e6 * once)

    @property
    def is_short(self) -> bool:
        """Return whether launch overhead takes most of the time."""
        return self.prediction is not None and self.prediction.bottleneck == "start"

    @property
    def is_memory_bound(self) -> bool:
        return self.prediction is not None and self.prediction.bottleneck == "memory"

    @property
    def saturating_bytes(self) -> float:
        """Bytes in flight per SM that saturate DRAM, by Little's law."""
        return self.call.ceilings.rates["read"] * DRAM_LATENCY / self.call.gpu.sms

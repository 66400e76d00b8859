"""What follows from the evidence: the work of each launch, a prediction, and the floor that no kernel can pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from tilewright.interpreter.observed import Traffic
from tilewright.workbench.explain.evidence import AUDITED, COUNTED, Evidence
from tilewright.workbench.explain.prediction import LATENCY, Prediction, predicted, works
from tilewright.workbench.explain.work import Work

MATTERS = 0.05  # of all bytes: what tensors of one name must move to be worth a word


@dataclass(frozen=True)
class Known:
    evidence: Evidence

    @cached_property
    def works(self) -> list[Work]:
        return works(self.evidence)

    @cached_property
    def prediction(self) -> Prediction | None:
        return predicted(self.evidence)

    @cached_property
    def longest(self) -> Work:
        """The launch that moves most, or runs the most instructions."""
        return max(self.works, key=lambda w: (w.moved.asked if w.moved else 0, sum(w.executed.values())))

    @property
    def traffic(self) -> list[Traffic]:
        """Of tensors that matter, alone or with others that kernels call by the same name."""
        audited = self.evidence.audited
        if audited is None:
            return []
        moved: Counter[str] = Counter()
        for t in audited.found.traffic:
            moved[t.name] += t.moved
        return [t for t in audited.found.traffic if moved[t.name] > MATTERS * audited.found.moved]

    @cached_property
    def floor_us(self) -> float | None:
        """The least time of the call: its bytes once, or its busiest unit."""
        least = self.evidence.least
        if least is None or self.prediction is None:
            return None
        ceilings, cost, audited = self.evidence.ceilings, self.evidence.cost, self.evidence.audited
        if cost:
            units = [n / ceilings.rates[u] for u, n in cost.flops.items() if ceilings.rates.get(u)]
            return 1e6 * max(ceilings.memory_seconds(cost.read, cost.written), *units, 0.0)
        assert audited
        written = audited.moved.written / max(1.0, audited.moved.distinct) * least
        return 1e6 * max(ceilings.memory_seconds(least - written, written), self._matrix_seconds)

    @property
    def _matrix_seconds(self) -> float:
        """Of the products that the code makes."""
        rates = self.evidence.ceilings.rates
        return sum(amount / rates[unit] for work in self.works for unit, amount in work.products.items())

    @property
    def passes(self) -> tuple[float, str] | None:
        """Bytes that memory moves for each that must move, and how we know."""
        audited, counted, cost = self.evidence.audited, self.evidence.counted, self.evidence.cost
        if counted and counted.dram_bytes and cost:
            return counted.dram_bytes / cost.bytes, COUNTED
        if audited is None or self.evidence.besides.others:  # whose inputs and results no one has counted
            return None
        return audited.moved.distinct / max(1.0, self.evidence.least or 0.0), AUDITED

    @property
    def repeats_us(self) -> float:
        """What memory and caches take for bytes that were moved before."""
        audited = self.evidence.audited
        if audited is None or self.prediction is None:
            return 0.0
        once = self.evidence.ceilings.memory_seconds(audited.moved.read, audited.moved.written)
        return max(0.0, self.prediction.terms["memory"].us - 1e6 * once)

    @property
    def is_short(self) -> bool:
        """Whether starting takes most of the time."""
        return self.prediction is not None and self.prediction.binds == "start"

    @property
    def needed(self) -> float:
        """Bytes that an SM must have asked for at any time for memory to be busy."""
        return self.evidence.ceilings.rates["read"] * LATENCY / self.evidence.gpu.sms

"""Bytes moved by the launches of a call, from an audit of the call or of a smaller one scaled up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.interpreter.results import SECTOR, Launch, Traffic
from tilewright.workbench.audit import Audit

L1_RESIDENT = 2**17  # bytes of an input that stay in the L1 while other data streams through it


@dataclass(frozen=True)
class BytesMoved:
    """Bytes moved by one launch, or by several."""

    read: float = 0  # distinct
    written: float = 0  # distinct
    requested: float = 0  # by loads, stores and atomics, including repeats
    sectors: float = 0  # 32-byte sectors that warps access
    l1_hits: float = 0  # requested bytes that the L1 serves: small inputs that all programs read
    contention: float = 0  # atomics on the most contended address

    def __add__(self, other: BytesMoved) -> BytesMoved:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return BytesMoved(*(a + b for a, b in pairs))

    def times(self, factor: float) -> BytesMoved:
        return BytesMoved(*(factor * value for value in vars(self).values()))

    @property
    def distinct(self) -> float:
        return self.read + self.written

    @property
    def repeated(self) -> float:
        """Bytes that the L2, or DRAM again, must serve beyond the distinct ones."""
        return max(0.0, max(self.requested, self.sectors) - self.distinct - self.l1_hits)


@dataclass(frozen=True)
class AuditedTraffic:
    """The traffic of a call, from an audit of it or of a call that is smaller by a factor of `scale`."""

    audit: Audit
    scale: float = 1.0
    case: str = ""  # the audited case, if it is not the one in question
    program_scale: Mapping[str, float] = field(default_factory=dict)  # by kernel: programs of the call / audited ones
    unscaled: frozenset[int] = frozenset()  # addresses of inputs that have the same size in the call

    def of_launch(self, launch: Launch) -> BytesMoved:
        """Return the bytes of one launch. Bytes of a tensor that is passed twice count once."""
        by_tensor: dict[tuple[Any, ...], BytesMoved] = {}
        for t in launch.arguments.values():
            key, added = (t.tensor.data_ptr(), t.tensor.nbytes), self._of_argument(t, launch.kernel)
            before = by_tensor.get(key, BytesMoved())
            once = {"read": max(before.read, added.read), "written": max(before.written, added.written)}
            by_tensor[key] = replace(before + added, **once)
        worst = max((atomics_per_address(t) for t in launch.arguments.values()), default=0)
        return replace(sum(by_tensor.values(), BytesMoved()), contention=worst * self.scale)

    def _of_argument(self, t: Traffic, kernel: str) -> BytesMoved:
        """Scale distinct bytes with the size of the tensor, and repeated ones with the number of programs."""
        scale, repeat_scale = self._scale(t), min(self.scale, self.program_scale.get(kernel, self.scale))
        read, written = scale * t.distinct_read, scale * t.distinct_written
        requested = read + written + repeat_scale * max(0, t.moved - t.distinct_read - t.distinct_written)
        sectors = requested * SECTOR * t.sectors / t.moved if t.moved else 0.0
        in_l1 = t.distinct_read <= L1_RESIDENT and not t.distinct_written and _address(t) in self.unscaled
        return BytesMoved(read, written, requested, sectors, requested - read if in_l1 else 0.0)

    def _scale(self, t: Traffic) -> float:
        """Scratch memory grows with the programs that write it; other tensors grow with the call."""
        if _address(t) in self.unscaled:
            return 1.0
        if self.audit.role(t) != "scratch":
            return self.scale
        all_used = ((launch.kernel, one) for launch in self.audit.launches for one in launch.arguments.values())
        writers = (kernel for kernel, one in all_used if one.distinct_written and _address(one) == _address(t))
        return self.program_scale.get(next(writers, ""), self.scale)

    @property
    def moved(self) -> BytesMoved:
        return sum(map(self.of_launch, self.audit.launches), BytesMoved())

    @property
    def min_bytes(self) -> float:
        """The minimum bytes of the call: every byte of inputs and outputs once, without scratch memory."""
        if self.audit.cost:
            return self.audit.cost.bytes * self.scale
        views: dict[tuple[int, str], dict[tuple[int, int], int]] = {}  # launches may take parts of one storage
        sizes = {}
        for t in self.audit.traffic:
            if self.audit.role(t) != "scratch":
                at, view = _address(t), (t.tensor.data_ptr(), t.tensor.nbytes)
                sizes[at] = t.tensor.untyped_storage().nbytes()
                for access, count in (("read", t.distinct_read), ("written", t.distinct_written)):
                    counts = views.setdefault((at, access), {})
                    counts[view] = max(counts.get(view, 0), count)
        return sum(min(sum(counts.values()), sizes[at]) for (at, _), counts in views.items()) * self.scale


def atomics_per_address(t: Traffic) -> float:
    """Return the serialised atomics per address. The hardware combines those of one warp on the same address."""
    if not t.warps:
        return 0.0
    size = t.tensor.element_size()
    addresses = max(1.0, t.distinct_written / size)
    lanes = t.atomic / size / t.warps
    per_warp = addresses * (1 - (1 - 1 / addresses) ** lanes)  # distinct addresses, if lanes pick them at random
    return t.warps * per_warp / addresses


def _address(t: Traffic) -> int:
    return t.tensor.untyped_storage().data_ptr()

"""Profile calls with Nsight Compute, Proton and torch.profiler; every number has a source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewright.counters import Counters
from tilewright.errors import TilewrightError
from tilewright.workbench.profile import ncu, proton, torch_profiler
from tilewright.workbench.profile.calls import Call, title
from tilewright.workbench.profile.proton import Scope
from tilewright.workbench.profile.torch_profiler import Row

SOURCES = (ncu.NAME, proton.NAME, torch_profiler.NAME)  # most detailed first


@dataclass(frozen=True)
class Profile:
    """One call, profiled by every available source."""

    call: Call
    counters: Counters | None = None
    scope: Scope | None = None
    rows: Sequence[Row] | None = None
    absent: dict[str, str] = field(default_factory=dict)  # the reason, by source, why it has no result

    @property
    def title(self) -> str:
        return title(self.call)

    @property
    def us(self) -> tuple[float, str] | None:
        """The time of the kernels of a call, with its source: the one with the least overhead."""
        if self.scope:
            return self.scope.us, proton.NAME
        if self.counters and self.counters.us:
            return self.counters.us, ncu.NAME
        kernels = [row.device_us for row in self.rows or () if row.is_kernel]
        return (sum(kernels), torch_profiler.NAME) if kernels else None

    def as_json(self) -> dict[str, Any]:
        """Return the fields of a `counters` record."""
        return {
            "call": self.call,
            "counters": self.counters and self.counters.as_json(),
            "scope": self.scope and asdict(self.scope),
            "rows": self.rows and [asdict(row) for row in self.rows],
            "sources": dict(zip(("counters", "scope", "rows"), SOURCES, strict=True)),
            "absent": self.absent,
        }


def profile(
    calls: Sequence[Call],
    wanted: Sequence[str] = SOURCES,
    trace_file: str | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> list[Profile]:
    """Profile every call with every source. A source that is not installed or not permitted is skipped."""
    measure: dict[str, Callable[[], list[Any]]] = {
        ncu.NAME: lambda: ncu.measure(calls),
        proton.NAME: lambda: proton.measure(calls),
        torch_profiler.NAME: lambda: torch_profiler.measure(calls, trace_file),
    }
    results: dict[str, list[Any]] = {}  # per source and call: a result, or the reason why there is none
    for source in wanted:
        on_step(source)
        try:
            results[source] = measure[source]()
        except TilewrightError as error:
            results[source] = [str(error)] * len(calls)
    profiles = []
    for number, call in enumerate(calls):
        found = {source: of_calls[number] for source, of_calls in results.items()}
        absent = {source: one for source, one in found.items() if isinstance(one, str)}
        counters, scope, rows = (None if source in absent else found.get(source) for source in SOURCES)
        profiles.append(Profile(call, counters, scope, rows, absent))
    return profiles

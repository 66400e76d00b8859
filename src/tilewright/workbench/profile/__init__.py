"""What the hardware and the profilers know of a call: each number with where it is from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewright.counters import Counters
from tilewright.errors import TilewrightError
from tilewright.workbench.profile import ncu, scopes, trace
from tilewright.workbench.profile.calls import Call, title
from tilewright.workbench.profile.scopes import Scope
from tilewright.workbench.profile.trace import Row

SOURCES = (ncu.NAME, scopes.NAME, trace.NAME)  # those that know most first


@dataclass(frozen=True)
class Profile:
    """One call by all sources that could be asked."""

    call: Call
    counters: Counters | None = None
    scope: Scope | None = None
    rows: Sequence[Row] | None = None
    absent: dict[str, str] = field(default_factory=dict)  # why a source says nothing of this call

    @property
    def title(self) -> str:
        return title(self.call)

    @property
    def us(self) -> tuple[float, str] | None:
        """What the kernels of a call take, by the source that measures it least disturbed, and that source."""
        if self.scope:
            return self.scope.us, scopes.NAME
        if self.counters and self.counters.us:
            return self.counters.us, ncu.NAME
        kernels = [row.device_us for row in self.rows or () if row.is_kernel]
        return (sum(kernels), trace.NAME) if kernels else None

    def as_json(self) -> dict[str, Any]:
        """As a record holds it: what is known, by which source, and why another says nothing."""
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
    """Every call by every source; one that is not permitted or not installed leaves the others their word."""
    ask: dict[str, Callable[[], list[Any]]] = {
        ncu.NAME: lambda: ncu.measure(calls),
        scopes.NAME: lambda: scopes.measure(calls),
        trace.NAME: lambda: trace.measure(calls, trace_file),
    }
    said: dict[str, list[Any]] = {}
    for source in wanted:
        on_step(source)
        try:
            said[source] = ask[source]()
        except TilewrightError as error:
            said[source] = [str(error)] * len(calls)
    found = []
    for number, call in enumerate(calls):
        of_call = {source: answers[number] for source, answers in said.items()}
        absent = {source: answer for source, answer in of_call.items() if isinstance(answer, str)}
        known = {source: answer for source, answer in of_call.items() if source not in absent}
        counters, scope, rows = (known.get(source) for source in SOURCES)
        found.append(Profile(call, counters, scope, rows, absent))
    return found

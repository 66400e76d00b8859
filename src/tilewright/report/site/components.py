"""Parts that the pages share: wins and losses, formatted numbers, and the table of environments."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tilewright.report.formatting import date_range, digits
from tilewright.report.timings import TimingRow


@dataclass(frozen=True)
class Page:
    name: str  # in the navigation
    title: str
    body: str
    data: dict[str, Any] | None = None  # for its charts


@dataclass(frozen=True)
class Outcome:
    """Our fastest kernel on one case beside the fastest baseline."""

    ours: TimingRow
    baseline: TimingRow | None

    @property
    def result(self) -> str:
        if self.ours.loses_to:
            return "loses"
        if not self.baseline:
            return "no baseline"
        return "ties" if self.baseline.place == "ties" else "wins"

    @property
    def speedup(self) -> float | None:
        return self.baseline.us / self.ours.us if self.baseline and self.baseline.us and self.ours.us else None


Group = tuple[str, str, str, str]  # op, GPU, direction, dtype


def grouped(rows: Iterable[TimingRow]) -> dict[Group, list[TimingRow]]:
    groups: dict[Group, list[TimingRow]] = {}
    for row in rows:
        groups.setdefault((row.op, row.gpu, row.direction, row.dtype), []).append(row)
    return groups


def by_case(rows: Iterable[TimingRow]) -> dict[str, list[TimingRow]]:
    cases: dict[str, list[TimingRow]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return cases


def outcomes(group: Iterable[TimingRow]) -> list[Outcome]:
    """Return the outcome of every case on which one of our kernels was timed."""
    found = []
    for case in by_case(group).values():
        ours, baseline = (next((r for r in case if r.us and r.is_baseline == base), None) for base in (False, True))
        if ours:
            found.append(Outcome(ours, baseline))
    return found


def losses(found: Iterable[Outcome]) -> list[str]:
    """Return a list item for every case in which a baseline wins, the largest loss first."""
    lost = [(one.speedup or 0.0, one.ours, one.ours.loses_to) for one in found if one.ours.loses_to]
    return [
        f"<li><p><b>{escape(ours.op)}</b> {escape(f'{ours.direction}, {ours.dtype}, {spaced(ours.case)}')}: "
        f"{escape(f'{ours.kernel} loses to {other.kernel}')}, {digits(ours.us)} µs against {digits(other.us)} µs "
        f"(speedup {speedup:.3f}){' <mark>stale</mark>' if ours.is_stale or other.is_stale else ''}</p>"
        for speedup, ours, other in sorted(lost, key=lambda one: one[0])
    ]


def counts(found: Sequence[Outcome]) -> str:
    """Return "5 wins, 2 ties, 1 loss", each in its colour, and the number of cases without a baseline."""
    results = [one.result for one in found]
    parts = [
        f'<span class="{result}">{count_of(results.count(result), *nouns)}</span>'
        for result, nouns in (("wins", ("win",)), ("ties", ("tie",)), ("loses", ("loss", "losses")))
        if result in results
    ]
    alone = results.count("no baseline")
    notes = [f"<small>no baseline in {count_of(alone, 'case')}</small>"] * bool(alone)
    return "; ".join([", ".join(parts)] * bool(parts) + notes)


def spaced(case: str) -> str:
    return case.replace(",", ", ")


def span(values: Sequence[float], how: str) -> str:
    """Return "0.9 to 2.1", or one figure if both ends are the same."""
    low, high = (format(end, how) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def count_of(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def facts(items: Iterable[str]) -> str:
    return f'<ul class="facts">{"".join(f"<li>{item}" for item in items if item)}</ul>'


def device_names(records: Iterable[dict[str, Any]]) -> dict[str, str]:
    return {r["device"]["gpu"]: r["device"].get("name", r["device"]["gpu"]) for r in records}


def ceilings(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return every measured ceiling, by GPU and unit."""
    found: dict[str, dict[str, dict[float, None]]] = {}
    for r in records:
        units = found.setdefault(r["device"]["gpu"], {})
        for unit, value in r["ceilings"].items():
            units.setdefault(unit, {})[value] = None
    return {gpu: {unit: list(values) for unit, values in units.items()} for gpu, units in found.items()}


def typical(values: Sequence[float]) -> float:
    return statistics.median(values)


def environments(records: Iterable[dict[str, Any]]) -> str:
    """Return a table of GPUs, drivers, library versions and dates."""
    found: dict[tuple[str, ...], list[str]] = {}
    for r in records:
        device, versions = r["device"], r["versions"]
        software = ", ".join(f"{name} {value}" for name, value in versions.items())
        key = (device.get("name", device["gpu"]), str(device.get("driver", "")), software)
        found.setdefault(key, []).append(r["date"][:10])
    lines = [
        f'<tr><th scope="row">{escape(name)}<td>{escape(driver) or "not recorded"}<td>{escape(software)}'
        f"<td>{escape(date_range(dates))}<td class=number>{len(dates):,}"
        for (name, driver, software), dates in found.items()
    ]
    head = "<tr><th>GPU<th>Driver<th>Versions<th>Measured<th class=number>Timings"
    return f'<div class="wide"><table class="environment"><thead>{head}<tbody>{"".join(lines)}</table></div>'

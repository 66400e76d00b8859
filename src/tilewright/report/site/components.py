"""What the pages share: figures as words, and who wins a case."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tilewright.cost import BANDWIDTHS
from tilewright.report.timings import TimingRow


@dataclass(frozen=True)
class Page:
    name: str  # in the navigation
    title: str
    body: str
    data: dict[str, Any] | None = None  # what its charts show


@dataclass(frozen=True)
class Outcome:
    """One case: the best of our kernels beside the best baseline."""

    own: TimingRow
    rival: TimingRow | None

    @property
    def result(self) -> str:
        if self.own.loses_to:
            return "loses"
        if not self.rival:
            return "no baseline"
        return "ties" if self.rival.place == "ties" else "wins"

    @property
    def ratio(self) -> float | None:
        """Of the times: above 1 where ours is the faster."""
        return self.rival.us / self.own.us if self.rival and self.rival.us and self.own.us else None


Group = tuple[str, str, str, str]  # op, GPU, direction, dtype


def grouped(found: Iterable[TimingRow]) -> dict[Group, list[TimingRow]]:
    groups: dict[Group, list[TimingRow]] = {}
    for row in found:
        groups.setdefault((row.op, row.gpu, row.direction, row.dtype), []).append(row)
    return groups


def by_case(found: Iterable[TimingRow]) -> dict[str, list[TimingRow]]:
    cases: dict[str, list[TimingRow]] = {}
    for row in found:
        cases.setdefault(row.case, []).append(row)
    return cases


def outcomes(group: Iterable[TimingRow]) -> list[Outcome]:
    """One a case that a kernel of ours was timed on."""
    made = []
    for case in by_case(group).values():
        own, rival = (next((row for row in case if row.us and row.is_baseline == base), None) for base in (False, True))
        if own:
            made.append(Outcome(own, rival))
    return made


def losses(of: Iterable[Outcome]) -> list[str]:
    """Where ours is slower, said plainly: items of a list, the worst first."""
    lost = [(one.ratio or 0.0, one.own, one.own.loses_to) for one in of if one.own.loses_to]
    return [
        f"<li><p><b>{escape(own.op)}</b> {escape(f'{own.direction}, {own.dtype}, {spaced(own.case)}')}: "
        f"{escape(f'{own.kernel} loses to {rival.kernel}')}, {us(own.us)} against {us(rival.us)} µs ({ratio:.2f}x)</p>"
        for ratio, own, rival in sorted(lost, key=lambda one: one[0])
    ]


def counts(of: Sequence[Outcome]) -> str:
    """'wins 5, ties 2, loses 1', and in how many there was nothing to win against."""
    results = [one.result for one in of]
    said = ", ".join(f"{name} {results.count(name)}" for name in ("wins", "ties", "loses") if name in results)
    alone = results.count("no baseline")
    return "; ".join([said] * bool(said) + [f"no baseline in {counted(alone, 'case')}"] * bool(alone))


def spaced(case: str) -> str:
    return case.replace(",", ", ")


def us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def share(value: float | None) -> str:
    return f"{value:.0%}".replace("%", " %") if value is not None else ""


def span(values: Sequence[float], how: str) -> str:
    """'0.9x to 2.1x', or one figure where there is no more to say."""
    low, high = (format(end, how) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def rate(unit: str, per_second: float) -> str:
    if unit in BANDWIDTHS:
        return f"{per_second / 1e9:,.0f} GB/s"
    name = "TOP/s" if unit in ("special", "tensor.int8") else "TFLOP/s"
    return f"{per_second / 1e12:,.{0 if per_second >= 1e14 else 1}f} {name}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def facts(said: Iterable[str]) -> str:
    return f'<ul class="facts">{"".join(f"<li>{one}" for one in said if one)}</ul>'


def device_names(records: Iterable[dict[str, Any]]) -> dict[str, str]:
    return {r["device"]["gpu"]: r["device"].get("name", r["device"]["gpu"]) for r in records}


def ceilings(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """By GPU and unit, all that were measured."""
    found: dict[str, dict[str, dict[float, None]]] = {}
    for r in records:
        of_gpu = found.setdefault(r["device"]["gpu"], {})
        for unit, value in r["ceilings"].items():
            of_gpu.setdefault(unit, {})[value] = None
    return {gpu: {unit: list(values) for unit, values in units.items()} for gpu, units in found.items()}


def typical(values: Sequence[float]) -> float:
    return statistics.median(values)


def environments(records: Iterable[dict[str, Any]]) -> str:
    """Where, when and with what: one line a combination."""
    found: dict[tuple[str, ...], list[str]] = {}
    for r in records:
        device, versions = r["device"], r["versions"]
        software = ", ".join(f"{name} {value}" for name, value in versions.items())
        where = (device.get("name", device["gpu"]), str(device.get("driver", "")), software)
        found.setdefault(where, []).append(r["date"][:10])
    lines = [
        f'<tr><th scope="row">{escape(name)}<td>{escape(driver) or "not recorded"}<td>{escape(software)}'
        f"<td>{span_of_days(dates)}<td class=number>{len(dates):,}"
        for (name, driver, software), dates in found.items()
    ]
    head = "<tr><th>GPU<th>Driver<th>Versions<th>Measured<th class=number>Timings"
    return f'<div class="wide"><table class="environment"><thead>{head}<tbody>{"".join(lines)}</table></div>'


def span_of_days(dates: Sequence[str]) -> str:
    first, last = min(dates), max(dates)
    return escape(first if first == last else f"{first} to {last}")

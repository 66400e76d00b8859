"""Boards: the ranking of the entries of a problem on a GPU, with ties, history and the chart of the best time."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa

from tilewright.arena import tables as t
from tilewright.arena.errors import UnknownBoard
from tilewright.arena.store import Row, Store

PAGE = 100  # entries per page
MIN_SPAN, DAY = 120.0, 86400.0  # seconds of the chart


@dataclass(frozen=True)
class Ranked:
    rank: int
    is_tied: bool
    entry: Row


@dataclass(frozen=True)
class Standing:
    """A board by a rule, and the entries that it ranks, the oldest first."""

    rule: str
    entries: list[Row]
    ranked: list[Ranked]
    records: list[Row]


class Boards:
    """Ranked boards, cached until an entry is added. Entries never change."""

    def __init__(self, store: Store):
        self._store = store
        self._cache: dict[tuple[int, str], Standing] = {}

    def require(self, problem: Row, board: str) -> str:
        if board not in problem["boards"]:
            raise UnknownBoard(problem["name"], board, problem["boards"])
        return board

    def ranked(self, problem: Row, board: str) -> list[Ranked]:
        """Return all entries of a board, the best first; unverified ones have the rank 0 and stand last."""
        return self._standing(problem, board).ranked

    def history(self, problem: Row, board: str) -> list[Row]:
        """Return the entries that took first place when they were added, the oldest first."""
        return self._standing(problem, board).records

    def leader(self, problem: Row, board: str) -> Row | None:
        """Return the entry that took first place last; those that tie with it did not take it."""
        return next(reversed(self.history(problem, board)), None)

    def _standing(self, problem: Row, board: str) -> Standing:
        key, rule = (problem["id"], board), problem["rule"]
        known = self._cache.get(key)
        entries = self._all(*key, known.entries if known else [])
        if known is None or known.rule != rule or entries is not known.entries:
            known = self._cache[key] = Standing(rule, entries, rank(entries, rule), records(entries, rule))
        return known

    def _all(self, problem: int, board: str, known: list[Row]) -> list[Row]:
        """Return all entries: the known ones, if none was added."""
        where = (t.entries.c.problem == problem, t.entries.c.board == board)
        found = self._store.first(sa.select(sa.func.count().label("n")).where(*where))
        if found and found["n"] == len(known):
            return known
        query = sa.select(t.entries).where(*where).order_by(t.entries.c.id)
        added = self._store.rows(query.where(t.entries.c.id > known[-1]["id"]) if known else query)
        if found and found["n"] > len(known) + len(added):  # one with a smaller number was committed later
            return self._store.rows(query)
        return known + added


def figures(timing: Mapping[str, Any], threshold: float, leader: Mapping[str, Any] | None = None) -> Row:
    """Return the figures of an entry from its timing.

    If it was timed beside the `leader`, they are the leader's figures times the measured ratio: the state of the GPU
    differs between two runs, but not within one.
    """
    against = timing.get("against_leader")
    us, low, high = timing["us"], timing["low"], timing["high"]
    share = timing["share"]
    if leader and against:
        us, low, high = (leader["us"] * against[key] for key in ("ratio", "low", "high"))
        share = leader["share"] / against["ratio"] if leader["share"] else share
    speeds = [row["eager_us"] / row["us"] if row.get("eager_us") else 0.0 for row in timing["cases"]]
    return {
        "us": us,
        "low_us": low,
        "high_us": high,
        "share": share,
        "over_eager": timing["over_eager"],
        "over_compile": timing["over_compile"],
        "fast": sum(speed > threshold for speed in speeds) / len(speeds),
    }


def takes_first_place(entry: Mapping[str, Any], leader: Mapping[str, Any] | None, rule: str) -> bool:
    """Return whether an entry is better than the leader beyond the intervals of both."""
    return leader is None or _score(entry, rule)[2] < _score(leader, rule)[1]


def records(entries: Sequence[Row], rule: str) -> list[Row]:
    """Return the entries that took first place when they were added, the oldest first."""
    found: list[Row] = []
    for entry in sorted((e for e in entries if e["verified"]), key=lambda e: e["id"]):
        if takes_first_place(entry, found[-1] if found else None, rule):
            found.append(entry)
    return found


def rank(entries: Sequence[Row], rule: str) -> list[Ranked]:
    """Rank entries. A rank is one more than the number of entries that are better beyond their intervals."""
    verified = sorted((e for e in entries if e["verified"]), key=lambda e: (*_score(e, rule), e["us"], e["id"]))
    highs = sorted(_score(entry, rule)[2] for entry in verified)
    ranks = [1 + bisect.bisect_left(highs, _score(entry, rule)[1]) for entry in verified]
    counts: dict[int, int] = {}
    for number in ranks:
        counts[number] = counts.get(number, 0) + 1
    found = [Ranked(n, counts[n] > 1, entry) for n, entry in zip(ranks, verified, strict=True)]
    found.sort(key=lambda one: (one.rank, one.entry["id"]))  # those that tie, the oldest first
    others = sorted((e for e in entries if not e["verified"]), key=lambda e: (e["us"], e["id"]))
    return found + [Ranked(0, False, entry) for entry in others]


def _score(entry: Mapping[str, Any], rule: str) -> tuple[float, float, float]:
    """Return the score by which a rule ranks, lower is better, and its interval."""
    us, low, high = entry["us"], entry["low_us"], entry["high_us"]
    if rule == "share":
        share = entry["share"] or 0.0
        return -share, -share * us / low, -share * us / high
    if rule == "fast_p":
        fast = -(entry["fast"] or 0.0)
        return fast, fast, fast
    return us, low, high


def chart(history: Sequence[Row], until: str) -> dict[str, Any] | None:
    """Return the best time over the days until a date: steps and points in a square of 100, and labels of the axes.

    The labels are not part of the picture, which is stretched to the width of the page.
    """
    if not history:
        return None
    # In the order of the entries, also if the clock of the server was set back in between.
    times = [*itertools.accumulate((t.parse_date(entry["date"]).timestamp() for entry in history), max)]
    values = [entry["us"] for entry in history]
    first, last = times[0], max(times[-1], times[0] + MIN_SPAN, t.parse_date(until).timestamp())
    low, high = min(values), max(values)
    labels = [high, (high + low) / 2, low] if high > low else [high]
    grid = (8, 50, 92) if high > low else (50,)
    xs = [2 + 96 * (moment - first) / (last - first) for moment in times]
    ys = [8 + 84 * (high - value) / (high - low) if high > low else 50 for value in values]
    path = f"M{xs[0]:.1f} {ys[0]:.1f}"
    for x, y in zip(xs[1:], ys[1:], strict=True):
        path += f"H{x:.1f}V{y:.1f}"
    points = [{"x": f"{x:.1f}", "y": f"{y:.1f}", "entry": e} for x, y, e in zip(xs, ys, history, strict=True)]
    moments = (first, (first + last) / 2, last)
    form = "%Y-%m-%d" if last - first > 3 * DAY else "%d %b %H:%M"
    days = [datetime.fromtimestamp(moment, timezone.utc).strftime(form) for moment in moments]
    lines = "".join(f"M0 {y}H100" for y in grid)
    return {"path": f"{path}H98", "points": points, "grid": lines, "times": labels, "days": days}

"""Boards: the ranking of the entries of a problem on a GPU, with ties, history and the chart of the best time."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tilewright.arena import tables as t
from tilewright.arena.store import Row, Store
from tilewright.errors import UnknownBoard

PAGE = 100  # entries per page


@dataclass(frozen=True)
class Ranked:
    rank: int
    is_tied: bool
    entry: Row


class Boards:
    """Ranked boards, cached until an entry is added."""

    def __init__(self, store: Store):
        self._store = store
        self._cache: dict[tuple[int, str], tuple[Any, list[Ranked]]] = {}

    def require(self, problem: Row, board: str) -> str:
        if board not in problem["boards"]:
            raise UnknownBoard(problem["name"], board, problem["boards"])
        return board

    def ranked(self, problem: Row, board: str) -> list[Ranked]:
        """Return all entries of a board, the best first; unverified ones have the rank 0 and stand last."""
        where = (t.entries.c.problem == problem["id"], t.entries.c.board == board)
        newest = self._store.first(sa.select(sa.func.max(t.entries.c.id).label("id"), sa.func.count()).where(*where))
        version = (newest, problem["rule"])
        known = self._cache.get((problem["id"], board))
        if known is None or known[0] != version:
            entries = self._store.rows(sa.select(t.entries).where(*where))
            known = self._cache[problem["id"], board] = (version, rank(entries, problem["rule"]))
        return known[1]

    def leader(self, problem: Row, board: str) -> Row | None:
        """Return the verified entry in first place; of several that tie, the oldest."""
        first = [one.entry for one in self.ranked(problem, board) if one.rank == 1]
        return min(first, key=lambda entry: entry["id"], default=None)

    def history(self, problem: Row, board: str) -> list[Row]:
        """Return the entries that were the best when they were added, the oldest first."""
        records: list[Row] = []
        entries = sorted((one.entry for one in self.ranked(problem, board) if one.rank), key=lambda e: e["id"])
        for entry in entries:
            if not records or _score(entry, problem["rule"])[0] < _score(records[-1], problem["rule"])[0]:
                records.append(entry)
        return records


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


def _score(entry: Row, rule: str) -> tuple[float, float, float]:
    """Return the score by which a rule ranks, lower is better, and its interval."""
    us, low, high = entry["us"], entry["low_us"], entry["high_us"]
    if rule == "share":
        share = entry["share"] or 0.0
        return -share, -share * us / low, -share * us / high
    if rule == "fast_p":
        fast = -(entry["fast"] or 0.0)
        return fast, fast, fast
    return us, low, high


def chart(history: Sequence[Row], width: int = 640, height: int = 180) -> dict[str, Any] | None:
    """Return the best time over the days as an SVG path: steps, a point per record, and labels of the axes."""
    if not history:
        return None
    times = [t.parse_date(entry["date"]).timestamp() for entry in history]
    values = [entry["us"] for entry in history]
    first, last = times[0], max(times[-1], times[0] + 86400.0)
    low, high = min(values), max(values)
    span = (high - low) or high or 1.0
    xs = [10 + (width - 20) * (moment - first) / (last - first) for moment in times]
    ys = [15 + (height - 40) * (high - value) / span if high > low else height / 2 for value in values]
    path = f"M{xs[0]:.1f} {ys[0]:.1f}"
    for x, y in zip(xs[1:], ys[1:], strict=True):
        path += f"H{x:.1f}V{y:.1f}"
    points = [{"x": f"{x:.1f}", "y": f"{y:.1f}", "entry": e} for x, y, e in zip(xs, ys, history, strict=True)]
    labels = {"first": history[0]["date"][:10], "last": history[-1]["date"][:10], "high": high, "low": low}
    return {"path": path + f"H{width - 10}", "points": points, "width": width, "height": height, **labels}

"""Boards as JSON lines, CSV and flashinfer-bench traces; results of other boards, imported as unverified."""

from __future__ import annotations

import csv
import io
import json
import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tilewright.arena import tables as t
from tilewright.arena.errors import CannotImport, UnknownFormat
from tilewright.arena.problems import Board
from tilewright.arena.service import Arena, printable
from tilewright.arena.store import Row, geomean

FORMATS = {"jsonl": "application/x-ndjson", "csv": "text/csv", "traces": "application/x-ndjson"}
FIELDS = (
    *("rank", "is_tied", "author", "name", "us", "low_us", "high_us", "share", "over_eager", "over_compile", "fast"),
    *("gpu", "date", "submission", "verified", "origin"),
)
MAX_IMPORT = 2**26  # bytes


def export(arena: Arena, problem: Row, board: str, form: str) -> Iterator[bytes]:
    """Yield the parts of a board in a format of FORMATS."""
    if form not in FORMATS:
        raise UnknownFormat(form, FORMATS)
    ranked = arena.boards.ranked(problem, board)
    rows = ({"rank": one.rank or None, "is_tied": one.is_tied} | one.entry for one in ranked)
    if form == "traces":
        return _traces(arena, problem, board)
    return _csv(rows) if form == "csv" else (json.dumps(_fields(row)).encode() + b"\n" for row in rows)


def import_entries(arena: Arena, problem: Row, board: str, path: Path, origin: str) -> int:
    """Add the entries of a file to a board as unverified, all or none; return how many were not there before."""
    try:
        if path.stat().st_size > MAX_IMPORT:
            raise CannotImport(path, 0, f"it has more than {MAX_IMPORT // 2**20} MiB")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotImport(path, 0, str(error)) from None
    rows = list(_read_csv(path, text) if path.suffix == ".csv" else _read_lines(path, text))
    common = {"problem": problem["id"], "board": board, "verified": False, "origin": printable(origin)[:80]}
    with arena.store.write() as connection:
        same_origin = sa.select(t.entries).where(*(t.entries.c[key] == value for key, value in common.items()))
        known = {_identity(dict(row)) for row in connection.execute(same_origin).mappings()}
        added = {_identity(row): row for row in rows if _identity(row) not in known}
        for row in added.values():
            connection.execute(t.entries.insert().values(row | common))
    return len(added)


def _identity(row: Row) -> tuple[Any, ...]:
    """Return what tells an imported entry from others of the same origin. A file need not give dates."""
    return tuple(row[key] for key in ("author", "name", "gpu", "us"))


def _fields(row: Row) -> dict[str, Any]:
    return {key: row[key] for key in FIELDS}


def _csv(rows: Iterator[Row]) -> Iterator[bytes]:
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS)
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _inert(value) for key, value in _fields(row).items()})
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()


def _inert(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: names are chosen by authors."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value


def _traces(arena: Arena, problem: Row, board: str) -> Iterator[bytes]:
    """Yield a trace per verified entry and case."""
    joined = sa.select(t.entries, t.jobs.c.result).join(t.jobs, t.jobs.c.id == t.entries.c.job)
    query = joined.where(t.entries.c.problem == problem["id"], t.entries.c.board == board).order_by(t.entries.c.id)
    with arena.store.read() as connection:
        for row in connection.execution_options(yield_per=200).execute(query).mappings():
            for case in row["result"]["timing"]["cases"]:
                yield json.dumps(_trace(problem, board, dict(row), case)).encode() + b"\n"


def _trace(problem: Row, board: str, row: Row, case: dict[str, Any]) -> dict[str, Any]:
    sizes = dict(part.split("=", 1) for part in case["case"].split(",") if "=" in part)
    axes = {name: int(value) for name, value in sizes.items() if value.isdecimal()}
    verdict, eager = row["result"].get("verdict", {}), case.get("eager_us")
    errors = [one["max_error"] for one in verdict.get("cases", []) if one.get("max_error") is not None]
    is_predicted = Board.parse(board).is_predicted
    return {
        "definition": problem["name"],
        "workload": {
            "axes": axes,
            "inputs": {},
            "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{problem['name']} {case['case']} {case['dtype']}")),
        },
        "solution": f"{row['author']}/{row['name']}#{row['submission']}",
        "evaluation": {
            "status": "PASSED",
            "environment": {"hardware": row["gpu"], "libs": row["result"].get("versions", {})},
            "timestamp": row["date"],
            "log": "the time is predicted, not measured" if is_predicted else "",
            "correctness": {"max_relative_error": "NaN", "max_absolute_error": max(errors, default=0.0)},
            "performance": {
                "latency_ms": case["us"] / 1e3,
                "reference_latency_ms": (eager or 0.0) / 1e3,
                "speedup_factor": eager / case["us"] if eager else 0.0,
            },
        },
    }


def _read_csv(path: Path, text: str) -> Iterator[Row]:
    try:
        for number, row in enumerate(csv.DictReader(io.StringIO(text)), start=2):
            yield _entry(path, number, row)
    except csv.Error as error:
        raise CannotImport(path, 0, str(error)) from None


def _read_lines(path: Path, text: str) -> Iterator[Row]:
    """Yield an entry per line, or per solution if the lines are traces: their mean time over the workloads."""
    solutions: dict[str, list[dict[str, Any]]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found = dict(json.loads(line))
            if "evaluation" not in found:
                yield _entry(path, number, found)
            elif found["solution"] and found["evaluation"]["status"] == "PASSED":
                solutions.setdefault(str(found["solution"]), []).append(found["evaluation"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CannotImport(path, number, "it is neither an entry of a board nor a trace") from None
    for name, evaluations in solutions.items():
        try:
            us = geomean([float(one["performance"]["latency_ms"]) * 1e3 for one in evaluations])
            speeds = [float(one["performance"]["speedup_factor"]) for one in evaluations]
            speed = geomean(speeds) if all(speeds) else None
            last = evaluations[-1]
            about = {"gpu": last["environment"]["hardware"], "date": last["timestamp"], "over_eager": speed}
        except (ValueError, TypeError, KeyError):
            raise CannotImport(path, 0, f"the traces of {name[:60]} have no times") from None
        author, _, rest = name.rpartition("/")
        yield _entry(path, 0, {"author": author, "name": rest, "us": us, **about})


def _entry(path: Path, number: int, given: dict[str, Any]) -> Row:
    def figure(name: str, default: float | None = None) -> float | None:
        value = given.get(name)
        return default if value in (None, "") else float(value)

    try:
        us = figure("us")
        row = {"us": us, "low_us": figure("low_us", us), "high_us": figure("high_us", us)}
        row |= {name: figure(name) for name in ("share", "over_eager", "over_compile", "fast")}
        times = [row[name] or 0.0 for name in ("us", "low_us", "high_us")]
        if min(times) <= 0 or not all(value is None or (value >= 0 and math.isfinite(value)) for value in row.values()):
            raise ValueError
        date = str(given.get("date") or t.now())
        t.parse_date(date)
    except (ValueError, TypeError):
        raise CannotImport(path, number, "it has no time `us`, or a figure that is not a number") from None
    names = {name: printable(given.get(name) or "")[:80] for name in ("author", "name", "gpu")}
    return row | names | {"date": date}

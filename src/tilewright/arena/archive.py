"""The archive: every ranked kernel with its code, verdict, timing, audit and lineage, and our own kernels."""

from __future__ import annotations

import functools
import io
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import sqlalchemy as sa

from tilewright import hardware, record, settings, source
from tilewright.arena import tables as t
from tilewright.arena.auth import ADMIN
from tilewright.arena.errors import UnknownArchived
from tilewright.arena.service import Arena, named_techniques
from tilewright.arena.store import Row, geomean
from tilewright.cost import Cost
from tilewright.errors import MissingPackage

LIMIT = 200  # kernels of one answer
OURS = "tilewright"
_SEEDING = threading.Lock()
EVIDENCE = ("verdict", "timing", "audit")
COLUMNS = (
    *("id", "problem", "board", "author", "name", "techniques", "us", "low_us", "high_us", "share", "over_eager"),
    *("over_compile", "date", "is_stale", "derived_from", *EVIDENCE, "code"),
)


def search(
    arena: Arena,
    account: Row | None,
    *,
    problem: str = "",
    technique: str = "",
    min_share: float = 0.0,
    words: str = "",
) -> list[dict[str, Any]]:
    """Return the kernels that an account may see and that match, the largest share of the ceiling first.

    They lack the fields in EVIDENCE, which are far larger than the others together.
    """
    wanted = words.lower().split()

    def matches(one: dict[str, Any]) -> bool:
        text = f"{one['name']} {one['author']} {one['problem']} {one['code']}".lower() if wanted else ""
        return (
            (not technique or technique in one["techniques"])
            and (one["share"] or 0.0) >= min_share
            and all(word in text for word in wanted)
        )

    ours = ({key: value for key, value in one.items() if key not in EVIDENCE} for one in seeds())
    kernels = [*(one for one in ours if problem in ("", one["problem"])), *_entries(arena, account, problem)]
    return sorted(filter(matches, kernels), key=lambda one: -(one["share"] or 0.0))


def everything(arena: Arena, account: Row | None) -> Iterator[dict[str, Any]]:
    """Yield every kernel of the archive that an account may see, with the fields in COLUMNS."""
    yield from map(dict, seeds())
    yield from _entries(arena, account, with_evidence=True)


def kernel(arena: Arena, account: Row | None, wanted: str, board: str = "") -> dict[str, Any]:
    """Return a kernel by its id, with the fields in COLUMNS, and on this board if it is on several."""
    number = int(wanted) if wanted.isdecimal() and len(wanted) < 10 else None
    found = _entries(arena, account, submission=number, with_evidence=True) if number is not None else seeds()
    same_id = [one for one in found if one["id"] == wanted]
    if not same_id:
        raise UnknownArchived(wanted)
    return next((one for one in same_id if one["board"] == board), same_id[0])


def _entries(
    arena: Arena, account: Row | None, problem: str = "", submission: int | None = None, with_evidence: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the published entries of boards, and an account's own."""
    visible = {one["id"]: one["name"] for one in arena.store.problems(account) if problem in ("", one["name"])}
    entries, submissions = t.entries, t.submissions
    query = (
        sa.select(entries, submissions.c.code, submissions.c.techniques, submissions.c.derived_from)
        .join(submissions, submissions.c.id == entries.c.submission)
        .where(entries.c.problem.in_(visible))
        .order_by(entries.c.id)
    )
    if with_evidence:
        query = query.add_columns(t.jobs.c.result).join(t.jobs, t.jobs.c.id == entries.c.job)
    if submission is not None:
        query = query.where(submissions.c.id == submission)
    if account is None or account["role"] != ADMIN:
        mine = submissions.c.account == (account["id"] if account else -1)
        query = query.where(sa.or_(submissions.c.published, mine))
    with arena.store.read() as connection:
        for row in connection.execution_options(yield_per=200).execute(query).mappings():
            one = {key: row[key] for key in COLUMNS if key in row}
            parent = row["derived_from"]
            one |= {"id": str(row["submission"]), "problem": visible[row["problem"]]}
            one |= {"derived_from": None if parent is None else str(parent), "is_stale": False}
            yield one | (_evidence(row["result"]) if with_evidence else {})


def _evidence(result: dict[str, Any]) -> dict[str, Any]:
    verdict = {key: result.get("verdict", {}).get(key) for key in ("verdict", "labels", "calls", "isolation")}
    kept = ("case", "bottleneck", "summary", "launches", "roofline")
    audit = [{key: case.get(key) for key in kept} for case in result.get("analysis", {}).get("cases", [])]
    return {"verdict": verdict, "timing": result["timing"]["cases"], "audit": audit}


def seeds() -> tuple[dict[str, Any], ...]:
    """Return our own kernels with their recorded timings. Each derives from the one before it in its file."""
    with _SEEDING:  # takes seconds the first time
        return _seeds()


@functools.cache
def _seeds() -> tuple[dict[str, Any], ...]:
    timings: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    found = [r for path in settings.record_files() for r in record.read(path).records]
    for r in record.latest(found):
        of_kernel = r["kind"] == "timing" and not r.get("sized") and r.get("direction") == "forward"
        if of_kernel and r["median_us"] and not r.get("is_baseline"):
            timings.setdefault((r["op"], r["kernel"], r["device"]["gpu"]), []).append(r)
    kernels = []
    for (op, kernel, gpu), rows in timings.items():
        names = [name for name in source.kernels(op) if (op, name, gpu) in timings]
        if kernel in names:
            before = names[names.index(kernel) - 1] if names.index(kernel) else None
            kernels.append(_seed(op, kernel, gpu, rows, before))
    return tuple(kernels)


def _seed(op: str, kernel: str, gpu: str, rows: list[dict[str, Any]], before: str | None) -> dict[str, Any]:
    code = source.read(source.op_files()[op]).kernel_code(kernel)
    speeds = [r["against"]["ratio"] for r in rows if r["against"] and r["against"]["kernel"] == "eager"]
    intervals = [r["interval_us"] or [r["median_us"]] * 2 for r in rows]
    floors = [Cost(**r["cost"]).floor(hardware.rates(r["ceilings"], gpu))[1] * 1e6 for r in rows]
    shares = [floor / r["median_us"] for floor, r in zip(floors, rows, strict=True) if floor]
    cases = [
        {"case": record.spelled(r["case"]), "dtype": r["dtype"], "us": r["median_us"], "floor_us": floor}
        for floor, r in zip(floors, rows, strict=True)
    ]
    return {
        "id": f"{OURS}:{op}:{kernel}:{gpu}",
        "problem": op,
        "board": gpu,
        "author": OURS,
        "name": kernel,
        "techniques": named_techniques(code),
        "us": geomean([r["median_us"] for r in rows]),
        "low_us": geomean([low for low, _ in intervals]),
        "high_us": geomean([high for _, high in intervals]),
        "share": geomean(shares) if shares else None,
        "over_eager": geomean(speeds) if speeds else None,
        "over_compile": None,
        "date": max(r["date"] for r in rows),
        "derived_from": before and f"{OURS}:{op}:{before}:{gpu}",
        "is_stale": any(map(record.is_stale, rows)),
        "verdict": {"verdict": "right", "labels": [], "calls": None, "isolation": []},
        "timing": cases,
        "audit": [],
        "code": code,
    }


def as_json_lines(kernels: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for one in kernels:
        yield json.dumps(one).encode() + b"\n"


def as_parquet(kernels: Iterable[dict[str, Any]]) -> bytes:
    """Return one Parquet file; nested fields are JSON text."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise MissingPackage("the export to Parquet", "pyarrow") from None
    numbers = ("us", "low_us", "high_us", "share", "over_eager", "over_compile")
    texts = [name for name in COLUMNS if name not in (*numbers, "techniques", "is_stale")]
    schema = pyarrow.schema(
        [(name, pyarrow.float64()) for name in numbers]
        + [("techniques", pyarrow.list_(pyarrow.string())), ("is_stale", pyarrow.bool_())]
        + [(name, pyarrow.string()) for name in texts]
    )
    rows = [one | {name: json.dumps(one[name]) for name in EVIDENCE} for one in kernels]
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), out, compression="zstd")
    return out.getvalue()

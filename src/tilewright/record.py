"""Records: versioned JSON lines with their provenance, written atomically and read from damaged files too."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tilewright import files, settings, source
from tilewright.cost import DIRECTIONS
from tilewright.errors import CannotRead, CannotWrite

SCHEMA = 2  # 1: timings without intervals, host time, memory and the GPU's state
SWEEP = Path(__file__).parent / "workbench" / "bench" / "sweep.py"  # the program of a record of kind "sweep"
TRAIN_STEP = "train_step"  # the kind of a record of a training step
TRAINING = ("models", "workbench/train")  # the folders whose code such a record measures
CHECK = "check"  # the call of a verdict: all of its cases
FINGERPRINTS = "fingerprints.jsonl"  # the current code's, in the folder of each GPU
REQUIRED = ("schema", "kind", "op", "kernel", "date", "source")
OF_A_TIMING = (
    *("case", "dtype", "direction", "cost", "verdict", "reason", "samples_us", "median_us"),
    *("ceilings", "device", "versions"),
)
BASELINES_OF_1 = ("eager", "compile", "manual", "sdpa", "vendor")  # prefixes of their names
SINCE_2: dict[str, Any] = {
    "is_baseline": False,
    "calls": 1,
    "interval_us": None,
    "against": None,
    "host_us": None,
    "extra_bytes": None,
    "state": {},
    "timer": {},
}


def stamp(kind: str, op: str, kernel: str, source_hash: str, **content: Any) -> dict[str, Any]:
    """Return a record of the given kind with the current date."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"schema": SCHEMA, "kind": kind, "op": op, "kernel": kernel, "date": date, "source": source_hash, **content}


def append(path: Path, records: list[dict[str, Any]]) -> None:
    """Append under a lock, so that concurrent writers lose nothing, on a new line after a torn write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if records and file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write("".join(json.dumps(record) + "\n" for record in records).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CannotWrite(path, error.strerror or str(error)) from None


def replace_file(path: Path, records: list[dict[str, Any]]) -> None:
    """Rewrite a file in one step."""
    files.replace(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def add_fields(path: Path, fields: Mapping[str, dict[str, Any]], identity: Callable[[dict[str, Any]], str]) -> None:
    """Add fields to the records of a file that have the given identities; every other line stays as it is."""
    lines = path.read_text().splitlines(keepends=True)
    changed = []
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:  # a torn line, which `read` reports
            found = None
        more = fields.get(identity(found)) if isinstance(found, dict) else None
        changed.append(json.dumps(found | more) + "\n" if found and more else line)
    if changed != lines:
        files.replace(path, "".join(changed).encode())


def require_writable(path: Path) -> None:
    """Raise before work starts rather than lose its result at the end.

    A missing file is not created, since removing it again could remove what another writer has put there.
    """
    if path.exists():
        append(path, [])
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CannotWrite(path, error.strerror or str(error)) from None


@dataclass
class Read:
    """The records of one file, and the numbers of its other lines.

    `torn` lines were cut off by a killed writer, `newer` ones written by a later version, `corrupt` ones are neither.
    """

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    newer: list[int] = field(default_factory=list)


def read(path: Path) -> Read:
    """Read every record of a file; lines that are not records are reported, never hidden."""
    result = Read(path)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise CannotRead(path, error.strerror or str(error)) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError):  # RecursionError: deeply nested JSON
            cut_short = line.startswith("{") and not line.rstrip().endswith("}")
            (result.torn if cut_short else result.corrupt).append(number)
            continue
        if _is_newer(record):
            result.newer.append(number)
        elif _is_record(record):
            result.records.append(_complete(record))
        else:
            result.corrupt.append(number)
    return result


def _is_newer(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("schema"), int) and value["schema"] > SCHEMA


def _complete(record: dict[str, Any]) -> dict[str, Any]:
    """Add defaults for what timings of earlier versions do not have."""
    if record["kind"] != "timing":
        return record
    return SINCE_2 | {"is_baseline": record["kernel"].startswith(BASELINES_OF_1)} | record


def _is_record(value: Any) -> bool:
    """Return whether a value has the fields that readers rely on, of the expected types."""
    if not isinstance(value, dict) or not all(key in value for key in REQUIRED):
        return False
    if not isinstance(value["schema"], int) or not all(isinstance(value[key], str) for key in REQUIRED[1:]):
        return False
    if value["kind"] == "sweep":
        points = value.get("points")
        return _has_device(value) and isinstance(points, list) and bool(points) and all(map(_is_point, points))
    if value["kind"] == "random":
        return _is_timing(value) and _is_drawn(value)
    return value["kind"] != "timing" or _is_timing(value)


def _is_timing(value: dict[str, Any]) -> bool:
    keys = (*OF_A_TIMING, *(SINCE_2 if value["schema"] == SCHEMA else ()))
    if not all(key in value for key in keys) or not _has_device(value):
        return False
    r = SINCE_2 | value
    cost, against = r["cost"], r["against"]
    return (
        all(isinstance(r[key], dict) for key in ("case", "cost", "versions", "state", "timer"))
        and all(isinstance(r[key], str) for key in ("dtype", "verdict", "reason"))
        and r["direction"] in DIRECTIONS
        and cost.keys() == {"read", "written", "flops"}
        and _is_number(cost["read"])
        and _is_number(cost["written"])
        and isinstance(cost["flops"], dict)
        and all(map(_is_number, [*cost["flops"].values(), *r["ceilings"].values()]))
        and isinstance(r["samples_us"], list)
        and all(map(_is_number, [*r["samples_us"], *(r["interval_us"] or [])]))
        and len(r["interval_us"] or [0, 0]) == 2
        and all(r[key] is None or _is_number(r[key]) for key in ("median_us", "host_us", "extra_bytes"))
        and (r["median_us"] is None or (r["median_us"] > 0 and len(r["samples_us"]) > 0))
        and isinstance(r["calls"], int)
        and (against is None or (isinstance(against, dict) and against.keys() == {"kernel", "ratio", "interval"}))
    )


def _is_drawn(value: dict[str, Any]) -> bool:
    """Return whether a timing also has the fields of a drawn case."""
    kinds: dict[str, Any] = {"layout": str, "seed": int, "path": str, "aligned": bool, "seconds": dict}
    return all(isinstance(value.get(key), kind) for key, kind in kinds.items())


def _has_device(value: dict[str, Any]) -> bool:
    device = value.get("device")
    return isinstance(device, dict) and {"gpu", "name"} <= device.keys() and isinstance(value.get("ceilings"), dict)


def _is_point(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_number(value.get(key)) for key in ("k", "us", "bytes", "flops"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not allowed in a record")


def latest(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the newest record of each kind, GPU and call, in order of first appearance."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        names = ("kind", "op", "kernel", "case", "dtype", "direction", "call", "sized", "layout", "captured")
        key = (*(str(record.get(name)) for name in names), record.get("device", {}).get("gpu"))
        if key not in newest or record["date"] >= newest[key]["date"]:
            newest[key] = record
    yield from newest.values()


def spelled(case: Mapping[str, Any]) -> str:
    """Return a record's case in the form that `--case` takes."""
    return ",".join(f"{name}={value}" for name, value in case.items())


def call_key(record: Mapping[str, Any]) -> str:
    """Return what names a record's call among those of its kernel; a verdict covers all cases of a check."""
    if record["kind"] == "verdict":
        return CHECK
    return f"{spelled(record['case'])} {record['dtype']} {record.get('direction', 'forward')}"


def is_stale(record: Mapping[str, Any]) -> bool:
    """Return whether the code that would run now differs from the code that was measured."""
    return stale_reason(record) is not None


def stale_reason(record: Mapping[str, Any]) -> str | None:
    """Return why a record is stale; None if it is fresh.

    A record is fresh if its source hash or its fingerprint is that of the current code. The current fingerprints are
    those that `tilewright records verify --update` has written down for the current source hash. A record of code that
    is not here (a user's file, a removed operation) cannot be judged, and counts as fresh.
    """
    called = SWEEP if record["kind"] == "sweep" else record.get("call", {}).get("file") or record.get("file")
    if called:
        return f"{called} changed" if _has_changed(Path(called), record) else None
    if record["kind"] == TRAIN_STEP:
        is_ours = record["kernel"].startswith("ours")
        return "the source changed" if is_ours and record["source"] != source.tree_hash(TRAINING) else None
    if record["op"] not in source.op_files():
        return None
    current = source.kernel_hash(record["op"], record["kernel"])
    if current is None:
        return "the kernel is gone"
    known = fingerprints(record.get("device", {}).get("gpu", "")).get((record["op"], record["kernel"]))
    if known and record.get("is_baseline") and (newer := _other_library(record["versions"], known["versions"])):
        return newer
    if current == record["source"]:
        return None
    if "fingerprint" not in record:
        return "the source changed, and the record has no fingerprint"
    if known is None or known["source"] != current:
        return "the source changed; compare fingerprints with `tilewright records verify --update`"
    if known["toolchain"] != record["fingerprint"]["toolchain"]:
        return "the source changed, and the fingerprint is of another compiler"
    if known["calls"].get(call_key(record)) != digest(record["fingerprint"]["launches"]):
        return "the launches changed"
    return None


def _other_library(measured: Mapping[str, str], newest: Mapping[str, str]) -> str | None:
    """Return which library a baseline was measured with that the newest records of its GPU have another version of."""
    for name in ("torch", "triton"):
        if measured.get(name) != newest.get(name):
            return f"measured with {name} {measured.get(name)}; the newest records are of {newest.get(name)}"
    return None


def _has_changed(file: Path, record: Mapping[str, Any]) -> bool:
    """Return whether an existing file has other code than the one that was measured."""
    if not file.is_file() or source.file_hash(file) == record["source"]:
        return False
    return file.suffix != ".py" or source.code_hash(file) != record.get("code")


def digest(launches: list[str]) -> str:
    """Return a short hash of a fingerprint."""
    return hashlib.sha256("\n".join(launches).encode()).hexdigest()[:16]


def fingerprints(gpu: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the fingerprints of the current code for a GPU, by operation and kernel."""
    path = settings.results_dir() / gpu / FINGERPRINTS
    return _fingerprints(path, path.stat().st_mtime_ns) if gpu and path.is_file() else {}


@functools.lru_cache(8)
def _fingerprints(path: Path, modified: int) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["op"], r["kernel"]): r for r in read(path).records if r["kind"] == "fingerprint"}

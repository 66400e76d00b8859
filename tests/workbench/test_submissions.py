"""Every file in submissions/ gets the verdict it names: cheats are caught, unusual but honest files are right."""

import ast
import dataclasses
import functools
import secrets
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tilewright import record, registry, settings, source
from tilewright.errors import InvalidKernelFile
from tilewright.spec import Op
from tilewright.workbench import check as checking
from tilewright.workbench.check import judge
from tilewright.workbench.check.expected import ReferenceRuns
from tilewright.worker.parent import Worker

FOLDER = Path(__file__).parent.parent / "submissions"
SECONDS = {"timeout": 4.0, "right": 60.0}  # per reply, by expected verdict
MAX_CRASHES = 2  # each starts another process
LIMIT = 240  # seconds for a whole check, on a busy machine: a cheat that blocks the parent fails its test
DTYPES = ["float32", "float16"]
CASES = {  # indices into the Op's own cases
    "softmax": (0, 5, 6, 10),
    "sum": (1, 3, 5),
    "gelu": (0, 1, 2, 3),
    "add": (0, 2, 3),
    "dot": (0, 2, 3),
    "linear": (1, 3, 8),
    "attention": (1, 2, 4),
}


def _constants(path: Path) -> dict[str, Any]:
    """Return EXPECTED, LABELS, OP, DEPTH and NEEDS of a submission without running it."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue  # one of the submission's own constants
    return found


def _submissions() -> list[Any]:
    found = []
    for path in sorted(FOLDER.glob("*/[!_]*.py")):
        marks = [pytest.mark.gpu] if _constants(path).get("NEEDS") == "gpu" else []
        found.append(pytest.param(path, id=f"{path.parent.name}-{path.stem}", marks=marks))
    return found


SEED = secrets.randbits(32)  # one for all, so that references run once


@functools.cache
def _op(name: str) -> Op:
    op = registry.load(name)
    return dataclasses.replace(op, check=[op.check[number] for number in CASES[op.name]])


_references_of: dict[str, ReferenceRuns] = {}


def _references(op: Op, device: str, seed: int) -> ReferenceRuns:
    return _references_of.setdefault(op.name, ReferenceRuns(op, device, seed))


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        pytest.fail(f"the check itself takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_submissions_that_need_a_gpu_have_a_record_of_their_verdict():
    found = record.read(settings.results_dir() / "h200" / "submissions.jsonl").records
    verdicts = {(r["file"], r["source"]): r["verdict"] for r in found}
    for path in FOLDER.glob("*/*.py"):
        named = _constants(path)
        if named.get("NEEDS") == "gpu":
            name = path.relative_to(FOLDER.parent.parent).as_posix()
            assert verdicts[name, source.file_hash(path)] == named["EXPECTED"]


@pytest.mark.parametrize("path", _submissions())
def test_a_submission_gets_its_verdict(path, device, tmp_path, monkeypatch):
    named = {"OP": "softmax", "EXPECTED": "right", "LABELS": [], "DEPTH": "quick", **_constants(path)}
    patient = functools.partial(Worker, seconds=SECONDS.get(named["EXPECTED"], 12.0))
    monkeypatch.setattr(checking, "Worker", patient)
    monkeypatch.setattr(checking, "ReferenceRuns", _references)
    monkeypatch.setattr(judge, "MAX_CRASHES", MAX_CRASHES)
    op = _op(named["OP"])
    for file in (path, *path.parent.glob("_*.py")):
        shutil.copy(file, tmp_path)
    canary = tmp_path / "canary.txt"
    canary.write_text("alive")
    with _time_limit(LIMIT), socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "port.txt").write_text(str(server.getsockname()[1]))
        try:
            options = {"dtypes": DTYPES, "seed": SEED, "depth": named["DEPTH"]}
            (found,) = checking.check(op, [], [tmp_path / path.name], device=device, **options)
            verdict, labels, reason = found.verdict, found.labels, found.reason
        except InvalidKernelFile as unusable:
            verdict, labels, reason = "unusable", [], str(unusable)
    assert verdict == named["EXPECTED"], reason
    for wanted in named["LABELS"]:
        assert any(label.startswith(wanted) for label in labels), f"lacks the label '{wanted}' among {labels}"
    assert canary.read_text() == "alive"

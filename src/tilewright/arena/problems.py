"""Problems of an arena: our operations, and problem files in any format that `tilewright check --problem` takes.

A problem is stored with its files, so that a worker on another machine needs nothing but the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tilewright import hardware, source
from tilewright.cost import Cost
from tilewright.errors import BadDeadline, BadProblem, UnknownGPU, UnknownRule

if TYPE_CHECKING:
    from tilewright.spec import Case, Op
    from tilewright.workbench.check.problems import Problem

OP = "op"
RULES = ("geomean", "share", "fast_p")
PREDICTED = " predicted"  # ends the name of a board without measurements
ENTRY = "entry"  # the key, among the files, of the path to load
MAX_BYTES = 2**22  # for all files of a problem
TIMED_CASES = 4  # timed by default if the problem is an Op
IGNORED = ("__pycache__", ".git")


@dataclass(frozen=True)
class Board:
    """A GPU, and whether times on it are measured or predicted."""

    gpu: str
    is_predicted: bool

    @staticmethod
    def parse(name: str) -> Board:
        gpu = name.removesuffix(PREDICTED)
        return Board(gpu, gpu != name)

    @property
    def name(self) -> str:
        return self.gpu + PREDICTED * self.is_predicted


@dataclass(frozen=True)
class Loaded:
    """A problem that can be judged."""

    op: Op
    cases: list[Case]  # to be timed
    problem: Problem | None = None  # None for our own Ops


def describe(
    target: str,
    *,
    boards: Sequence[str] = (),
    cases: Sequence[str] = (),
    rule: str = "geomean",
    threshold: float = 1.0,
    deadline: str = "",
    private: bool = False,
    name: str = "",
) -> dict[str, Any]:
    """Return the fields of a problem after loading it once; raise if it does not load."""
    if rule not in RULES:
        raise UnknownRule(rule, RULES)
    boards = [_known_board(board).name for board in boards]
    if target in source.op_files():
        fields: dict[str, Any] = {"kind": OP, "files": {ENTRY: target}, "name": name or target}
    else:
        files = _collect(Path(target))
        fields = {"kind": "", "files": files, "name": name or _slug(Path(files[ENTRY]).stem, Path(target))}
    fields |= {"cases": [*cases], "dtype": "", "boards": boards, "rule": rule, "threshold": threshold}
    fields |= {"deadline": deadline, "private": private}
    with loaded(fields) as found:
        fields["cases"], fields["dtype"] = [str(case) for case in found.cases], found.cases[0].dtype
        fields["kind"] = found.problem.kind if found.problem else OP
        fields["description"] = _description(found)
    return fields


@contextmanager
def loaded(problem: Mapping[str, Any]) -> Iterator[Loaded]:
    """Load a stored problem: its files are written to a temporary folder for as long as it is used."""
    import tempfile

    from tilewright import registry
    from tilewright.spec import Case
    from tilewright.workbench.check import problems

    entry = problem["files"][ENTRY]
    if problem["kind"] == OP:
        op = registry.load(entry)
        dtype = problem["dtype"] or op.bench_dtype
        cases = [Case.parse(text, like=op.bench[0]) for text in problem["cases"]] or _spread(op.bench)
        yield Loaded(op, [case.with_dtype(dtype) for case in cases])
        return
    with tempfile.TemporaryDirectory(prefix="tilewright-problem-", ignore_cleanup_errors=True) as folder:
        for path, text in problem["files"].items():
            if path != ENTRY:
                (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / path).write_text(text, encoding="utf-8")
        found = problems.load(Path(folder) / entry)
        try:
            if problem["cases"] != [str(case) for case in found.op.check]:
                found.select(problem["cases"], device="cuda" if hardware.has_gpu() else "cpu")
            found.op.cost = lambda *args: _traffic(found.op, args)
            yield Loaded(found.op, list(found.op.check), found)
        finally:
            found.close()


def parse_deadline(text: str) -> str:
    """Return a date and time as ISO text in UTC; without a zone it is UTC."""
    if not text:
        return ""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadDeadline(text) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).astimezone(timezone.utc).isoformat()


def statement(problem: Mapping[str, Any]) -> str:
    """Return the text that an author reads: the op file, or the files of the problem."""
    files = problem["files"]
    if problem["kind"] == OP:
        return source.op_files()[files[ENTRY]].read_text(encoding="utf-8")
    texts = {path: text for path, text in files.items() if path != ENTRY}
    return next(iter(texts.values())) if len(texts) == 1 else "\n\n".join(f"# {p}\n{text}" for p, text in texts.items())


def _spread(cases: Sequence[Case]) -> list[Case]:
    """Return a few of the cases, from the first to the last."""
    count = min(TIMED_CASES, len(cases))
    return [cases[round(n * (len(cases) - 1) / max(1, count - 1))] for n in range(count)]


def _traffic(op: Op, args: Sequence[Any]) -> Cost:
    """Return the bytes of the inputs and results: the minimum of a problem that does not state its cost."""
    from torch import Tensor
    from torch.utils import _pytree as pytree

    try:
        results = pytree.tree_leaves(op.reference(*args))
    except Exception:  # a reference may not run without values
        results = []
    read, written = (sum(one.nbytes for one in group if isinstance(one, Tensor)) for group in (args, results))
    return Cost(read, written)


def _known_board(name: str) -> Board:
    board = Board.parse(name)
    try:
        gpu = hardware.datasheet(board.gpu).name
    except UnknownGPU:
        if board.is_predicted:
            raise
        gpu = board.gpu  # can be measured without a datasheet
    return Board(gpu, board.is_predicted)


def _collect(path: Path) -> dict[str, str]:
    """Return the files of a problem by relative path, and the one to load under ENTRY."""
    if not path.exists():
        raise BadProblem(path, "it does not exist, and no operation has this name")
    if path.is_file() and path.suffix in (".yml", ".yaml"):
        path = path.parent
    if path.is_file():
        return {ENTRY: path.name, path.name: _text(path)}
    inside = [p for p in sorted(path.rglob("*")) if p.is_file() and not {*p.parts} & {*IGNORED}]
    outside = _named_outside(path)
    root = path.resolve().parent if outside else path.resolve()
    found = {(p.resolve().relative_to(root)).as_posix(): p for p in [*inside, *outside]}
    if sum(p.stat().st_size for p in found.values()) > MAX_BYTES:
        raise BadProblem(path, f"its files have more than {MAX_BYTES // 2**20} MiB")
    entry = path.resolve().relative_to(root).as_posix()
    return {ENTRY: entry} | {relative: _text(p) for relative, p in found.items()}


def _named_outside(folder: Path) -> list[Path]:
    """Return the files in the parent folder that a task.yml names, as in gpu-mode's repository."""
    task = folder / "task.yml"
    names = re.findall(r"\.\./([\w.-]+)", task.read_text(errors="replace")) if task.is_file() else []
    return [folder.parent / name for name in dict.fromkeys(names) if (folder.parent / name).is_file()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise BadProblem(path, "it is not a text file") from None


def _slug(stem: str, path: Path) -> str:
    name = path.name if path.is_dir() else stem
    return re.sub(r"[^\w.-]+", "-", PurePosixPath(name).stem).strip("-.") or "problem"


def _description(found: Loaded) -> str:
    if found.problem is None:
        return source.read(source.op_files()[found.op.name]).summary
    return f"{found.problem.kind} problem with {len(found.cases)} case{'s' if len(found.cases) != 1 else ''}"

"""Problems of an arena: our operations, users' own, and any format that `tilewright check --problem` takes.

A problem is stored with its files, so that a worker on another machine needs nothing but the job.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tilewright import hardware, source
from tilewright.arena.errors import BadBoard, BadDeadline, CannotAddProblem, UnknownRule
from tilewright.cost import Cost
from tilewright.errors import BadProblem, TilewrightError, UnknownGPU

if TYPE_CHECKING:
    from tilewright.spec import Case, Op
    from tilewright.workbench.check.problems import Problem

OP, OWN = "op", "own file"
KINDS = {
    OP: "operation of Tilewright",
    OWN: "own problem",
    "kernelbench": "KernelBench problem",
    "gpu-mode": "gpu-mode task",
    "flashinfer-bench": "flashinfer-bench definition",
}
RULES = ("geomean", "share", "fast_p")
PREDICTED = " predicted"  # ends the name of a board without measurements
ENTRY = "entry"  # the key, among the files, of the path to load
MAX_BYTES = 2**22  # for all files of a problem
MAX_BOARD_NAME = 80
TIMED_CASES = 4  # timed by default if the problem is an Op
IGNORED = ("__pycache__", ".git")
NAME = re.compile(r"\w[\w.+-]{0,79}")  # part of addresses
BOARD_NAME = re.compile(r"\w[\w.+-]*( [\w.+-]+)*")  # likewise
# The part of an op file that stands before the kernels.
OP_MATHEMATICS = re.compile(r"^def reference\(.*?^op = \w+\((?:[^\n]*\)$|.*?^\))", re.MULTILINE | re.DOTALL)
FORMATS = (
    "an operation, a file with `reference` and `inputs`, a KernelBench file, a gpu-mode folder with task.yml, or a "
    "flashinfer-bench definition"
)


@dataclass(frozen=True)
class EntryPoint:
    """The function or class that a submission defines."""

    name: str
    what: str
    arguments: str  # what it takes and returns


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


ENTRY_POINTS = {
    "kernelbench": EntryPoint("ModelNew", "class", "with the constructor and forward of Model"),
    "gpu-mode": EntryPoint("custom_kernel", "function", "with the argument and the result of ref_kernel"),
    "flashinfer-bench": EntryPoint("run", "function", "with the arguments of run in the definition"),
}


@dataclass(frozen=True)
class Loaded:
    """A problem that can be judged."""

    op: Op
    cases: list[Case]  # to be timed
    problem: Problem | None = None  # if it is in a third party's format


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
    """Return the fields of a problem after loading it once; raise CannotAddProblem if it does not load."""
    if rule not in RULES:
        raise UnknownRule(rule, RULES)
    given = {"cases": [*cases], "dtype": "", "rule": rule, "threshold": threshold, "deadline": deadline}
    given |= {"boards": [_known_board(board).name for board in boards], "private": private}
    with tempfile.TemporaryDirectory(prefix="tilewright-problem-", ignore_cleanup_errors=True) as folder:
        try:
            fields = _identity(target, name) | given
            with loaded(fields, Path(folder)) as found:
                fields["cases"], fields["dtype"] = [str(case) for case in found.cases], found.cases[0].dtype
                fields["kind"] = found.problem.kind if found.problem else fields["kind"]
                fields["description"] = _description(found)
        except BadProblem as error:
            raise CannotAddProblem(target, f"{error.why}; give {FORMATS}".replace(f"{folder}/", "")) from error
        except TilewrightError as error:
            raise CannotAddProblem(target, str(error).replace(f"{folder}/", "")) from error
    if not NAME.fullmatch(fields["name"]):
        raise CannotAddProblem(target, f"'{fields['name']}' is no name; use letters, digits and `_.+-`, at most 80")
    return fields


def _identity(target: str, name: str) -> dict[str, Any]:
    """Return the kind, files and name of a problem that has not been loaded yet."""
    if target in source.op_files():
        found: dict[str, Any] = {"kind": OP, "files": {ENTRY: target}, "name": name or target}
    else:
        files = _collect(Path(target))
        kind = OWN if _defines_reference(files) else ""
        found = {"kind": kind, "files": files, "name": name or _slug(Path(files[ENTRY]).stem, Path(target))}
    return found


@contextlib.contextmanager
def loaded(problem: Mapping[str, Any], folder: Path | None = None) -> Iterator[Loaded]:
    """Load a stored problem. Its files are written to `folder`, or to a temporary one for as long as it is used."""
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
    with contextlib.ExitStack() as stack:
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="tilewright-problem-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(temporary))
        for path, text in problem["files"].items():
            if path != ENTRY:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
        if problem["kind"] == OWN:
            yield _own(folder / entry, problem)
            return
        found = problems.load(folder / entry)
        try:
            own = {str(case): case for case in found.timed}  # whose size is not limited
            cases = [own.get(text) or found.parse(text) for text in problem["cases"]] or found.timed
            found.op.cost = lambda *args: _traffic(found.results, args)
            yield Loaded(found.op, cases, found)
        finally:
            found.close()


def _own(path: Path, problem: Mapping[str, Any]) -> Loaded:
    from tilewright.own import load_operation
    from tilewright.spec import Case

    op = load_operation(path)
    dtype = problem["dtype"] or op.bench_dtype
    cases = [Case.parse(text, like=op.bench[0]) for text in problem["cases"] if text] or _spread(op.bench)
    stated = op.cost
    results = lambda args: (args, op.reference(*args))
    op.cost = lambda *args: cost if (cost := stated(*args)).bytes else _traffic(results, args)
    return Loaded(op, [case.with_dtype(dtype) for case in cases])


def parse_deadline(text: str) -> str:
    """Return a date and time as ISO text in UTC; without a zone it is UTC."""
    if not text:
        return ""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadDeadline(text) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).astimezone(timezone.utc).isoformat()


def entry_point(problem: Mapping[str, Any]) -> EntryPoint:
    """Return what a submission has to define; a problem may have another name than its operation."""
    if known := ENTRY_POINTS.get(problem["kind"]):
        return known
    return EntryPoint(PurePosixPath(problem["files"][ENTRY]).stem, "function", "with the arguments of reference")


def statement(problem: Mapping[str, Any]) -> str:
    """Return the text that an author reads: reference, cost and cases of an operation, or the files of the problem."""
    files = problem["files"]
    if problem["kind"] == OP:
        path = source.op_files()[files[ENTRY]]
        text = path.read_text(encoding="utf-8")
        mathematics = OP_MATHEMATICS.search(text)
        return f"# from {source.module_name(path)}\n\n{mathematics.group() if mathematics else text}"
    texts = {path: text for path, text in files.items() if path != ENTRY}
    return next(iter(texts.values())) if len(texts) == 1 else "\n\n".join(f"# {p}\n{text}" for p, text in texts.items())


def _spread(cases: Sequence[Case]) -> list[Case]:
    """Return a few of the cases, from the first to the last."""
    count = min(TIMED_CASES, len(cases))
    return [cases[round(n * (len(cases) - 1) / max(1, count - 1))] for n in range(count)]


def _traffic(run: Callable[[Sequence[Any]], tuple[Sequence[Any], Any]], args: Sequence[Any]) -> Cost:
    """Return the bytes of the inputs and results: the minimum of a problem that does not state its cost.

    An argument that the reference returns is counted once: it may be an output buffer, which nobody reads.
    """
    from torch import Tensor
    from torch.utils import _pytree as pytree

    try:
        inputs, results = run(args)
    except Exception:  # a reference may not run without values
        inputs, results = args, ()
    written = [one for one in pytree.tree_leaves(results) if isinstance(one, Tensor)]
    returned = {one.untyped_storage()._cdata for one in written}
    read = [one for one in inputs if isinstance(one, Tensor) and one.untyped_storage()._cdata not in returned]
    return Cost(sum(one.nbytes for one in read), sum(one.nbytes for one in written))


def _known_board(name: str) -> Board:
    if not BOARD_NAME.fullmatch(name) or len(name) > MAX_BOARD_NAME:
        raise BadBoard(name)
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
    if path.suffix == ".json":
        return _with_workloads(path)
    if path.is_file():
        return {ENTRY: path.name, path.name: _text(path)}
    inside = [p for p in sorted(path.rglob("*")) if p.is_file() and not {*p.parts} & {*IGNORED}]
    if link := next((p for p in inside if not p.resolve().is_relative_to(path.resolve())), None):
        raise BadProblem(path, f"its {link.relative_to(path)} is a link that leads out of it")
    outside = _named_outside(path)
    root = Path(os.path.commonpath([path.resolve(), *(one.parent for one in outside)]))
    if not inside:
        raise BadProblem(path, "it holds no problem")
    found = {(p.resolve().relative_to(root)).as_posix(): p for p in [*inside, *outside]}
    if sum(p.stat().st_size for p in found.values()) > MAX_BYTES:
        raise BadProblem(path, f"its files have more than {MAX_BYTES // 2**20} MiB")
    entry = path.resolve().relative_to(root).as_posix()
    return {ENTRY: entry} | {relative: _text(p) for relative, p in found.items()}


def _with_workloads(path: Path) -> dict[str, str]:
    """Return a flashinfer-bench definition with its workloads, at the places that they have in a dataset."""
    found = {ENTRY: f"definitions/{path.name}", f"definitions/{path.name}": _text(path)}
    root = next((parent.parent for parent in path.resolve().parents if parent.name == "definitions"), path.parent)
    for file in (*sorted((root / "workloads").rglob(f"{path.stem}.jsonl")), path.with_suffix(".jsonl")):
        if file.is_file():
            found[f"workloads/{len(found)}/{path.stem}.jsonl"] = _text(file)
    if sum(map(len, found.values())) > MAX_BYTES:
        raise BadProblem(path, f"it and its workloads have more than {MAX_BYTES // 2**20} MiB")
    return found


def _named_outside(folder: Path) -> list[Path]:
    """Return the files above the folder that a task.yml names, as in gpu-mode's repository."""
    task = folder / "task.yml"
    names = re.findall(r"(?:\.\./)+[\w.-]+", task.read_text(errors="replace")) if task.is_file() else []
    return [path for name in dict.fromkeys(names) if (path := (folder / name).resolve()).is_file()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise BadProblem(path, "it is not a text file") from None


def _slug(stem: str, path: Path) -> str:
    name = path.name if path.is_dir() else stem
    return re.sub(r"[^\w.-]+", "-", PurePosixPath(name).stem).strip("-.") or "problem"


def _defines_reference(files: Mapping[str, str]) -> bool:
    """Return whether the file to load is an operation of a user, with `reference` and `inputs`."""
    try:
        tree = ast.parse(files.get(files[ENTRY], ""))
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == "reference" for node in tree.body)


def _description(found: Loaded) -> str:
    if found.op.file:
        summary = (inspect.getdoc(found.op.reference) or "").partition("\n")[0]
        return summary or f"the function `{found.op.file.stem}`, like `reference`"
    if found.problem is None:
        return source.read(source.op_files()[found.op.name]).summary
    count = len(found.cases)
    return f"A {KINDS[found.problem.kind]} with {count} {'case' if count == 1 else 'cases'}."

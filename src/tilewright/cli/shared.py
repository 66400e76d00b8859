"""What the commands share: how their arguments read, and how they speak."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import settings, source
from tilewright.errors import (
    ADirectory,
    BadCase,
    CorruptRecords,
    NotAnOp,
    SameName,
    UnknownDtype,
    UnknownOp,
    first_line,
)

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.spec import Case, Op
    from tilewright.workbench.bench import Timing
    from tilewright.workbench.check import Verdict

GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
LARGEST_CASE = 2**34  # elements: beyond, the inputs alone pass any GPU's memory
OF_AN_OP = {"files", "kernel", "case", "dtype", "direction", "diff", "predict"}

OpName = Annotated[str, typer.Argument(metavar="OP", help="An operation; `tilewright ops` lists them.")]
Files = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Kernels of your own, one a file.")]
Kernels = Annotated[list[str] | None, typer.Option("--kernel", "-k", help="Only this kernel; may be repeated.")]
CaseText = Annotated[list[str] | None, typer.Option("--case", "-c", help="Sizes, as M=64,N=1000; may be repeated.")]
OwnKernels = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Your kernels of OP.")]
FunctionName = Annotated[
    str | None, typer.Option("--function", "-f", help="Of FILE: the one to call; of a .cu file the kernel.")
]
Inputs = Annotated[
    list[str] | None, typer.Option("--input", "-i", help="Of FILE: 64x1000:bfloat16, 7 or 0.5; may be repeated.")
]
Threads = Annotated[int, typer.Option(min=1, help="Of a .cu file: threads of a block.")]
SharedBytes = Annotated[int, typer.Option(min=0, help="Of a .cu file: bytes of shared memory a launch asks for.")]
DtypeName = Annotated[list[str] | None, typer.Option("--dtype", "-d", help="float32, float16 or bfloat16.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")]


def one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def load_op(name: str, files: list[Path] | None) -> Op:
    if name not in source.op_files():
        raise UnknownOp(name, source.op_files())
    require_files(files or [])
    from tilewright import registry

    return registry.load(name)


def kind_of(target: str) -> str:
    """What is named: "op", or a file that is "py" or "cu"."""
    path = Path(target)
    if target in source.op_files():
        return "op"
    if path.is_dir():
        raise ADirectory(path)
    if target.endswith((".py", ".cu")):
        return target[-2:]
    if path.exists():
        raise NotAnOp(path)
    return "op"


def refuse(ctx: typer.Context, unheeded: Collection[str], why: str) -> None:
    """Parameters that were given, and would change nothing."""
    given = [p for p in ctx.command.params if p.name in unheeded and _is_given(ctx, p.name)]
    if given:
        names = (p.opts[0] if p.param_type_name == "option" else (p.metavar or "").strip("[].") for p in given)
        raise typer.BadParameter(f"{', '.join(names)}: {why}.")


def _is_given(ctx: typer.Context, name: str) -> bool:
    origin = ctx.get_parameter_source(name)
    return origin is not None and origin.name == "COMMANDLINE"


def refuse_of_another_kind(ctx: typer.Context, kind: str) -> None:
    """Of an operation, a Python file or a CUDA C++ file, what is for one of the others."""
    if kind == "op":
        refuse(ctx, {"function", "given"}, "for a FILE; an operation has its own inputs")
    else:
        own = "--input and --function" if kind == "py" else "--function and --threads"
        refuse(ctx, OF_AN_OP, f"for an OP; a .{kind} FILE has {own}")
    if kind == "cu":
        refuse(ctx, {"given"}, "for a .py FILE; a .cu FILE is compiled and not called")
    else:
        refuse(ctx, {"threads", "shared"}, "for a .cu FILE; others say it themselves")


def op_names(text: str | None) -> list[str]:
    """Those named with commas between, each once; all of them unless told."""
    return list(dict.fromkeys(name.strip() for name in text.split(","))) if text else list(source.op_files())


def require_files(paths: list[Path]) -> None:
    names = [path.name for path in paths]
    for path in paths:
        source.require_python_file(path)
        if names.count(path.name) > 1:
            raise SameName(path.name)


def start_worker_early() -> None:
    """A worker imports torch while we do. Where there may be a GPU it is not known yet what kind to start."""
    from tilewright.worker.process import nursery

    if not any(Path(device).exists() for device in GPU_DEVICES):
        nursery("cpu")


def exit_unless_good(found: Sequence[Verdict | Timing]) -> None:
    from tilewright.workbench.check import NOT_RIGHT

    if any(one.verdict in (*NOT_RIGHT, "implausible") for one in found):
        raise typer.Exit(1)


@contextmanager
def recorded() -> Iterator[list[dict[str, Any]]]:
    """The newest records of every kind; lines that cannot be read are told once the rest has been used."""
    from tilewright.record import latest, read

    found = [read(path) for path in settings.record_files()]
    for file in found:
        for number in file.torn:
            print(f"tilewright: {file.path}, line {number} was cut off while written; skipped", file=sys.stderr)
        for number in file.newer:
            newer = "was written by a newer version of Tilewright; skipped: update to read it"
            print(f"tilewright: {file.path}, line {number} {newer}", file=sys.stderr)
    yield list(latest([r for file in found for r in file.records]))
    for file in found:
        if file.corrupt:
            raise CorruptRecords(file.path, file.corrupt)


def cases_of(op: Op, texts: list[str] | None) -> list[Case] | None:
    """The cases named on the command line; None for the op's own."""
    from tilewright.spec import Case

    cases = [Case.parse(text, like=op.check[-1]) for text in texts or []]
    for case, text in zip(cases, texts or [], strict=True):
        try:
            shapes = op.make(case, device="meta")
            op.reference(*shapes)
        except Exception as error:
            raise BadCase(text, f"{op.name} does not take it ({first_line(error)})", str(op.check[-1])) from None
        size = sum(a.numel() for a in shapes if hasattr(a, "numel"))
        if size > LARGEST_CASE:
            raise BadCase(text, f"it has {size} elements, more than the {LARGEST_CASE} allowed", str(op.check[-1]))
    return cases or None


def dtypes_of(op: Op, names: list[str] | None) -> list[str] | None:
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    full = [short.get(name, name) for name in names or []]
    for name in full:
        if name not in op.dtypes:
            raise UnknownDtype(name, op.dtypes)
    return full or None


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=160)


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that is gone when the work is done; nothing where no one watches."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    left = (TimeRemainingColumn(), TextColumn("left")) if total else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *left)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(title, total=total)

        def advance(step: str) -> None:
            bar.update(task, advance=1, description=f"{title}: {step}" if step else title)

        yield advance


def say_next(what: str) -> None:
    print(f"\nNext: {what.strip()}")

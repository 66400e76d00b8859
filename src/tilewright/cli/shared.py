"""Functions that several commands share: loading what the arguments name, reading records, and printing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright import settings, source
from tilewright.arguments import parse_cases as parse_cases
from tilewright.arguments import parse_dtypes as parse_dtypes
from tilewright.errors import CannotRead, CorruptRecords, DuplicateFileName, FileMissing, NewerRecords, UnknownOp

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilewright.spec import Op
    from tilewright.timer import Timer
    from tilewright.workbench.bench import Timing
    from tilewright.workbench.bench.ceilings import Ceilings
    from tilewright.workbench.check import Verdict

GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
WIDTH = 160  # columns if the output is a file or a pipe


def one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def load_op(name: str, files: list[Path] | None = None) -> Op:
    """Load an operation, after checking that it and the user's files exist."""
    if name not in source.op_files():
        raise UnknownOp(name, source.op_files())
    require_files(files or [])
    from tilewright import registry

    return registry.load(name)


def op_names(text: str | None) -> list[str]:
    """Return the operations in a comma-separated list, without repetitions; all operations by default.

    A folder of operations, such as `norm/`, stands for those in it.
    """
    if not text:
        return list(source.op_files())
    folders: dict[str, list[str]] = {}
    for name, path in source.op_files().items():
        folders.setdefault(f"{path.parent.name}/", []).append(name)
    given = [name.strip() for name in text.split(",")]
    return list(dict.fromkeys(name for one in given for name in folders.get(one, [one])))


def require_files(paths: list[Path], suffixes: Sequence[str] = (".py",)) -> None:
    names = [path.name for path in paths]
    for path in paths:
        if path.suffix == ".py" or path.suffix not in suffixes:
            source.require_python_file(path)
        elif not path.is_file():
            raise FileMissing(path)
        if names.count(path.name) > 1:
            raise DuplicateFileName(path.name)


def require_outputs(record: Path | None, html: Path | None) -> None:
    """Raise before the work starts if a result could not be written."""
    from tilewright.record import require_writable

    if record and html and record.resolve() == html.resolve():
        raise typer.BadParameter("--record and --html name the same file; the page would overwrite the records.")
    for path in filter(None, (record, html)):
        require_writable(path)


def require_choice(option: str, given: str, choices: Collection[str]) -> None:
    if given not in choices:
        raise typer.BadParameter(f"{option}: '{given}' is not one of {', '.join(choices)}.")


def start_worker_early() -> None:
    """Let a worker import torch while this process does. With a GPU, the kind of worker is not known yet."""
    from tilewright.worker.process import fork_server

    if not any(Path(device).exists() for device in GPU_DEVICES):
        fork_server("cpu")


def exit_unless_correct(found: Sequence[Verdict | Timing]) -> None:
    from tilewright.workbench.check import NOT_RIGHT

    if any(one.verdict in (*NOT_RIGHT, "implausible") for one in found):
        raise typer.Exit(1)


def measure_ceilings(timer: Timer, fresh: bool) -> Ceilings:
    """Return the ceilings of this GPU, and say so if those of the last hour are reused."""
    from tilewright.workbench.bench.ceilings import current

    with progress("measuring the ceilings of this GPU", None) as advance:
        advance("")
        found = current(timer, fresh=fresh)
    if found.age_s is not None:
        warn(f"using the ceilings measured {found.age_s / 60:.0f} min ago; --fresh measures them again")
    return found


@contextlib.contextmanager
def newest_records() -> Iterator[list[dict[str, Any]]]:
    """Yield the newest record of each call in the results folder; on leaving, raise if a line was corrupt."""
    from tilewright.record import latest, read

    found = [read(path) for path in settings.record_files()]
    for file in found:
        warn_of_torn_lines(file.path, file.torn)
        for number in file.newer:
            warn(f"{file.path}, line {number} was written by a newer version of Tilewright; update to read it")
    yield list(latest([r for file in found for r in file.records]))
    for file in found:
        if file.corrupt:
            raise CorruptRecords(file.path, file.corrupt)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a file of records that the user named; raise if any line is not a record."""
    from tilewright.record import read

    found = read(path)
    warn_of_torn_lines(path, found.torn)
    if found.newer:
        raise NewerRecords(path, found.newer)
    if found.corrupt and not found.records:
        raise CannotRead(path, "none of its lines is a record")
    if found.corrupt:
        raise CorruptRecords(path, found.corrupt)
    return found.records


def warn_of_torn_lines(path: Path, lines: list[int]) -> None:
    for number in lines:
        warn(f"{path}, line {number} is incomplete (an interrupted write); skipped")


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: `[i, j]` in a formula is not markup, and `:x:` is not an emoji."""
    from rich.console import Console

    plain: Any = {"stderr": stderr, "markup": False, "emoji": False, "highlight": False}
    console = Console(**plain)
    return console if console.is_terminal else Console(**plain, width=WIDTH)


def table(*left: str, right: Sequence[str] = (), last: Sequence[str] = (), title: str | None = None) -> Table:
    """Return an empty table without lines: text columns, right-aligned numbers, then text columns again."""
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=Text(title) if title else None, title_justify="left", box=None, pad_edge=False, header_style="bold"
    )
    for column in left:
        made.add_column(column, overflow="fold")
    for column in right:
        made.add_column(column, justify="right", no_wrap=True)
    for column in last:
        made.add_column(column, overflow="fold")
    return made


@contextlib.contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr while the context is open, if stderr is a terminal."""
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


def bottleneck(unit: str) -> str:
    """Return the name of a unit of Cost.floor for a table: all kinds of DRAM traffic are memory."""
    return "memory" if unit in ("copy", "read", "write") else unit


def stdout_to_stderr() -> contextlib.AbstractContextManager[Any]:
    """Keep what a user's launcher prints out of our output."""
    return contextlib.redirect_stdout(sys.stderr)


def warn(message: str) -> None:
    print(f"tilewright: {message}", file=sys.stderr)


def say_next(what: str) -> None:
    print(f"\nNext: {what.strip()}")

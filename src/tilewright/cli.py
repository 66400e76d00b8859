"""The commands. Each imports what it needs when it runs, so that --help needs no torch."""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tilewright import __version__, settings, source
from tilewright.errors import (
    BadBlock,
    BadCase,
    CorruptRecords,
    NoGPU,
    NothingChecked,
    SameName,
    TilewrightError,
    UnknownDtype,
    UnknownOp,
    first_line,
)

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.spec import Case, Op
    from tilewright.tools.bench import Timing
    from tilewright.tools.check import Verdict

LARGEST_CASE = 2**34  # elements: beyond, the inputs alone pass any GPU's memory

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Proven, fast GPU kernels for PyTorch, and the workbench they were proven on.",
)

OpName = Annotated[str, typer.Argument(metavar="OP", help="An operation; `tilewright ops` lists them.")]
Files = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Kernels of your own, one a file.")]
Kernels = Annotated[list[str] | None, typer.Option("--kernel", "-k", help="Only this kernel; may be repeated.")]
CaseText = Annotated[list[str] | None, typer.Option("--case", "-c", help="Sizes, as M=64,N=1000; may be repeated.")]
DtypeName = Annotated[list[str] | None, typer.Option("--dtype", "-d", help="float32, float16 or bfloat16.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")]


def main() -> None:
    """Run the command line: errors are one line on stderr; 0 good, 1 the kernel is not, 2 the user's mistake."""
    warnings.filterwarnings("ignore", module="torch")  # its advice to the author of a kernel is not the verdict
    try:
        code = app(standalone_mode=False)
    except TilewrightError as error:
        _fail(_one_line(error))
    except KeyboardInterrupt:
        _fail("stopped", code=130)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader left: nothing more to say to it
        sys.exit(0)
    except Exception as error:
        if hasattr(error, "format_message"):  # the argument parser's own complaint
            _fail(f"{error.format_message()} See: tilewright --help")  # type: ignore[attr-defined]
        if type(error).__name__ == "Abort":
            _fail("stopped", code=130)
        if settings.debug():
            raise
        _fail(f"unexpected {type(error).__name__}: {_one_line(error)}; set TILEWRIGHT_DEBUG=1 to see where", code=3)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"tilewright: {message}", file=sys.stderr)
    sys.exit(code)


def _one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tilewright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="And exit.")
    ] = False,
) -> None: ...


@app.command()
def ops(as_json: AsJson = False) -> None:
    """List the operations and the kernels that compute them."""
    entries = [(name, source.read(path)) for name, path in source.op_files().items()]
    if as_json:
        for name, entry in entries:
            print(json.dumps({"op": name, "summary": entry.summary, "kernels": entry.kernels}))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("op", "what it computes", "kernels"):
        table.add_column(column)
    for name, entry in entries:
        table.add_row(name, entry.summary, ", ".join(entry.kernels))
    _console().print(table)
    _next("tilewright check OP   or   tilewright bench OP")


@app.command()
def check(
    op_name: OpName,
    files: Files = None,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 2, help="Repeat a run: the seed its JSON names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Is it right? Hold every kernel of OP, or those in FILEs, against float64 on many cases."""
    op = _load(op_name, files)
    cases, dtypes = _cases(op, case), _dtypes(op, dtype)
    found = _check(op, files or [], kernel or [], cases, dtypes, seed, as_json)
    _exit_unless_good(found)
    if not any(verdict.verdict == "right" for verdict in found):
        raise NothingChecked("; ".join(dict.fromkeys(f"{verdict.kernel} {verdict.reason}" for verdict in found)))
    if not as_json:
        _next(shlex.join(["tilewright", "bench", op_name, *map(str, files or [])]))


@app.command()
def bench(
    op_name: OpName,
    files: Files = None,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    direction: Annotated[str, typer.Option(help="forward, backward or both.")] = "forward",
    samples: Annotated[int | None, typer.Option(min=3, help="Timed calls of each kernel; 50 unless told.")] = None,
    record: Annotated[Path | None, typer.Option(help="Append every timing to this file, as JSON lines.")] = None,
    as_json: AsJson = False,
) -> None:
    """How fast is it? Time every right kernel of OP, and those in FILEs, against the ceiling measured here.

    Without a GPU: check what can run here, and show the recorded timings.
    """
    from tilewright import hardware
    from tilewright.record import require_writable

    if direction not in ("forward", "backward", "both"):
        raise typer.BadParameter(f"'{direction}' is none of forward, backward, both.")
    op = _load(op_name, files)
    cases, dtypes = _cases(op, case), _dtypes(op, dtype)
    if record:
        require_writable(record)
    if hardware.has_gpu():
        timed = [c.with_dtype(d) for d in dtypes or [op.bench_dtype] for c in cases or op.bench]
        _bench_here(op, files or [], kernel or [], timed, direction, samples, record, as_json)
    else:
        _bench_recorded(op, files or [], kernel or [], cases, dtypes, direction, as_json)
        if record:
            print(f"tilewright: no GPU, so nothing was recorded in {record}", file=sys.stderr)


@app.command()
def gpu(
    name: Annotated[str | None, typer.Argument(help="A GPU of the table, by its short name.")] = None,
    measure: Annotated[bool, typer.Option(help="Also measure this GPU's bandwidth and matrix rates.")] = False,
    as_json: AsJson = False,
) -> None:
    """What GPU is this, and how fast can it be? Or, with a name, what its datasheet says."""
    from tilewright import hardware
    from tilewright.report import terminal

    if measure and name:
        raise typer.BadParameter("--measure is for the GPU in hand: leave out the name.")
    if measure and not hardware.has_gpu():
        raise NoGPU("--measure")
    if name:
        sheet = hardware.datasheet(name)
        content = {**vars(sheet), "tera": dict(sheet.tera)}
    elif hardware.has_gpu():
        content = hardware.in_hand()
        if measure:
            from tilewright.tools.bench import Timer
            from tilewright.tools.bench import measure as measure_ceilings

            content["ceilings"] = measure_ceilings(
                Timer(), ["tensor.bfloat16", "tensor.float16", "tensor.tf32", "fp32"]
            )
    else:
        content = {"gpu": None, "known": sorted(hardware.DATASHEETS)}
    if as_json:
        print(json.dumps(content))
        return
    if content.get("gpu", "") is None:
        _console().print("No GPU here: kernels are checked without one, and recorded timings are shown.")
        _console().print(f"Datasheets: {', '.join(content['known'])}")
        _next("tilewright gpu h200")
        return
    _console().print(terminal.pairs(content, ""))
    _next("tilewright bench softmax")


@app.command()
def report(
    pages: Annotated[list[Path], typer.Argument(metavar="PAGE...", help="Markdown pages with records blocks.")],
) -> None:
    """Make the tables of Markdown pages anew from the recorded timings."""
    from tilewright.errors import CannotWrite, FileMissing
    from tilewright.report import markdown

    with _recorded() as records:
        for page in pages:
            if not page.is_file():
                raise FileMissing(page, "a Markdown page")
            try:
                page.write_text(markdown.fill(page.read_text(), records))
            except markdown.Unfillable as error:
                raise BadBlock(page, str(error)) from None
            except (OSError, UnicodeDecodeError) as error:
                raise CannotWrite(page, _one_line(error)) from None
            print(f"{page}: made anew")


def _load(name: str, files: list[Path] | None) -> Op:
    if name not in source.op_files():
        raise UnknownOp(name, source.op_files())
    from tilewright import registry

    names = [path.name for path in files or []]
    for path in files or []:
        registry.require_python_file(path)
        if names.count(path.name) > 1:
            raise SameName(path.name)
    return registry.load(name)


def _check(
    op: Op,
    files: list[Path],
    kernel_names: list[str],
    cases: list[Case] | None,
    dtypes: list[str] | None,
    seed: int | None,
    as_json: bool,
) -> list[Verdict]:
    """Check and print."""
    from tilewright import hardware, registry
    from tilewright.report import terminal
    from tilewright.tools.check import case_count
    from tilewright.tools.check import check as run_check

    device = "cuda" if hardware.has_gpu() else "cpu"
    kernels = registry.pick(op, kernel_names) if kernel_names or not files else []
    total = case_count(op, kernels, files, cases, dtypes)
    found = []
    with _progress(f"checking {op.name}", total) as advance:
        asked = run_check(
            op, kernels, files, device=device, cases=cases, dtypes=dtypes, seed=seed, on_case=lambda: advance("")
        )
        for verdict in asked:
            found.append(verdict)
            if as_json:
                print(json.dumps(verdict.as_json()), flush=True)
    if not as_json:
        where = "on this GPU" if device == "cuda" else "without a GPU: Triton in its interpreter"
        _console().print(terminal.verdicts(found, f"{op.name}, checked {where}"))
    return found


def _exit_unless_good(found: Sequence[Verdict | Timing]) -> None:
    from tilewright.tools.check import NOT_RIGHT

    if any(one.verdict in NOT_RIGHT for one in found):
        raise typer.Exit(1)


def _bench_here(
    op: Op,
    files: list[Path],
    kernel_names: list[str],
    cases: list[Case],
    direction: str,
    samples: int | None,
    path: Path | None,
    as_json: bool,
) -> None:
    from tilewright import hardware, registry
    from tilewright.record import append, stamp
    from tilewright.report import terminal
    from tilewright.report.rows import rows
    from tilewright.tools import bench as tool

    kernels = registry.pick(op, kernel_names)
    timer = tool.Timer()
    timings, records = [], []
    by_file = {file.name: file for file in files}
    with _progress(f"timing {op.name}", None) as advance:
        advance("measuring this GPU's ceilings")
        context = {
            "ceilings": tool.measure(timer, tool.units(op, cases)),
            "device": hardware.in_hand(),
            "versions": hardware.versions(),
        }
        for timing in tool.bench(
            op,
            kernels,
            files,
            timer=timer,
            cases=cases,
            direction=direction,
            samples=samples or tool.SAMPLES,
            on_step=advance,
        ):
            timings.append(timing)
            file = by_file.get(timing.kernel)
            source_hash = source.file_hash(file) if file else source.kernel_hash(op.name, timing.kernel)
            extra = {"file": str(file)} if file else {}
            content = {k: v for k, v in timing.as_json().items() if k not in ("op", "kernel")}
            record = stamp("timing", op.name, timing.kernel, source_hash or "", **content, **context, **extra)
            records.append(record)
            if path:
                append(path, [record])
            if as_json:
                print(json.dumps(record), flush=True)
    if not as_json:
        console = _console()
        console.print(terminal.timings(list(rows(records)), f"{op.name} on {context['device']['name']}"))
        console.print(_ceilings_line(context["ceilings"]))
        _next(f"{len(records)} records are in {path}" if path else f"tilewright bench {op.name} --record FILE.jsonl")
    _exit_unless_good(timings)


def _bench_recorded(
    op: Op,
    files: list[Path],
    kernel_names: list[str],
    cases: list[Case] | None,
    dtypes: list[str] | None,
    direction: str,
    as_json: bool,
) -> None:
    from tilewright.record import is_stale

    if not as_json:
        print("No GPU here, so nothing is timed: kernels are checked, and recorded timings are shown.\n")
    found = _check(op, files, kernel_names, cases, dtypes, None, as_json)
    points = [dict(case.point) for case in cases or []]

    def is_wanted(r: dict[str, Any]) -> bool:
        return (
            r["op"] == op.name
            and direction in (r["direction"], "both")
            and (not kernel_names or r["kernel"] in kernel_names)
            and (not points or r["case"] in points)
            and (not dtypes or r["dtype"] in dtypes)
        )

    with _recorded() as records:
        shown = [r for r in records if is_wanted(r)]
        if as_json:
            for r in shown:
                print(json.dumps({**r, "recorded": True, "stale": is_stale(r)}))
        else:
            _show_recorded(op, shown)
    _exit_unless_good(found)


def _show_recorded(op: Op, records: list[dict[str, Any]]) -> None:
    from tilewright.report import terminal
    from tilewright.report.rows import rows

    if not records:
        print(f"\nNo such timings of {op.name} were recorded in {settings.results_dir()}.")
    for device in dict.fromkeys(r["device"]["name"] for r in records):
        here = [r for r in records if r["device"]["name"] == device]
        dates = sorted({r["date"][:10] for r in here})
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        _console().print(terminal.timings(list(rows(here)), f"\n{op.name}, RECORDED on {device}, {when}"))
        _console().print(_ceilings_line(here[-1]["ceilings"]))
    _next(f"on a machine with a GPU: tilewright bench {op.name}")


@contextmanager
def _recorded() -> Iterator[list[dict[str, Any]]]:
    """The newest timing records; lines that cannot be read are told once the rest has been used."""
    from tilewright.record import latest, read

    found = [read(path) for path in sorted(settings.results_dir().rglob("*.jsonl"))]
    for file in found:
        for number in file.torn:
            print(f"tilewright: {file.path}, line {number} was cut off while written; skipped", file=sys.stderr)
    yield list(latest([r for file in found for r in file.records if r["kind"] == "timing"]))
    for file in found:
        if file.corrupt:
            raise CorruptRecords(file.path, file.corrupt)


def _cases(op: Op, texts: list[str] | None) -> list[Case] | None:
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


def _dtypes(op: Op, names: list[str] | None) -> list[str] | None:
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    full = [short.get(name, name) for name in names or []]
    for name in full:
        if name not in op.dtypes:
            raise UnknownDtype(name, op.dtypes)
    return full or None


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


@contextmanager
def _progress(title: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that is gone when the work is done; nothing where no one watches."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(title, total=total)

        def advance(step: str) -> None:
            bar.update(task, advance=1, description=f"{title}: {step}" if step else title)

        yield advance


def _ceilings_line(ceilings: dict[str, float]) -> str:
    def figure(unit: str, rate: float) -> str:
        return f"{unit} {rate / 1e9:.0f} GB/s" if unit in ("copy", "read") else f"{unit} {rate / 1e12:.0f} TFLOP/s"

    return "Ceilings measured in the same run: " + ", ".join(figure(u, r) for u, r in ceilings.items())


def _next(what: str) -> None:
    print(f"\nNext: {what.strip()}")

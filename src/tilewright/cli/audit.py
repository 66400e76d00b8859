"""`tilewright audit`"""

from __future__ import annotations

import contextlib
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import source
from tilewright.cli.shared import (
    AsJson,
    CaseText,
    DtypeName,
    FunctionName,
    Inputs,
    Kernels,
    OwnKernels,
    cases_of,
    console,
    dtypes_of,
    load_op,
    progress,
    say_next,
)
from tilewright.errors import (
    CannotWrite,
    KernelStopped,
    NoGPU,
    NothingAudited,
    TilewrightError,
    TooLarge,
    WrongArguments,
    first_line,
)

if TYPE_CHECKING:
    from tilewright.workbench.audit import Audit


@dataclass(frozen=True)
class Job:
    """One call to audit."""

    title: str
    run: Callable[[], Audit]
    call: dict[str, Any]  # what to call, as a record and the counters know it
    source: str  # hash of the code


def audit(
    target: Annotated[str, typer.Argument(metavar="OP|FILE", help="An operation, or a file with kernels.")],
    files: OwnKernels = None,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    function: FunctionName = None,
    given: Inputs = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a map of each tensor.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Operations a program may take; a million.")] = None,
    gpu: Annotated[str, typer.Option(help="Whose SMs the programs are held against.")] = "h200",
    measure: Annotated[bool, typer.Option(help="On a GPU: also count the bytes with ncu.")] = False,
    record: Annotated[Path | None, typer.Option(help="Append what was found to this file, as JSON lines.")] = None,
    as_json: AsJson = False,
) -> None:
    """What does it do to memory? Every byte a Triton kernel moves, every access it should not make. Needs no GPU."""
    from tilewright import hardware
    from tilewright.interpreter import STEPS
    from tilewright.record import require_writable

    hardware.datasheet(gpu)  # a wrong name is told before the work
    if measure and not hardware.has_gpu():
        raise NoGPU("--measure")
    if record:
        require_writable(record)
    if html:
        require_writable(html)
    limits = {"steps": steps or STEPS, "gpu": gpu}
    if target in source.op_files() or not target.endswith(".py"):
        if function or given:
            raise typer.BadParameter("--function and --input are for a FILE: an operation has its own inputs.")
        jobs = list(_of_op(target, files or [], kernel or [], case, dtype, limits))
    else:
        if kernel or case or dtype or files:
            raise typer.BadParameter("--kernel, --case, --dtype and more files are for an OP: a FILE takes --input.")
        jobs = list(_of_file(Path(target), function, given or [], limits))
    done, stopped = _run(jobs, measure, record, as_json)
    if html and done:
        _write(html, done)
    if not jobs or (done and not stopped and not any(found.launches for found in done)):
        raise NothingAudited(target)
    if not as_json:
        given_again = [w for w in sys.argv[1:] if not w.startswith("--html")]
        say_next(f"open {html}" if html else shlex.join(["tilewright", *given_again, "--html", "audit.html"]))
    if stopped or any(found.findings for found in done):
        raise typer.Exit(1)


def _run(jobs: list[Job], measure: bool, path: Path | None, as_json: bool) -> tuple[list[Audit], int]:
    """Audit and print. Returns what was found, and how many kernels could not come to their end."""
    from tilewright.report import terminal

    done, stopped = [], 0
    with progress("auditing", len(jobs)) as advance:
        for job in jobs:
            advance(job.title)
            try:
                with contextlib.redirect_stdout(sys.stderr):  # what a launcher prints is not ours to say
                    found = job.run()
            except KernelStopped as why:
                stopped += 1
                line = json.dumps({"title": job.title, "stopped": str(why)}) if as_json else f"{job.title}: {why}\n"
                print(line, flush=True)
                continue
            done.append(found)
            counted = _counted(job) if measure else None
            if path:
                _record(path, job, found, counted)
            if as_json:
                print(json.dumps({**found.as_json(), "call": job.call, **({"counted": counted} if counted else {})}))
            else:
                console().print(terminal.audit(found, counted))
    return done, stopped


def _counted(job: Job) -> dict[str, int]:
    from tilewright.workbench.audit.counters import count

    return count(job.call)


def _record(path: Path, job: Job, found: Audit, counted: dict[str, int] | None) -> None:
    from tilewright import hardware
    from tilewright.record import append, stamp

    content = {k: v for k, v in found.as_json().items() if k not in ("title", "summary")}
    if counted:
        content |= {"counted": counted, "device": hardware.in_hand()}
    names = (job.call["op"], job.call["kernel"]) if "op" in job.call else (job.call["file"], job.call["function"])
    append(path, [stamp("audit", *names, job.source, call=job.call, **content, versions=hardware.versions())])


def _of_op(
    name: str, files: list[Path], kernels: list[str], cases: list[str] | None, dtypes: list[str] | None, limits: Any
) -> Iterator[Job]:
    from tilewright import registry
    from tilewright.workbench import audit as tool

    op = load_op(name, files)
    wanted = dtypes_of(op, dtypes) or [op.bench_dtype]
    todo = [case.with_dtype(d) for case in cases_of(op, cases) or [tool.default_case(op)] for d in wanted]
    picked = registry.pick(op, kernels) if kernels or not files else []
    found = [(k, source.kernel_hash(name, k.name) or "") for k in picked if k.language == "triton"]
    found += [(registry.load_file(path, op), source.file_hash(path)) for path in files]
    for case in todo:
        for kernel, code in found:
            if not kernel.fits(*op.make(case, device="meta")):
                continue
            title = f"{name}, {kernel.name}, {case} {case.dtype}"
            call = {"op": name, "kernel": kernel.name, "case": dict(case.point), "dtype": case.dtype}
            yield Job(
                title,
                lambda kernel=kernel, case=case, title=title: _audit_case(op, kernel, case, title, limits),
                call,
                code,
            )


def _audit_case(op: Any, kernel: Any, case: Any, title: str, limits: Any) -> Audit:
    from tilewright.workbench import audit as tool

    elements = tool.case_elements(op, case)
    if elements > tool.ELEMENTS:
        raise TooLarge(elements, tool.ELEMENTS, f"try --case {tool.shrunk(op, case)}")
    args = op.make(case)
    return _called(kernel.name, lambda: tool.audit(kernel.fn, *args, cost=op.cost(*args), title=title, **limits))


def _called(name: str, run: Callable[[], Audit]) -> Audit:
    """What a user's function raises is told in a line, as a kernel's end is."""
    try:
        return run()
    except TilewrightError:
        raise
    except (Exception, SystemExit) as error:
        raise KernelStopped(f"{name} fails: {first_line(error)}") from error


def _of_file(path: Path, name: str | None, given: list[str], limits: Any) -> Iterator[Job]:
    from tilewright import registry
    from tilewright.workbench import audit as tool
    from tilewright.workbench.audit.inputs import make

    fn = registry.launcher(path, name)
    args = [make(text) for text in given]
    title = f"{path.name}, {fn.__name__}({', '.join(given)})"

    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        raise WrongArguments(path, fn.__name__, str(error), ", ".join(inspect.signature(fn).parameters)) from None

    def run() -> Audit:
        return _called(f"{path}: {fn.__name__}", lambda: tool.audit(fn, *args, title=title, **limits))

    call = {"file": str(path), "function": fn.__name__, "inputs": given}
    yield Job(title, run, call, source.file_hash(path))


def _write(path: Path, done: list[Audit]) -> None:
    from tilewright.workbench.audit.page import render

    title = done[0].title if len(done) == 1 else "Audit"
    launches = [launch for found in done for launch in found.launches]
    lines = [f"{found.title}: {line}" if len(done) > 1 else line for found in done for line in found.summary()]
    findings = [finding for found in done for finding in found.findings]
    try:
        path.write_text(render(title, launches, lines, findings), encoding="utf-8")
    except OSError as error:
        raise CannotWrite(path, error.strerror or str(error)) from None

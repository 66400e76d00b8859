"""The command `tilewright audit`."""

from __future__ import annotations

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
from tilewright.cli.options import AsJson, CallOptions, RecordFile, flattened
from tilewright.cli.selection import OpSelection, code_hash, defines_operation, refuse_other_kinds, target_kind
from tilewright.cli.shared import console, progress, require_outputs, say_next, stdout_to_stderr
from tilewright.errors import CannotWrite, KernelAborted, NoGPU, NothingAudited, WrongInputs

if TYPE_CHECKING:
    from tilewright.workbench.audit import Audit


@dataclass(frozen=True)
class Job:
    """One call to audit."""

    title: str
    run: Callable[[], Audit]
    call: dict[str, Any]  # as a record and the hardware counters identify it
    source: str  # hash of the code


@flattened
def audit(
    ctx: typer.Context,
    *,
    target: Annotated[str, typer.Argument(metavar="OP|FILE", help="Operation, or a .py file with Triton kernels.")],
    options: CallOptions,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML map of each tensor.")] = None,
    steps: Annotated[
        int, typer.Option(min=1, metavar="INTEGER", help="Stop a program after this many operations.")
    ] = 1_000_000,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU whose SMs the grid is compared with.")] = "h200",
    measure: Annotated[bool, typer.Option("--measure", help="On a GPU, also count the bytes with ncu.")] = False,
    record: RecordFile = None,
    as_json: AsJson = False,
) -> None:
    """Count the bytes that Triton kernels move and find invalid accesses. Needs no GPU.

    Exits with 1 if an access is out of bounds or races, or an output is not written.
    """
    from tilewright import hardware

    hardware.complete_datasheet(gpu)  # reports a wrong name before the work starts
    if measure and not hardware.has_gpu():
        raise NoGPU("--measure")
    require_outputs(record, html)
    kind = "own" if defines_operation(target, options) else target_kind(target)
    refuse_other_kinds(ctx, kind)
    limits = {"steps": steps, "gpu": gpu}
    if kind == "cu":
        raise typer.BadParameter("audit interprets Triton kernels; read a .cu FILE with `tilewright inspect`.")
    jobs = list(_file_jobs(Path(target), options, limits) if kind == "py" else _op_jobs(target, options, limits))
    done, aborted = _run(jobs, measure, record, as_json)
    if html and done:
        _write_page(html, done)
    if not jobs or (done and not aborted and not any(found.launches for found in done)):
        raise NothingAudited(target)
    if done and not as_json:
        arguments = [word for word in sys.argv[1:] if not word.startswith("--html")]
        say_next(f"open {html}" if html else shlex.join(["tilewright", *arguments, "--html", "audit.html"]))
    if aborted or any(found.findings for found in done):
        raise typer.Exit(1)


def _run(jobs: list[Job], measure: bool, path: Path | None, as_json: bool) -> tuple[list[Audit], int]:
    """Audit and print. Return the audits, and the number of kernels that could not finish."""
    from tilewright.report import terminal

    done, aborted = [], 0
    with progress("auditing", len(jobs)) as advance:
        for job in jobs:
            advance(job.title)
            try:
                with stdout_to_stderr():
                    found = job.run()
            except KernelAborted as why:
                aborted += 1
                line = json.dumps({"title": job.title, "stopped": str(why)}) if as_json else f"{job.title}: {why}\n"
                print(line, flush=True)
                continue
            done.append(found)
            counted = _count_bytes(job) if measure else None
            if path:
                _record(path, job, found, counted)
            if as_json:
                print(json.dumps({**found.as_json(), "call": job.call, **({"counted": counted} if counted else {})}))
            else:
                console().print(terminal.audit(found, counted))
    return done, aborted


def _count_bytes(job: Job) -> dict[str, int]:
    from tilewright.workbench.audit.dram_counters import count_dram_bytes

    return count_dram_bytes(job.call)


def _record(path: Path, job: Job, found: Audit, counted: dict[str, int] | None) -> None:
    from tilewright import hardware
    from tilewright.record import append, stamp

    content = {k: v for k, v in found.as_json().items() if k not in ("title", "summary")}
    if counted:
        content |= {"counted": counted, "device": hardware.current_gpu()}
    names = (job.call["op"], job.call["kernel"]) if "op" in job.call else (job.call["file"], job.call["function"])
    file = {"file": job.call["operation"]["file"]} if "operation" in job.call else {}
    append(path, [stamp("audit", *names, job.source, call=job.call, **file, **content, versions=hardware.versions())])


def _op_jobs(name: str, options: CallOptions, limits: Any) -> Iterator[Job]:
    from tilewright import registry
    from tilewright.workbench import audit as tool

    selection = OpSelection(name, options)
    op = selection.op
    kernels = [k for k in selection.known_kernels() if k.language == "triton" or k.origin == "user"]
    found = [(k, code_hash(op, k.name)) for k in kernels]
    found += [(registry.load_file(path, op), source.file_hash(path)) for path in selection.files]
    for case in selection.cases or [tool.default_case(op).with_dtype(dtype) for dtype in selection.dtypes]:
        for kernel, code in found:
            if not kernel.fits(*op.make(case, device="meta")):
                continue
            title = tool.title_of(op, kernel, case)
            call = {"op": op.name, "kernel": kernel.name, "case": dict(case.point), "dtype": case.dtype}
            call |= selection.origin
            yield Job(
                title,
                lambda kernel=kernel, case=case: tool.audit_kernel(op, kernel, case, **limits),
                call,
                code,
            )


def _file_jobs(path: Path, options: CallOptions, limits: Any) -> Iterator[Job]:
    from tilewright import registry
    from tilewright.interpreter.results import tensors
    from tilewright.workbench import audit as tool
    from tilewright.workbench.audit.inputs import make_input

    given = options.inputs or []
    fn = registry.launcher(path, options.function)
    args = [make_input(text) for text in given]
    title = f"{path.name}, {fn.__name__}({', '.join(given)})"

    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        raise WrongInputs(fn.__name__, str(error), str(inspect.signature(fn))) from None

    def run() -> Audit:
        try:
            with tool.abort_on_errors(f"{path}: {fn.__name__}"):
                return tool.audit(fn, *args, title=title, **limits)
        except KernelAborted as error:
            number = next(filter(str.isdecimal, given), None)
            if number is None or list(tensors(args)):
                raise
            hint = f"-i {number} is a number, -i {number}:fp32 a tensor"
            raise KernelAborted(f"{error}; no input is a tensor: {hint}", error.kind) from None

    call = {"file": str(path), "function": fn.__name__, "inputs": given}
    yield Job(title, run, call, source.file_hash(path))


def _write_page(path: Path, done: list[Audit]) -> None:
    from tilewright.workbench.audit.page import render

    title = done[0].title if len(done) == 1 else "Audit"
    launches = [launch for found in done for launch in found.launches]
    lines = [f"{found.title}: {line}" if len(done) > 1 else line for found in done for line in found.summary()]
    findings = [finding for found in done for finding in found.findings]
    try:
        path.write_text(render(title, launches, lines, findings), encoding="utf-8")
    except OSError as error:
        raise CannotWrite(path, error.strerror or str(error)) from None

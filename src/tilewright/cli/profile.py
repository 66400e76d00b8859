"""`tilewright profile`"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import source
from tilewright.cli.inspect import Chosen
from tilewright.cli.shared import (
    AsJson,
    CaseText,
    DtypeName,
    FunctionName,
    Inputs,
    Kernels,
    OwnKernels,
    console,
    load_op,
    op_names,
    progress,
    say_next,
)
from tilewright.errors import NoGPU, NothingLaunched, TilewrightError

if TYPE_CHECKING:
    from tilewright.spec import Case, Op
    from tilewright.workbench.profile import Profile
    from tilewright.workbench.profile.calls import Call

SOURCES = ("ncu", "proton", "torch")
DIRECTIONS = ("forward", "backward")
COMPILED = ("triton", "cuda")  # languages of kernels that `inspect` can read


def profile(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[OP|FILE]",
            help="An operation, several with commas between, or a file with kernels; all operations unless told.",
        ),
    ] = None,
    files: OwnKernels = None,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    direction: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    function: FunctionName = None,
    given: Inputs = None,
    only: Annotated[
        list[str] | None, typer.Option("--source", "-s", help="Ask only ncu, proton or torch; may be repeated.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write what torch saw to this file, for Perfetto.")] = None,
    record: Annotated[Path | None, typer.Option(help="Append what was counted to this file, as JSON lines.")] = None,
    as_json: AsJson = False,
) -> None:
    """What does the hardware say? Counters, times and a trace of a call, each number with its source. Needs a GPU.

    Of several operations, or all: what users' calls do, on all bench cases.
    """
    if direction not in DIRECTIONS:
        raise typer.BadParameter(f"'{direction}' is none of {', '.join(DIRECTIONS)}.")
    for name in only or ():
        if name not in SOURCES:
            raise typer.BadParameter(f"'{name}' is none of {', '.join(SOURCES)}.")
    if trace and only and "torch" not in only:
        raise typer.BadParameter("--trace is torch's: ask --source torch too.")
    several = op_names(target) if target is None or "," in target else []
    is_file = target is not None and target not in source.op_files() and target.endswith(".py")
    if several and (kernel or case or dtype or files or trace):
        raise typer.BadParameter("--kernel, --case, --dtype, --trace and files are for one operation: name it.")
    if is_file and (kernel or case or dtype or files or direction != "forward"):
        raise typer.BadParameter("--kernel, --case, --dtype, --direction and more files are for an OP.")
    if not is_file and (function or given):
        raise typer.BadParameter("--function and --input are for a FILE: an operation has its own inputs.")
    from tilewright import hardware
    from tilewright.record import append, require_writable

    if target and is_file:
        source.require_python_file(Path(target))
    ops = [load_op(name, []) for name in several]
    chosen = None if several or is_file else Chosen(str(target), files or [], case, dtype, (direction,))
    if not hardware.has_gpu():
        named = "OP" if several else target
        raise NoGPU("profile", f"`tilewright inspect {named}` and `tilewright explain {named}` need none")
    for path in (trace, record):
        if path:
            require_writable(path)
    if several:
        calls, predicted = _of_ops(ops, direction)
    else:
        file = Path(str(target))
        calls = list(_of_op(chosen, kernel, direction)) if chosen else [_of_file(file, function, given or [])]
        if not calls:
            raise NothingLaunched(str(target))
        predicted = [_predicted(call) for call in calls]
    found = _profiled(calls, only or SOURCES, trace)
    if record:
        append(record, [_record(one, shared) for one, shared in zip(found, predicted, strict=True)])
    if as_json:
        for one, shared in zip(found, predicted, strict=True):
            print(json.dumps({"title": one.title, **one.as_json(), "predicted": shared}))
    else:
        from tilewright.report import profiling as report

        console().print(report.overview(found, predicted))
        again = shlex.join(["tilewright", *sys.argv[1:], "--trace", "trace.json"])
        say_next(f"open {trace} in https://ui.perfetto.dev" if trace else again)
    if any(len(one.absent) == len(only or SOURCES) for one in found):
        raise typer.Exit(1)


def _of_op(chosen: Chosen, names: list[str] | None, direction: str) -> Iterator[Call]:
    """On the cases asked for, or on the first of the op's own that a kernel takes, as `inspect` does."""
    from tilewright import registry

    op = chosen.op
    picked = registry.pick(op, names or []) if names or not chosen.files else []
    for kernel in picked:
        if (names or kernel.language in COMPILED) and (direction == "forward" or kernel.differentiable):
            fitting = (case for case in chosen.cases or chosen.defaults if kernel.fits(*op.make(case, device="meta")))
            for case in fitting if chosen.cases else islice(fitting, 1):
                yield _call(op.name, kernel.name, case, direction)
    for path in chosen.files:
        for case in chosen.cases or chosen.defaults[:1]:
            yield _call(op.name, path.name, case, direction) | {"file": str(path)}


def _of_ops(ops: list[Op], direction: str) -> tuple[list[Call], list[dict[str, list[float]]]]:
    """Calls, and nothing predicted of them: to compile all anew would take longer than to count."""
    calls = []
    for op in ops:
        kernel = op.shipped
        if kernel and (direction == "forward" or kernel.differentiable):
            calls += [_call(op.name, kernel.name, case, direction) for case in op.benched(op.bench_dtype)]
    return calls, [{} for _ in calls]


def _call(op: str, kernel: str, case: Case, direction: str) -> Call:
    return {"op": op, "kernel": kernel, "case": dict(case.point), "dtype": case.dtype, "direction": direction}


def _of_file(path: Path, name: str | None, given: list[str]) -> Call:
    from tilewright import registry

    return {"file": str(path), "function": registry.launcher(path, name).__name__, "inputs": given}


def _profiled(calls: list[Call], sources: Sequence[str], trace: Path | None) -> list[Profile]:
    from tilewright.workbench import profile as tool

    with progress("profiling", len(sources)) as advance:
        return tool.profile(calls, sources, str(trace.absolute()) if trace else None, advance)


def _predicted(call: Call) -> dict[str, list[float]]:
    """Wavefronts of a warp's access to shared memory, and the least of them, by kind, as `inspect` works them out."""
    from tilewright import hardware, registry
    from tilewright.workbench.audit.inputs import case_of
    from tilewright.workbench.inspect import Inspection, inspect_kernel
    from tilewright.workbench.inspect.banks import typical

    gpu = hardware.DATASHEETS.get(hardware.in_hand()["gpu"])
    if gpu is None or "op" not in call or "file" in call:
        return {}
    op = registry.load(call["op"])
    (kernel,) = registry.pick(op, [call["kernel"]])
    if kernel.language not in COMPILED:
        return {}
    try:
        launches = list(inspect_kernel(op, kernel, case_of(call), gpu, (call["direction"],)))
    except TilewrightError:  # a kernel whose launches cannot be known without running it
        return {}
    accesses = [a for one in launches if isinstance(one, Inspection) for a in one.shared_accesses or ()]
    found = {kind: typical(accesses, kind) for kind in ("load", "store")}
    return {kind: list(pair) for kind, pair in found.items() if pair}


def _record(one: Profile, predicted: dict[str, list[float]]) -> dict[str, Any]:
    from tilewright import hardware
    from tilewright.record import stamp

    call = one.call
    names = (call["op"], call["kernel"]) if "op" in call else (call["file"], call["function"])
    code = source.file_hash(Path(call["file"])) if "file" in call else source.kernel_hash(*names)
    where = {key: call[key] for key in ("case", "dtype", "direction") if key in call}
    content = {key: value for key, value in one.as_json().items() if key != "rows"}
    about = {"device": hardware.in_hand(), "versions": hardware.versions()}
    return stamp("counters", *names, code or "", **where, **content, predicted=predicted, **about)

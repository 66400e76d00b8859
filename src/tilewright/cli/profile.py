"""The command `tilewright profile`."""

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
from tilewright.cli.options import AsJson, CallOptions, Direction, RecordFile, flattened
from tilewright.cli.selection import (
    OpSelection,
    defines_operation,
    next_words,
    refuse,
    refuse_other_kinds,
    target_kind,
)
from tilewright.cli.shared import console, load_op, op_names, progress, require_choice, require_outputs, say_next
from tilewright.cost import DIRECTIONS
from tilewright.errors import NoGPU, NothingLaunched, TilewrightError

if TYPE_CHECKING:
    from tilewright.spec import Case, Op
    from tilewright.workbench.profile import Profile
    from tilewright.workbench.profile.calls import Call

SOURCES = ("ncu", "proton", "torch")
COMPILED = ("triton", "cuda")  # languages of kernels that `inspect` can read


@flattened
def profile(
    ctx: typer.Context,
    *,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="OP|FILE",
            help="Operation, several separated by commas, or a .py file with kernels.",
            show_default="all operations",
        ),
    ] = None,
    options: CallOptions,
    direction: Direction = "forward",
    sources: Annotated[
        list[str] | None,
        typer.Option("--source", "-s", metavar="NAME", help="Only this profiler: ncu, proton or torch. Repeatable."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the trace of torch.profiler, for Perfetto.")
    ] = None,
    record: RecordFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure calls with ncu, Proton and torch.profiler: counters, times and a trace. Needs a GPU.

    Several operations, or all, are profiled on all their bench cases with the public function.
    """
    from tilewright import hardware
    from tilewright.record import append

    require_choice("--direction", direction, DIRECTIONS[:2])
    for name in sources or ():
        require_choice("--source", name, SOURCES)
    if trace and sources and "torch" not in sources:
        raise typer.BadParameter("--trace comes from torch; add --source torch.")
    several = op_names(target) if target is None or "," in target else []
    is_own = not several and defines_operation(str(target), options)
    kind = "own" if is_own else "op" if several else target_kind(str(target))
    if several:
        refuse(ctx, {"kernel", "case", "dtype", "files", "trace"}, "only for one OP")
    refuse_other_kinds(ctx, kind)
    if kind == "cu":
        raise typer.BadParameter("profile runs a function of a .py FILE; give one that launches the .cu kernel.")
    if kind == "py":
        source.require_python_file(Path(str(target)))
    ops = [load_op(name) for name in several]
    selection = OpSelection(str(target), options, (direction,)) if kind in ("op", "own") and not several else None
    if not hardware.has_gpu():
        words = ["OP"] if several else next_words(str(target), options)[1:]
        commands = [shlex.join(["tilewright", tool, *words]) for tool in ("inspect", "explain")]
        raise NoGPU("profile", f"`{commands[0]}` and `{commands[1]}` need none")
    require_outputs(record, trace)
    if several:
        calls = _bench_calls(ops, direction)
        predicted = [{} for _ in calls]  # compiling all of them would take longer than counting
    else:
        calls = list(_selected_calls(selection)) if selection else [_file_call(Path(str(target)), options)]
        if not calls:
            raise NothingLaunched(str(target))
        predicted = [_predict_wavefronts(call) for call in calls]
    found = _run(calls, sources or SOURCES, trace)
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
    if any(len(one.absent) == len(sources or SOURCES) for one in found):
        raise typer.Exit(1)


def _selected_calls(selection: OpSelection) -> Iterator[Call]:
    """Yield one call per kernel and selected case, or for the first default case that the kernel accepts."""
    op, direction = selection.op, selection.directions[0]
    for kernel in selection.known_kernels():
        is_selected = selection.names or kernel.language in COMPILED or kernel.origin == "user"
        if is_selected and (direction == "forward" or kernel.differentiable):
            accepted = (case for case in selection.candidates if kernel.fits(*op.make(case, device="meta")))
            for case in accepted if selection.cases else islice(accepted, 1):
                yield _call(op.name, kernel.name, case, direction) | selection.origin
    for path in selection.files:
        for case in selection.cases or selection.default_cases[:1]:
            yield _call(op.name, path.name, case, direction) | {"file": str(path)} | selection.origin


def _bench_calls(ops: list[Op], direction: str) -> list[Call]:
    calls = []
    for op in ops:
        kernel = op.shipped
        if kernel and (direction == "forward" or kernel.differentiable):
            calls += [_call(op.name, kernel.name, case, direction) for case in op.benched(op.bench_dtype)]
    return calls


def _call(op: str, kernel: str, case: Case, direction: str) -> Call:
    return {"op": op, "kernel": kernel, "case": dict(case.point), "dtype": case.dtype, "direction": direction}


def _file_call(path: Path, options: CallOptions) -> Call:
    from tilewright import registry

    function = registry.launcher(path, options.function).__name__
    return {"file": str(path), "function": function, "inputs": options.inputs or []}


def _run(calls: list[Call], sources: Sequence[str], trace: Path | None) -> list[Profile]:
    from tilewright.workbench import profile as tool

    with progress("profiling", len(sources)) as advance:
        return tool.profile(calls, sources, str(trace.absolute()) if trace else None, advance)


def _predict_wavefronts(call: Call) -> dict[str, list[float]]:
    """Return the wavefronts per shared-memory access of a warp and their minimum, for loads and stores."""
    from tilewright import hardware, registry
    from tilewright.workbench.audit.inputs import case_of, op_of
    from tilewright.workbench.inspect import Inspection, inspect_kernel
    from tilewright.workbench.inspect.bank_conflicts import mean_wavefronts

    gpu = hardware.DATASHEETS.get(hardware.current_gpu()["gpu"])
    if gpu is None or "op" not in call or "file" in call:
        return {}
    op = op_of(call)
    (kernel,) = registry.pick(op, [call["kernel"]])
    if kernel.language not in COMPILED:
        return {}
    try:
        launches = list(inspect_kernel(op, kernel, case_of(call), gpu, (call["direction"],)))
    except TilewrightError:  # launches that depend on values in memory
        return {}
    accesses = [a for one in launches if isinstance(one, Inspection) for a in one.shared_accesses or ()]
    found = {kind: mean_wavefronts(accesses, kind) for kind in ("load", "store")}
    return {kind: list(pair) for kind, pair in found.items() if pair}


def _record(one: Profile, predicted: dict[str, list[float]]) -> dict[str, Any]:
    from tilewright import hardware
    from tilewright.record import stamp

    call = one.call
    names = (call["op"], call["kernel"]) if "op" in call else (call["file"], call["function"])
    path = call.get("file") or call.get("operation", {}).get("file")
    code = source.file_hash(Path(path)) if path else source.kernel_hash(*names)
    file = {"file": path} if path and "op" in call else {}
    where = {key: call[key] for key in ("case", "dtype", "direction") if key in call}
    content = {key: value for key, value in one.as_json().items() if key != "rows"}
    about = {"device": hardware.current_gpu(), "versions": hardware.versions()}
    return stamp("counters", *names, code or "", **where, **file, **content, predicted=predicted, **about)

"""The command `tilewright explain`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import source
from tilewright.cli.inspect import filter_by_name
from tilewright.cli.options import AsJson, CompileOptions, Direction, flattened
from tilewright.cli.selection import OpSelection, refuse, refuse_other_kinds, target_kind
from tilewright.cli.shared import console, newest_records, progress, require_choice, say_next, stdout_to_stderr
from tilewright.cost import DIRECTIONS
from tilewright.errors import (
    CompilationFailed,
    FileMissing,
    NothingLaunched,
    NothingToPredict,
    UnknownKernel,
    UnknownOp,
)

if TYPE_CHECKING:
    from tilewright.hardware import GPU
    from tilewright.spec import Kernel
    from tilewright.workbench.explain import Diagnosis
    from tilewright.workbench.explain.collect import CallData

    Records = list[dict[str, Any]]


@flattened
def explain(
    ctx: typer.Context,
    *,
    target: Annotated[
        str | None, typer.Argument(metavar="OP|FILE", help="Operation, or a .py or .cu file with kernels.")
    ] = None,
    options: CompileOptions,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU to explain the kernel for.")] = "h200",
    direction: Direction = "forward",
    predict: Annotated[
        bool, typer.Option("--predict", help="Compare predicted with recorded times; of all operations by default.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --predict, append the results to this file as JSON lines.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Diagnose a kernel: its bottleneck, its distance from the ceiling, and what to try next. Needs no GPU."""
    from tilewright import hardware

    if "," in gpu:
        raise typer.BadParameter("--gpu: explain takes one GPU; inspect takes several.")
    sheet = hardware.datasheet(gpu)
    require_choice("--direction", direction, DIRECTIONS[:2])
    if not predict:
        refuse(ctx, {"record"}, "only with --predict")
        if target is None:
            raise typer.BadParameter("name an operation or a file, or give --predict.")
    kind = target_kind(target) if target else "op"
    refuse_other_kinds(ctx, kind)
    if predict:
        refuse(ctx, {"files", "case", "dtype", "direction"}, "not with --predict, which uses the recorded calls")
    with newest_records() as records:
        if predict:
            _predict(target, options.kernel or [], sheet, records, record, as_json)
            return
        assert target
        if kind == "cu":
            jobs = [lambda: _collect_cuda_file(Path(target), options, sheet, records)]
        elif kind == "py":
            jobs = [lambda: [_collect_python_file(Path(target), options, sheet, records)]]
        else:
            selection = OpSelection(target, options, (direction,))
            kernels = selection.compiled_kernels()
            jobs = [lambda each=each: _collect_kernel(selection, each, sheet, records) for each in kernels]
        found, failures = _diagnose_all(jobs)
        if not found and not failures:
            raise NothingLaunched(target)
        for error in failures:
            print(json.dumps({"gpu": sheet.name, "refused": str(error)}) if as_json else f"{error}\n")
        _print(found, as_json)
        if failures or any(one.failed for one in found):
            raise typer.Exit(1)


def _diagnose_all(jobs: list[Callable[[], list[CallData]]]) -> tuple[list[Diagnosis], list[CompilationFailed]]:
    """Return the diagnoses, and the errors of kernels that do not compile for the GPU."""
    from tilewright.workbench.explain import diagnose

    found, failures = [], []
    with progress("explaining", len(jobs)) as advance:
        for job in jobs:
            with stdout_to_stderr():
                try:
                    found += map(diagnose, job())
                except CompilationFailed as error:
                    failures.append(error)
            advance("")
    return found, failures


def _print(found: list[Diagnosis], as_json: bool) -> None:
    from tilewright.report import diagnosis as report

    for one in found:
        if as_json:
            print(json.dumps(one.as_json()))
        else:
            console().print(report.overview(one))
            print()
    if found and not as_json:
        advice = [one.bottleneck.advice for one in found if one.bottleneck]
        advice += [check.advice for one in found for check in one.failed]
        say_next(next(filter(None, advice), shlex.join(["tilewright", "inspect", *sys.argv[2:], "--sass"])))


def _collect_kernel(selection: OpSelection, kernel: Kernel, gpu: GPU, records: Records) -> list[CallData]:
    from tilewright.workbench.explain.collect import collect_op

    found = []
    for case in selection.candidates:
        try:
            found.append(collect_op(selection.op, kernel, case, gpu, records, selection.directions[0]))
        except NothingLaunched:
            continue
        if not selection.cases:
            break
    return found


def _collect_python_file(path: Path, options: CompileOptions, gpu: GPU, records: Records) -> CallData:
    from tilewright import registry
    from tilewright.workbench.explain.collect import collect_function

    source.require_python_file(path)
    name, given = options.function, options.inputs or []
    title = f"{path.name}{f', {name}' if name else ''}({', '.join(given)})"
    try:
        return collect_function(lambda: registry.launcher(path, name), given, title, gpu, records)
    except NothingLaunched:
        raise NothingLaunched(str(path), is_file=True) from None


def _collect_cuda_file(path: Path, options: CompileOptions, gpu: GPU, records: Records) -> list[CallData]:
    from tilewright.workbench.explain.collect import collect_cuda_file

    if not path.is_file():
        raise FileMissing(path, "a CUDA C++ file")
    found = collect_cuda_file(path, gpu, options.threads, options.shared, records)
    return filter_by_name(path, options.function, found, lambda one: one.launches[0].name)


def _predict(
    target: str | None, kernels: list[str], gpu: GPU, records: Records, path: Path | None, as_json: bool
) -> None:
    from tilewright.record import append, require_writable
    from tilewright.report import diagnosis as report
    from tilewright.workbench.explain.validation import check_predictions, predictable

    if target and target not in source.op_files():
        raise UnknownOp(target, source.op_files())
    if path:
        require_writable(path)
    for name in kernels:
        if target and name not in source.kernels(target):
            raise UnknownKernel(target, name, source.kernels(target))
    timings = predictable(records, gpu, [target] if target else [*source.op_files()], kernels)
    if not timings:
        raise NothingToPredict(gpu.name, target, kernels)
    found, skipped = [], []
    with progress("predicting", len(timings)) as advance:
        for timing in timings:
            found += check_predictions([timing], gpu, records, skipped.append)
            advance(f"{timing['op']}, {timing['kernel']}")
    if path:
        append(path, [one.as_record() for one in found])
    if as_json:
        for one in found:
            print(json.dumps(one.as_record()))
        return
    console().print(report.predictions(found))
    if skipped:
        print(f"Not predicted, because the call launches none of our kernels: {len(skipped)} timings.")
    say_next("tilewright report --fill docs/reading.md" if path else "tilewright explain OP -c CASE for the reasons")

"""`tilewright explain`"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import source
from tilewright.cli.inspect import THREADS, Chosen, of_name
from tilewright.cli.shared import (
    AsJson,
    CaseText,
    DtypeName,
    FunctionName,
    Inputs,
    Kernels,
    OwnKernels,
    SharedBytes,
    Threads,
    console,
    kind_of,
    progress,
    recorded,
    refuse,
    refuse_of_another_kind,
    say_next,
)
from tilewright.errors import CompilerRefused, FileMissing, NothingLaunched, NothingToPredict, UnknownKernel, UnknownOp

if TYPE_CHECKING:
    from tilewright.hardware import GPU
    from tilewright.workbench.explain import Diagnosis
    from tilewright.workbench.explain.evidence import Evidence

    Records = list[dict[str, Any]]

WAYS = ("forward", "backward")


def explain(
    ctx: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="OP|FILE", help="An operation, or a .py or .cu file with kernels.")
    ] = None,
    files: OwnKernels = None,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    gpu: Annotated[str, typer.Option(help="On which GPU.")] = "h200",
    direction: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    function: FunctionName = None,
    given: Inputs = None,
    threads: Threads = THREADS,
    shared: SharedBytes = 0,
    predict: Annotated[
        bool, typer.Option("--predict", help="Only times, beside those recorded; of all operations unless told.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="With --predict: append the predictions to this file, as JSON lines.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Why is it slow, and what next? What binds, how far from the ceiling, and eight points with their numbers."""
    from tilewright import hardware

    if "," in gpu:
        raise typer.BadParameter("--gpu: explain is of one GPU at a time; inspect takes several.")
    sheet = hardware.datasheet(gpu)
    if direction not in WAYS:
        raise typer.BadParameter(f"'{direction}' is neither of {' and '.join(WAYS)}.")
    if not predict:
        refuse(ctx, {"record"}, "for --predict; a diagnosis is for its reader")
        if target is None:
            raise typer.BadParameter("name an operation or a file, or give --predict.")
    kind = kind_of(target) if target else "op"
    refuse_of_another_kind(ctx, kind)
    if predict:
        unheeded = {"files", "case", "dtype", "direction"}
        refuse(ctx, unheeded, "not for --predict, which takes the calls of the records")
    with recorded() as records:
        if predict:
            _predict(target, kernel or [], sheet, records, record, as_json)
            return
        assert target
        if kind == "cu":
            jobs = [lambda: _of_cuda_file(Path(target), function, sheet, threads, shared, records)]
        elif kind == "py":
            jobs = [lambda: [_of_file(Path(target), function, given or [], sheet, records)]]
        else:
            chosen = Chosen(target, files or [], case, dtype, (direction,))
            names = chosen.kernels(kernel)
            jobs = [lambda each=each: _of_kernel(chosen, each, sheet, records, direction) for each in names]
        found, refused = _diagnosed(jobs)
        if not found and not refused:
            raise NothingLaunched(target)
        for error in refused:
            print(json.dumps({"gpu": sheet.name, "refused": str(error)}) if as_json else f"{error}\n")
        _show(found, as_json)
        if refused or any(one.failed for one in found):
            raise typer.Exit(1)


def _diagnosed(jobs: list[Callable[[], list[Evidence]]]) -> tuple[list[Diagnosis], list[CompilerRefused]]:
    """And what does not compile for the GPU, while the others go on."""
    from tilewright.workbench.explain import diagnosed

    found, refused = [], []
    with progress("explaining", len(jobs)) as advance:
        for job in jobs:
            with contextlib.redirect_stdout(sys.stderr):  # what a launcher prints is not ours to say
                try:
                    found += map(diagnosed, job())
                except CompilerRefused as error:
                    refused.append(error)
            advance("")
    return found, refused


def _show(found: list[Diagnosis], as_json: bool) -> None:
    from tilewright.report import diagnosis as report

    for one in found:
        if as_json:
            print(json.dumps(one.as_json()))
        else:
            console().print(report.overview(one))
            print()
    moves = [one.binding.move for one in found if one.binding] + [point.move for one in found for point in one.failed]
    if found and not as_json:
        say_next(next(filter(None, moves), shlex.join(["tilewright", "inspect", *sys.argv[2:], "--sass"])))


def _of_kernel(chosen: Chosen, kernel: Any, gpu: GPU, records: Records, direction: str) -> list[Evidence]:
    """On the cases asked for, or on the first of the op's own that the kernel takes."""
    from tilewright.workbench.explain.evidence import of_op

    found = []
    for case in chosen.cases or chosen.defaults:
        try:
            found.append(of_op(chosen.op, kernel, case, gpu, records, direction))
        except NothingLaunched:
            continue
        if not chosen.cases:
            break
    return found


def _of_file(path: Path, name: str | None, given: list[str], gpu: GPU, records: Records) -> Evidence:
    from tilewright import registry
    from tilewright.workbench.explain.evidence import of_function

    source.require_python_file(path)
    title = f"{path.name}{f', {name}' if name else ''}({', '.join(given)})"
    try:
        return of_function(lambda: registry.launcher(path, name), given, title, gpu, records)
    except NothingLaunched:
        raise NothingLaunched(str(path), is_file=True) from None


def _of_cuda_file(
    path: Path, name: str | None, gpu: GPU, threads: int, shared: int, records: Records
) -> list[Evidence]:
    from tilewright.workbench.explain.evidence import of_cuda_file

    if not path.is_file():
        raise FileMissing(path, "a CUDA C++ file")
    found = of_cuda_file(path, gpu, threads, shared, records)
    return of_name(path, name, found, lambda one: one.launches[0].name)


def _predict(
    target: str | None, kernels: list[str], gpu: GPU, records: Records, path: Path | None, as_json: bool
) -> None:
    from tilewright.record import append, require_writable
    from tilewright.report import diagnosis as report
    from tilewright.workbench.explain.validation import compared, predictable

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
            found += compared([timing], gpu, records, skipped.append)
            advance(_named(timing))
    if path:
        append(path, [one.as_record() for one in found])
    if as_json:
        for one in found:
            print(json.dumps(one.as_record()))
        return
    console().print(report.predictions(found))
    if skipped:
        print(f"Without a prediction, as they launch no kernel of ours there: {len(skipped)} timings.")
    say_next("tilewright report --fill docs/reading.md" if path else "tilewright explain OP -c CASE for the reasons")


def _named(timing: Mapping[str, Any]) -> str:
    return f"{timing['op']}, {timing['kernel']}"

"""The command `tilewright explain`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import source
from tilewright.cli.gpus import PRICE_COLUMNS, Gpus, Prices, order, parse_gpus, parse_prices, price_cells, price_fields
from tilewright.cli.inspect import filter_by_name
from tilewright.cli.options import AsJson, CompileOptions, Direction, flattened
from tilewright.cli.selection import OpSelection, defines_operation, next_words, refuse, refuse_other_kinds, target_kind
from tilewright.cli.shared import console, newest_records, progress, require_choice, say_next, stdout_to_stderr, table
from tilewright.cost import DIRECTIONS
from tilewright.errors import (
    CompilationFailed,
    FileMissing,
    IncompleteDatasheet,
    NothingLaunched,
    NothingToPredict,
    UnknownKernel,
    UnknownOp,
)
from tilewright.report.formatting import digits

if TYPE_CHECKING:
    from tilewright.hardware import GPU
    from tilewright.spec import Kernel
    from tilewright.workbench.explain import Diagnosis
    from tilewright.workbench.explain.collect import CallData

    Records = list[dict[str, Any]]
    Collector = Callable[[GPU], list[CallData]]


@flattened
def explain(
    ctx: typer.Context,
    *,
    target: Annotated[
        str | None, typer.Argument(metavar="OP|FILE", help="Operation, or a .py or .cu file with kernels.")
    ] = None,
    options: CompileOptions,
    gpu: Gpus = ("h200",),  # type: ignore[assignment]
    price: Prices = None,
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
    gpus = parse_gpus(gpu)
    prices = parse_prices(price, gpus)
    require_choice("--direction", direction, DIRECTIONS[:2])
    if not predict:
        refuse(ctx, {"record"}, "only with --predict")
        if target is None:
            raise typer.BadParameter("name an operation or a file, or give --predict.")
    kind = "op" if target is None else "own" if defines_operation(target, options) else target_kind(target)
    refuse_other_kinds(ctx, kind)
    if predict:
        refuse(
            ctx, {"files", "case", "dtype", "direction", "price"}, "not with --predict, which uses the recorded calls"
        )
        if len(gpus) > 1:
            raise typer.BadParameter("--gpu: --predict takes one GPU.")
    with newest_records() as records:
        if predict:
            _predict(target, options.kernel or [], gpus[0], records, record, as_json)
            return
        assert target
        found, refused = _diagnose_all(_collectors(target, kind, options, direction, records), gpus)
        if not found and not refused:
            raise NothingLaunched(target)
        if as_json:
            for name, reason in refused:
                print(json.dumps({"gpu": name, "refused": reason}))
            for one in found:
                price_per_hour = prices.get(one.call.gpu.name)
                print(json.dumps(one.as_json() | price_fields(price_per_hour, one.us and one.us[0])))
        elif len(gpus) > 1:
            _print_comparison(found, refused, prices)
        else:
            _print(found, refused)
        if len(gpus) > 1:
            raise typer.Exit(0 if found else 1)
        if refused or any(one.failed for one in found):
            raise typer.Exit(1)


def _diagnose_all(
    collectors: Sequence[Collector], gpus: Sequence[GPU]
) -> tuple[list[Diagnosis], list[tuple[str, str]]]:
    """Return the diagnoses, and the GPUs for which there is none, with the reason."""
    from tilewright import hardware
    from tilewright.workbench.explain import diagnose

    found, refused = [], []
    with progress("explaining", len(collectors) * len(gpus)) as advance:
        for collect in collectors:
            for gpu in gpus:
                advance(gpu.name)
                try:
                    with stdout_to_stderr():
                        found += map(diagnose, collect(hardware.complete_datasheet(gpu.name)))
                except CompilationFailed as error:
                    refused.append((gpu.name, str(error)))
                except IncompleteDatasheet as error:
                    if len(gpus) == 1:
                        raise
                    refused.append((gpu.name, str(error)))
    return found, list(dict.fromkeys(refused))


def _collectors(target: str, kind: str, options: CompileOptions, direction: str, records: Records) -> list[Collector]:
    """Return a function for each kernel, which collects the data of its calls on a GPU."""
    if kind == "cu":
        return [lambda gpu: _collect_cuda_file(Path(target), options, gpu, records)]
    if kind == "py":
        return [_python_file_collector(Path(target), options, records)]
    selection = OpSelection(target, options, (direction,))
    words = next_words(target, options)[1:] if selection.op.file else []
    return [_kernel_collector(selection, kernel, records, words) for kernel in selection.compiled_kernels()]


def _print(found: Sequence[Diagnosis], refused: Sequence[tuple[str, str]]) -> None:
    from tilewright.report import diagnosis as report

    for _, reason in refused:
        print(f"{reason}\n")
    for one in found:
        console().print(report.overview(one))
        print()
    if found:
        first = next((one for one in found if one.failed), found[0]).call
        say_next(first.command("inspect", "--gpu", first.gpu.name, "--sass"))


def _print_comparison(
    found: Sequence[Diagnosis], refused: Sequence[tuple[str, str]], prices: Mapping[str, float]
) -> None:
    """Print a table of the GPUs for each call: the cheapest, or else the fastest, first."""

    def key(one: Diagnosis) -> tuple[float, float]:
        return order(one.us and one.us[0], prices.get(one.call.gpu.name))

    for title in dict.fromkeys(one.call.title for one in found):
        numbers = ("time (us)", "of the ceiling", *(PRICE_COLUMNS if prices else ()))
        shown = table("gpu", right=numbers, last=("", "bottleneck"), title=title)
        for one in sorted((one for one in found if one.call.title == title), key=key):
            us, source = one.us or (None, "")
            share = "" if one.share is None else f"{one.share:.0%}"
            time = "not available" if us is None else digits(us)
            reason = one.bottleneck.name if one.bottleneck else f"unknown: {one.call.no_audit_reason}"
            cells = price_cells(prices, one.call.gpu.name, us)
            shown.add_row(one.call.gpu.name, time, share, *cells, source, reason)
        console().print(shown)
        print()
    for name, reason in refused:
        print(f"{name}: not available: {reason}")
    for reason in dict.fromkeys(one.call.unchecked for one in found if one.call.unchecked):
        print(f"Not checked: {reason}.")
    if found:
        first = min(found, key=key).call
        say_next(first.command("explain", "--gpu", first.gpu.name))


def _kernel_collector(selection: OpSelection, kernel: Kernel, records: Records, words: Sequence[str]) -> Collector:
    from tilewright.workbench.explain.collect import Audits, collect_cases

    audits: Audits = {}
    file = next((path for path in selection.files if kernel.origin == "user" and path.name == kernel.name), None)

    def collect(gpu: GPU) -> list[CallData]:
        return collect_cases(
            selection.op,
            kernel,
            selection.candidates,
            gpu,
            records,
            selection.directions[0],
            only_first=not selection.cases,
            file=file,
            audits=audits,
            words=words,
        )

    return collect


def _python_file_collector(path: Path, options: CompileOptions, records: Records) -> Collector:
    from tilewright import registry
    from tilewright.workbench.explain.collect import TracedFunction, collect_function

    source.require_python_file(path)
    name, given = options.function, options.inputs or []
    title = f"{path.name}{f', {name}' if name else ''}({', '.join(given)})"
    function = TracedFunction(lambda: registry.launcher(path, name), given)
    arguments = [str(path), *(("-f", name) if name else ()), *(word for text in given for word in ("-i", text))]

    def collect(gpu: GPU) -> list[CallData]:
        try:
            return [collect_function(function, title, gpu, records, arguments)]
        except NothingLaunched:
            raise NothingLaunched(str(path), is_file=True) from None

    return collect


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

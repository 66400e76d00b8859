"""The command `tilewright inspect`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import source
from tilewright.cli.options import AsJson, CompileOptions, flattened
from tilewright.cli.selection import OpSelection, defines_operation, refuse, refuse_other_kinds, target_kind
from tilewright.cli.shared import console, progress, require_choice, say_next, stdout_to_stderr
from tilewright.errors import FileMissing, NothingLaunched, UnknownFunction

if TYPE_CHECKING:
    from tilewright.hardware import GPU
    from tilewright.spec import Case, Kernel
    from tilewright.workbench.inspect import CompileFailure, Inspection
    from tilewright.workbench.inspect.diff import KernelDiff

    Found = list[Inspection | CompileFailure]

DIRECTIONS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}


@flattened
def inspect(
    ctx: typer.Context,
    *,
    target: Annotated[
        str | None, typer.Argument(metavar="OP|FILE", help="Operation, or a .py or .cu file with kernels.")
    ] = None,
    options: CompileOptions,
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="Compile for this GPU, or for several: h200,a100,mi300x.")
    ] = "h200",
    direction: Annotated[
        str, typer.Option("--direction", metavar="DIRECTION", help="forward, backward or both.")
    ] = "forward",
    ttgir: Annotated[bool, typer.Option("--ttgir", help="Print the Triton GPU IR beside the source lines.")] = False,
    llir: Annotated[bool, typer.Option("--llir", help="Print the LLVM IR.")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="Print the PTX; for AMD GPUs the assembly.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Print the machine code.")] = False,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Compare two kernels, e.g. triton triton:num_warps=8, or triton mine.py.",
        ),
    ] = None,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="Compile every Triton kernel for one GPU of each architecture.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --everywhere, append the results to this file as JSON lines."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show registers, occupancy and instructions of compiled kernels. Needs no GPU."""
    from tilewright import hardware
    from tilewright.report import inspection as report

    if everywhere:
        others = {p.name for p in ctx.command.params} - {"everywhere", "record", "as_json"}
        refuse(ctx, others, "not with --everywhere, which covers all operations with its own cases and GPUs")
        _inspect_everywhere(record, as_json)
        return
    refuse(ctx, {"record"}, "only with --everywhere")
    if target is None:
        raise typer.BadParameter("name an operation or a file, or give --everywhere.")
    path, kind = Path(target), "own" if defines_operation(target, options) else target_kind(target)
    refuse_other_kinds(ctx, kind)
    if as_json:
        refuse(ctx, {"ttgir", "llir", "ptx", "sass"}, "not with --json")
    if diff:
        refuse(ctx, {"kernel"}, "not with --diff, which names its two kernels")
        if len(options.case or ()) > 1 or len(options.dtype or ()) > 1 or direction == "both":
            raise typer.BadParameter("--diff compares one call: give one --case, one --dtype and one --direction.")
    require_choice("--direction", direction, DIRECTIONS)
    named = [hardware.complete_datasheet(name.strip()) for name in gpu.split(",")]
    gpus = list({one.name: one for one in named}.values())
    forms = [name for name, wanted in (("ttgir", ttgir), ("llir", llir), ("ptx", ptx), ("sass", sass)) if wanted]
    if kind == "cu":
        jobs = [lambda one=one: _inspect_cuda_file(path, options, one) for one in gpus]
    elif kind == "py":
        jobs = [lambda one=one: _inspect_python_file(path, options, one) for one in gpus]
    else:
        selection = OpSelection(target, options, DIRECTIONS[direction])
        if diff:
            for one in gpus:
                _print_diff(selection, one, diff, forms, as_json)
            return
        kernels = selection.compiled_kernels()
        jobs = [lambda one=one, each=each: _inspect_op(selection, each, one) for each in kernels for one in gpus]
    found = _run(jobs)
    if not found:
        raise NothingLaunched(target, is_file=kind in ("py", "cu"))
    if as_json:
        for one in found:
            print(json.dumps(one.as_json()))
    elif forms:
        screen = console()
        for one in found:  # long lines are cut on a terminal and complete in a file
            screen.print(report.code(one, forms), soft_wrap=not screen.is_terminal)
    else:
        console().print(report.overview(found))
        if others := _common_forms(found):
            say_next(f"tilewright {shlex.join(sys.argv[1:])} --sass  (or {', '.join(others)})")
    if any(report.is_bad(one) for one in found):
        raise typer.Exit(1)


def _common_forms(found: Found) -> list[str]:
    """Return the options, besides --sass, for code that every compiled kernel has."""
    from tilewright.workbench.inspect import Inspection
    from tilewright.workbench.inspect.line_info import forms

    compiled = [forms(one.compiled) for one in found if isinstance(one, Inspection)]
    return [f"--{form}" for form in ("ttgir", "llir", "ptx") if compiled and all(form in each for each in compiled)]


def _run(jobs: list[Callable[[], Found]]) -> Found:
    found: Found = []
    with progress("compiling", len(jobs)) as advance:
        for job in jobs:
            with stdout_to_stderr():
                found += job()
            advance("")
    return found


def _inspect_everywhere(path: Path | None, as_json: bool) -> None:
    from tilewright import hardware, registry
    from tilewright.record import append, require_writable, stamp
    from tilewright.workbench.inspect import Inspection
    from tilewright.workbench.inspect.portability import TARGETS, figures, inspect_for, problem

    if path:
        require_writable(path)
    ops = [registry.load(name) for name in source.op_files()]
    found = _run([lambda gpu=gpu: inspect_for(gpu, ops) for gpu in TARGETS])
    gpus: dict[tuple[Path, str], dict[str, Any]] = {}
    for one in found:
        if isinstance(one, Inspection) and one.launch:
            gpus.setdefault((Path(one.launch.code.file), one.name), {})[one.gpu.name] = figures(one)
    records = [
        stamp(
            "resources",
            source.module_name(file).removeprefix("tilewright."),
            name,
            source.file_hash(file),
            file=f"src/tilewright/{file.relative_to(source.PACKAGE)}",
            gpus=by_gpu,
            versions=hardware.versions(),
        )
        for (file, name), by_gpu in gpus.items()
    ]
    if path:
        append(path, records)
    problems = [f"{one.name} for {one.gpu.name}: {what}" for one in found if (what := problem(one))]
    for line in map(json.dumps, records) if as_json else problems:
        print(line)
    if not as_json:
        print(f"{len(records)} kernels, {len(TARGETS)} GPUs: {len(found) - len(problems)} fit, {len(problems)} do not.")
        say_next("make pages" if path else "tilewright inspect OP --gpu NAME for the details")
    if problems:
        raise typer.Exit(1)


def _inspect_op(selection: OpSelection, kernel: Kernel, gpu: GPU) -> Found:
    from tilewright.workbench.inspect import inspect_cases

    cases, directions = selection.candidates, selection.directions
    return inspect_cases(selection.op, kernel, cases, gpu, directions, only_first=not selection.cases)


def _inspect_python_file(path: Path, options: CompileOptions, gpu: GPU) -> Found:
    from tilewright import registry
    from tilewright.workbench.explain.collect import TracedFunction
    from tilewright.workbench.inspect import inspect_launch

    given = options.inputs or []
    function = TracedFunction(lambda: registry.launcher(path, options.function), given)
    title = f"{path.name}({', '.join(given)})"
    return [inspect_launch(launch, title) for launch in function.launches(gpu)]


def _inspect_cuda_file(path: Path, options: CompileOptions, gpu: GPU) -> Found:
    from tilewright.workbench.inspect import CompileFailure, inspect_cuda_file

    if not path.is_file():
        raise FileMissing(path, "a CUDA C++ file")
    found = list(inspect_cuda_file(path, gpu, options.threads, options.shared))
    if any(isinstance(one, CompileFailure) for one in found):
        return found
    return filter_by_name(path, options.function, found, lambda one: one.name)


def filter_by_name(path: Path, name: str | None, found: Sequence[Any], name_of: Callable[[Any], str]) -> list[Any]:
    """Return the kernels of a CUDA C++ file with this name, in any namespace, or all instances of a template."""
    if name is None:
        return list(found)
    chosen = [one for one in found if name in _spellings(name_of(one))]
    if not chosen:
        raise UnknownFunction(path, name, map(name_of, found))
    return chosen


def _spellings(name: str) -> tuple[str, ...]:
    template = name.partition("<")[0]
    return name, template, template.rpartition("::")[2]


def _print_diff(selection: OpSelection, gpu: GPU, names: tuple[str, str], forms: list[str], as_json: bool) -> None:
    from tilewright.report import inspection as report

    with stdout_to_stderr():
        case, found = _diff(selection, gpu, names)
    if as_json:
        on = {"gpu": gpu.name, "case": dict(case.point), "dtype": case.dtype}
        print(json.dumps({**on, "a": names[0], "b": names[1], **found.as_json()}))
    else:
        title = f"{selection.op.name}, {case} {case.dtype}, {gpu.name}"
        console().print(report.difference(found, title, names, forms))


def _diff(selection: OpSelection, gpu: GPU, names: tuple[str, str]) -> tuple[Case, KernelDiff]:
    """Compare two kernels on the first case that both accept."""
    from tilewright.workbench.inspect import inspect_kernel
    from tilewright.workbench.inspect.diff import KernelDiff, Variant

    variants = [Variant.parse(name) for name in names]
    kernels = selection.pair([variant.kernel for variant in variants])
    for case in selection.candidates:
        sides = [list(inspect_kernel(selection.op, one, case, gpu, selection.directions)) for one in kernels]
        if all(sides):
            a, b = (variant.apply(side) for variant, side in zip(variants, sides, strict=True))
            return case, KernelDiff(a, b)
    raise NothingLaunched(f"{names[0]} or {names[1]}")

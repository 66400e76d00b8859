"""`tilewright inspect`"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
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
    SharedBytes,
    Threads,
    cases_of,
    console,
    dtypes_of,
    kind_of,
    load_op,
    progress,
    refuse,
    refuse_of_another_kind,
    say_next,
)
from tilewright.errors import (
    FileMissing,
    NoGradient,
    NotAnOp,
    NotCompiled,
    NothingLaunched,
    UnknownFunction,
    UnknownKernel,
)

if TYPE_CHECKING:
    from tilewright.hardware import GPU
    from tilewright.spec import Case, Kernel, Op
    from tilewright.workbench.inspect import Inspection, Refused
    from tilewright.workbench.inspect.difference import Difference

    Found = list[Inspection | Refused]

DIRECTIONS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}
THREADS = 256  # of a block, where a .cu file is read without a launch


def inspect(
    ctx: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="OP|FILE", help="An operation, or a .py or .cu file with kernels.")
    ] = None,
    files: OwnKernels = None,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    gpu: Annotated[str, typer.Option(help="Whom to compile for: one or more, as h200,a100,mi300x.")] = "h200",
    direction: Annotated[str, typer.Option(help="forward, backward or both.")] = "forward",
    function: FunctionName = None,
    given: Inputs = None,
    threads: Threads = THREADS,
    shared: SharedBytes = 0,
    ttgir: Annotated[bool, typer.Option("--ttgir", help="Print Triton's GPU code beside its source lines.")] = False,
    llir: Annotated[bool, typer.Option("--llir", help="LLVM's code.")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="PTX; for AMD its assembly.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Machine code.")] = False,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B", help="What changes between two kernels, as triton triton:num_warps=8 or triton mine.py."
        ),
    ] = None,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="Instead: every Triton kernel, for a GPU of each architecture.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="With --everywhere: append what was found to this file, as JSON lines.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What does it compile to? Registers, occupancy and instructions of a launch, for GPUs that need not be here."""
    from tilewright import hardware
    from tilewright.report import inspection as report

    if everywhere:
        others = {p.name for p in ctx.command.params} - {"everywhere", "record", "as_json"}
        refuse(ctx, others, "not with --everywhere, which is of all operations, on cases and GPUs of its own")
        _everywhere(record, as_json)
        return
    refuse(ctx, {"record"}, "for --everywhere; a launch is for its reader")
    if target is None:
        raise typer.BadParameter("name an operation or a file, or give --everywhere.")
    path, kind = Path(target), kind_of(target)
    refuse_of_another_kind(ctx, kind)
    if as_json:
        refuse(ctx, {"ttgir", "llir", "ptx", "sass"}, "not with --json, which has no code")
    if diff:
        refuse(ctx, {"kernel"}, "not with --diff, which names its two kernels")
        if len(case or ()) > 1 or len(dtype or ()) > 1 or direction == "both":
            raise typer.BadParameter("--diff is of one call: name one --case, one --dtype and one --direction.")
    named = [hardware.datasheet(name.strip()) for name in gpu.split(",")]
    gpus = list({one.name: one for one in named}.values())
    forms = [name for name, wanted in (("ttgir", ttgir), ("llir", llir), ("ptx", ptx), ("sass", sass)) if wanted]
    if direction not in DIRECTIONS:
        raise typer.BadParameter(f"'{direction}' is none of {', '.join(DIRECTIONS)}.")
    if kind == "cu":
        jobs = [lambda one=one: _of_cuda_file(path, function, one, threads, shared) for one in gpus]
    elif kind == "py":
        jobs = [lambda one=one: _of_file(path, function, given or [], one) for one in gpus]
    else:
        chosen = Chosen(target, files or [], case, dtype, DIRECTIONS[direction])
        if diff:
            for one in gpus:
                _show_difference(chosen, one, diff, forms, as_json)
            return
        jobs = [
            lambda one=one, each=each: chosen.inspected(each, one) for each in chosen.kernels(kernel) for one in gpus
        ]
    found = _run(jobs)
    if not found:
        raise NothingLaunched(target, is_file=kind != "op")
    if as_json:
        for one in found:
            print(json.dumps(one.as_json()))
    elif forms:
        screen = console()
        for one in found:  # cut off at the edge of a terminal, whole in a file
            screen.print(report.code(one, forms), soft_wrap=not screen.is_terminal)
    else:
        console().print(report.overview(found))
        if others := _forms_of_all(found):
            say_next(f"tilewright {shlex.join(sys.argv[1:])} --sass  (or {', '.join(others)})")
    if any(report.is_bad(one) for one in found):
        raise typer.Exit(1)


def _forms_of_all(found: Found) -> list[str]:
    """Options beside --sass for code that all have; none where nothing compiles."""
    from tilewright.workbench.inspect import Inspection
    from tilewright.workbench.inspect.listing import forms

    compiled = [forms(one.made) for one in found if isinstance(one, Inspection)]
    return [f"--{form}" for form in ("ttgir", "llir", "ptx") if compiled and all(form in each for each in compiled)]


def _run(jobs: list[Callable[[], Found]]) -> Found:
    found: Found = []
    with progress("compiling", len(jobs)) as advance:
        for job in jobs:
            with contextlib.redirect_stdout(sys.stderr):  # what a launcher prints is not ours to say
                found += job()
            advance("")
    return found


def _everywhere(path: Path | None, as_json: bool) -> None:
    from tilewright import hardware, registry
    from tilewright.record import append, require_writable, stamp
    from tilewright.workbench.inspect import Inspection
    from tilewright.workbench.inspect.portability import TARGETS, compiled_for, figures, flaw

    if path:
        require_writable(path)
    ops = [registry.load(name) for name in source.op_files()]
    found = _run([lambda gpu=gpu: compiled_for(gpu, ops) for gpu in TARGETS])
    gpus: dict[tuple[Path, str], dict[str, Any]] = {}
    for one in found:
        if isinstance(one, Inspection) and one.launch:
            gpus.setdefault((Path(one.launch.code.file), one.name), {})[one.gpu.name] = figures(one)
    records = [
        stamp(
            "resources",
            file.stem,
            name,
            source.file_hash(file),
            file=f"src/tilewright/ops/{file.name}",
            gpus=by_gpu,
            versions=hardware.versions(),
        )
        for (file, name), by_gpu in gpus.items()
    ]
    if path:
        append(path, records)
    flaws = [f"{one.name} for {one.gpu.name}: {what}" for one in found if (what := flaw(one))]
    for line in map(json.dumps, records) if as_json else flaws:
        print(line)
    if not as_json:
        print(f"{len(records)} kernels for {len(TARGETS)} GPUs: {len(found) - len(flaws)} fit, {len(flaws)} do not.")
        say_next("make pages" if path else "tilewright inspect OP --gpu NAME for the details")
    if flaws:
        raise typer.Exit(1)


class Chosen:
    """An operation, with what was said of its cases."""

    def __init__(
        self, name: str, files: list[Path], cases: list[str] | None, dtypes: list[str] | None, directions: tuple
    ):
        if kind_of(name) != "op":
            raise NotAnOp(name)
        self.op: Op = load_op(name, files)
        if directions == ("backward",) and self.op.backward_cost is None:
            raise NoGradient(name)
        self.files, self.directions = files, directions
        wanted = dtypes_of(self.op, dtypes) or [self.op.bench_dtype]
        self.cases = [case.with_dtype(d) for case in cases_of(self.op, cases) or [] for d in wanted]
        self.defaults = [case.with_dtype(wanted[0]) for case in (*self.op.bench, *self.op.check)]

    def kernels(self, names: list[str] | None) -> list[Kernel]:
        """Those named, those of files, or all that are compiled."""
        from tilewright import registry

        picked = registry.pick(self.op, names or []) if names or not self.files else []
        known = [one for one in picked if names or (one.language in ("triton", "cuda") and not one.is_baseline)]
        return [*map(self._compiled, known), *self._mine()]

    def pair(self, names: Sequence[str]) -> list[Kernel]:
        """The two of these names, of the operation or of files."""
        from tilewright import registry

        known = registry.named(self.op) | {kernel.name: kernel for kernel in self._mine()}
        for name in names:
            if name not in known:
                raise UnknownKernel(self.op.name, name, known)
        return [self._compiled(known[name]) for name in names]

    def _compiled(self, kernel: Kernel) -> Kernel:
        if whose := _whose(kernel, self.directions):
            raise NotCompiled(self.op.name, kernel.name, whose)
        return kernel

    def _mine(self) -> list[Kernel]:
        from tilewright import hardware, registry
        from tilewright.workbench.inspect.fake_gpu import standing_in

        if self.files and self.directions == ("backward",):
            raise typer.BadParameter("--direction: of a file's kernel only the forward direction is compiled.")
        with standing_in(hardware.datasheet("h200")):  # a file may ask for a GPU when it is read
            return [registry.load_file(path, self.op) for path in self.files]

    def inspected(self, kernel: Kernel, gpu: GPU) -> Found:
        """On the cases asked for, or on the first of the op's own that the kernel takes."""
        from tilewright.workbench.inspect import inspect_kernel

        found: Found = []
        for case in self.cases or self.defaults:
            found += inspect_kernel(self.op, kernel, case, gpu, self.directions)
            if found and not self.cases:
                break
        return found


def _whose(kernel: Kernel, directions: Sequence[str]) -> str | None:
    """Who makes a kernel's machine code, where it is not to be had here."""
    from tilewright.registry import SEARCHED

    if kernel.language == "numba":
        return "compiled by numba, when it runs"
    if kernel.name == SEARCHED:
        return "found by a search on the GPU, which begins with what compile shows"
    if kernel.name == "compile":
        return None if "forward" in directions else "written by torch.compile, whose backward is not to be had here"
    return "torch's own, which is not compiled here" if kernel.is_baseline and kernel.language != "peer" else None


def _of_file(path: Path, name: str | None, given: list[str], gpu: GPU) -> Found:
    from tilewright import registry
    from tilewright.workbench.audit.inputs import make
    from tilewright.workbench.inspect import inspect_launch
    from tilewright.workbench.inspect.launches import of_call

    def load() -> tuple[Callable[..., Any], list[Any]]:
        return registry.launcher(path, name), [make(text, "meta") for text in given]

    title = f"{path.name}({', '.join(given)})"
    return [inspect_launch(launch, title) for launch in of_call(load, gpu)]


def _of_cuda_file(path: Path, name: str | None, gpu: GPU, threads: int, shared: int) -> Found:
    from tilewright.workbench.inspect import Refused, inspect_cuda_file

    if not path.is_file():
        raise FileMissing(path, "a CUDA C++ file")
    found = list(inspect_cuda_file(path, gpu, threads, shared))
    if any(isinstance(one, Refused) for one in found):
        return found
    return of_name(path, name, found, lambda one: one.name)


def of_name(path: Path, name: str | None, found: Sequence[Any], called: Callable[[Any], str]) -> list[Any]:
    """Of a file's kernels the one of that name, whatever its namespace, or all instances of a template; all unless
    told."""
    if name is None:
        return list(found)
    chosen = [one for one in found if name in _names(called(one))]
    if not chosen:
        raise UnknownFunction(path, name, map(called, found))
    return chosen


def _names(called: str) -> tuple[str, ...]:
    template = called.partition("<")[0]
    return called, template, template.rpartition("::")[2]


def _show_difference(chosen: Chosen, gpu: GPU, names: tuple[str, str], forms: list[str], as_json: bool) -> None:
    from tilewright.report import inspection as report

    with contextlib.redirect_stdout(sys.stderr):  # what a launcher prints is not ours to say
        case, found = _compared(chosen, gpu, names)
    if as_json:
        on = {"gpu": gpu.name, "case": dict(case.point), "dtype": case.dtype}
        print(json.dumps({**on, "a": names[0], "b": names[1], **found.as_json()}))
    else:
        title = f"{chosen.op.name}, {case} {case.dtype}, {gpu.name}"
        console().print(report.difference(found, title, names, forms))


def _compared(chosen: Chosen, gpu: GPU, names: tuple[str, str]) -> tuple[Case, Difference]:
    """On the first case that both kernels take."""
    from tilewright.workbench.inspect import inspect_kernel
    from tilewright.workbench.inspect.difference import Difference, Variant

    variants = [Variant.parse(name) for name in names]
    kernels = chosen.pair([variant.kernel for variant in variants])
    for case in chosen.cases or chosen.defaults:
        sides = [list(inspect_kernel(chosen.op, one, case, gpu, chosen.directions)) for one in kernels]
        if all(sides):
            a, b = (variant.applied(side) for variant, side in zip(variants, sides, strict=True))
            return case, Difference(a, b)
    raise NothingLaunched(f"{names[0]} or {names[1]}")

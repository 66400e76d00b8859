"""The kernels, cases and files that the arguments of a command select."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilewright import source
from tilewright.cli.options import CallOptions
from tilewright.cli.shared import load_op, parse_cases, parse_dtypes, require_files, stdout_to_stderr
from tilewright.errors import (
    AmbiguousFunction,
    DirectoryGiven,
    KernelOfAnOp,
    NoGradient,
    NoReference,
    NotAnOp,
    NotCompiled,
    SolutionGiven,
    TilewrightError,
    UnknownKernel,
)

if TYPE_CHECKING:
    from tilewright.spec import Case, Kernel, Op

FOR_AN_OP = {"files", "kernel", "case", "dtype", "direction", "diff", "predict"}


def target_kind(target: str) -> str:
    """Return "op" for an operation, "py" or "cu" for a file."""
    path = Path(target)
    if target in source.op_files():
        return "op"
    if path.is_dir():
        raise DirectoryGiven(path)
    if target.endswith((".py", ".cu")):
        return target[-2:]
    if path.exists():
        raise NotAnOp(path)
    return "op"


def defines_operation(target: str, options: CallOptions) -> bool:
    """Return whether a target is a file that defines an operation of its own: a reference, and its inputs.

    With --input alone, a file is a function to call.
    """
    if target_kind(target) != "py":
        return False
    return options.reference is not None or (not options.inputs and "reference" in source.definitions(Path(target)))


def load_target(target: str, options: CallOptions) -> Op:
    """Load an operation by its name, or the operation that a user's file defines."""
    if target_kind(target) == "op":
        return load_op(target, options.files)
    if target.endswith(".cu"):
        raise NotAnOp(target)
    path = Path(target)
    source.require_python_file(path)
    require_files([path, *(options.files or [])])
    from tilewright import own

    if options.reference is None and "reference" not in source.definitions(path):
        raise _no_reference(path)
    with stdout_to_stderr():
        return own.load_operation(
            path, reference=options.reference, inputs=options.inputs or (), function=options.function
        )


def _no_reference(path: Path) -> TilewrightError:
    """Return an error that names the command that would work."""
    found = source.definitions(path)
    functions = {name: one for name, one in found.items() if isinstance(one, ast.FunctionDef) and name[0] != "_"}
    named = re.findall(r"@(?:\w+\.)?kernel\(\s*[\"'](\w+)[\"']", path.read_text())
    for name in [*named, *functions]:
        if name in source.op_files():
            return KernelOfAnOp(path, name)
    if "ModelNew" in found:
        return SolutionGiven(path)
    plain = {name: one for name, one in functions.items() if "jit" not in ast.unparse(one).partition("def ")[0]}
    launching = [name for name, one in plain.items() if _launches(one)]
    others = [name for name in plain if name not in launching]
    kernel = (launching or others or ["FUNCTION"])[-1]
    reference = next((name for name in others if re.search("ref|torch|naive|eager|plain", name)), None)
    reference = reference or next((name for name in others if name != kernel), "reference")
    taken = functions[kernel].args.args if kernel in functions else [ast.arg("x")]
    required = taken[: len(taken) - len(functions[kernel].args.defaults)] if kernel in functions else taken
    inputs = [word for one in required for word in ("-i", _example(one))]
    command = shlex.join(["tilewright", "check", str(path), "-f", kernel, "--reference", reference, *inputs])
    return NoReference(path, plain, command)


def _launches(function: ast.FunctionDef) -> bool:
    """Return whether a function contains `kernel[grid](…)`."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Subscript) for called in calls)


def _example(parameter: ast.arg) -> str:
    kind = ast.unparse(parameter.annotation) if parameter.annotation else ""
    return {"int": "8", "float": "1e-6", "bool": "True"}.get(
        "float" if parameter.arg == "eps" else kind, "64x1000:bf16"
    )


def refuse(ctx: typer.Context, names: Collection[str], why: str) -> None:
    """Raise if one of these parameters was given on the command line, where it would have no effect."""
    given = [p for p in ctx.command.params if p.name in names and _is_given(ctx, p.name)]
    if given:
        spelled = (p.opts[0] if p.param_type_name == "option" else (p.metavar or "") for p in given)
        raise typer.BadParameter(f"{', '.join(spelled)}: {why}.")


def _is_given(ctx: typer.Context, name: str) -> bool:
    origin = ctx.get_parameter_source(name)
    return origin is not None and origin.name == "COMMANDLINE"


def refuse_for_operations(ctx: typer.Context, target: str | None) -> None:
    """Raise if options for a user's operation are given without a file that defines one."""
    if target is None or target_kind(target) == "op":
        refuse_other_kinds(ctx, "op")


def next_words(target: str, options: CallOptions) -> list[str]:
    """Return the command to try after a check: time an operation of ours, explain a user's."""
    files = [str(path) for path in options.files or []]
    if target_kind(target) == "op":
        return ["bench", target, *files]
    named = (("-f", options.function), ("--reference", options.reference), *(("-i", i) for i in options.inputs or ()))
    return [
        "explain",
        target,
        *files,
        *(word for option, value in named if value is not None for word in (option, value)),
    ]


def refuse_other_kinds(ctx: typer.Context, kind: str) -> None:
    """Raise for options that are meant for another kind of target: op, py, cu, or own for a user's operation."""
    if kind == "op":
        refuse(ctx, {"function", "inputs", "reference"}, "only for a FILE; an operation has its own inputs")
    elif kind != "own":
        own = "--input and --function" if kind == "py" else "--function and --threads"
        refuse(ctx, FOR_AN_OP, f"only for an OP; a .{kind} FILE takes {own}")
    if kind == "cu":
        refuse(ctx, {"inputs", "reference"}, "only for a .py FILE; a .cu FILE is compiled and not called")
    else:
        refuse(ctx, {"threads", "shared"}, "only for a .cu FILE; other kernels set them at launch")


class OpSelection:
    """An operation, and the kernels and cases of it that a command works on."""

    def __init__(self, name: str, options: CallOptions, directions: tuple[str, ...] = ("forward",)):
        self.files, self.names, self.directions = options.files or [], options.kernel or [], directions
        self.op: Op = load_target(name, options)
        if directions == ("backward",) and self.op.backward_cost is None:
            raise NoGradient(name)
        loaded = {"file": name, "reference": options.reference, "inputs": options.inputs or []}
        self.origin = {"operation": loaded} if self.op.file else {}  # what a call needs besides the op's name
        self.dtypes = parse_dtypes(self.op, options.dtype) or [self.op.bench_dtype]
        self.cases = [case.with_dtype(d) for case in parse_cases(self.op, options.case) or [] for d in self.dtypes]
        self.default_cases = [case.with_dtype(self.dtypes[0]) for case in (*self.op.bench, *self.op.check)]

    @property
    def candidates(self) -> Sequence[Case]:
        """The selected cases, or the operation's own, of which the first that a kernel accepts is used."""
        return self.cases or self.default_cases

    def known_kernels(self) -> list[Kernel]:
        """Return the named kernels of the operation; all of them if neither a kernel nor a file is named."""
        return select_kernels(self.op, self.names, self.files)

    def compiled_kernels(self) -> list[Kernel]:
        """Return the selected kernels that can be compiled offline, those of the user's files among them."""
        known = self.known_kernels()
        if not self.names:
            known = [one for one in known if one.language in ("triton", "cuda") and not one.is_baseline]
        return [*map(self._require_compiled, known), *self._kernels_of_files()]

    def pair(self, names: Sequence[str]) -> list[Kernel]:
        """Return the kernels with these names, of the operation or of the user's files."""
        from tilewright import registry

        known = registry.named(self.op) | {kernel.name: kernel for kernel in self._kernels_of_files()}
        for name in names:
            if name not in known:
                raise UnknownKernel(self.op.name, name, known)
        return [self._require_compiled(known[name]) for name in names]

    def _require_compiled(self, kernel: Kernel) -> Kernel:
        if why := _why_not_compiled(kernel, self.directions):
            raise NotCompiled(self.op.name, kernel.name, why)
        return kernel

    def _kernels_of_files(self) -> list[Kernel]:
        from tilewright import hardware, registry
        from tilewright.workbench.inspect.fake_gpu import fake_gpu

        if self.files and self.directions == ("backward",):
            raise typer.BadParameter("--direction: only the forward pass of a FILE can be compiled.")
        with fake_gpu(hardware.datasheet("h200")):  # a file may query the GPU when it is imported
            return [registry.load_file(path, self.op) for path in self.files]


def select_kernels(op: Op, names: Sequence[str], files: Sequence[Path]) -> list[Kernel]:
    """Return the named kernels; without names and files, all of an operation, or those in the file of a user's."""
    from tilewright import own, registry

    if names or not op.file:
        return registry.pick(op, list(names)) if names or not files else []
    found = own.kernels_of(op) if not files else []
    if not found and not files:
        raise AmbiguousFunction(op.file, own.candidates(op.file, op.reference.__name__))
    return found


def code_hash(op: Op, kernel: str) -> str:
    """Return the hash of a kernel's code, or of the file of a user's operation."""
    return source.file_hash(op.file) if op.file else source.kernel_hash(op.name, kernel) or ""


def _why_not_compiled(kernel: Kernel, directions: Sequence[str]) -> str | None:
    """Return why a kernel has no machine code on this machine; None if it has."""
    from tilewright.registry import SEARCHED

    if kernel.language == "numba":
        return "compiled by Numba when it runs"
    if kernel.name == SEARCHED:
        return "the result of an autotuning search on the GPU, which starts from the kernel `compile`"
    if kernel.name == "compile":
        return None if "forward" in directions else "generated by torch.compile, whose backward is not available here"
    return "part of torch, which is not compiled here" if kernel.origin == "baseline" else None

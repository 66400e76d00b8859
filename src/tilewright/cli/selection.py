"""The kernels, cases and files that the arguments of a command select."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilewright import source
from tilewright.cli.options import OpOptions
from tilewright.cli.shared import load_op, parse_cases, parse_dtypes
from tilewright.errors import DirectoryGiven, NoGradient, NotAnOp, NotCompiled, UnknownKernel

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


def refuse(ctx: typer.Context, names: Collection[str], why: str) -> None:
    """Raise if one of these parameters was given on the command line, where it would have no effect."""
    given = [p for p in ctx.command.params if p.name in names and _is_given(ctx, p.name)]
    if given:
        spelled = (p.opts[0] if p.param_type_name == "option" else (p.metavar or "") for p in given)
        raise typer.BadParameter(f"{', '.join(spelled)}: {why}.")


def _is_given(ctx: typer.Context, name: str) -> bool:
    origin = ctx.get_parameter_source(name)
    return origin is not None and origin.name == "COMMANDLINE"


def refuse_other_kinds(ctx: typer.Context, kind: str) -> None:
    """Raise for options that are meant for another kind of target than this one."""
    if kind == "op":
        refuse(ctx, {"function", "inputs"}, "only for a FILE; an operation makes its own inputs")
    else:
        own = "--input and --function" if kind == "py" else "--function and --threads"
        refuse(ctx, FOR_AN_OP, f"only for an OP; a .{kind} FILE takes {own}")
    if kind == "cu":
        refuse(ctx, {"inputs"}, "only for a .py FILE; a .cu FILE is compiled and not called")
    else:
        refuse(ctx, {"threads", "shared"}, "only for a .cu FILE; other kernels set them at launch")


class OpSelection:
    """An operation, and the kernels and cases of it that a command works on."""

    def __init__(self, name: str, options: OpOptions, directions: tuple[str, ...] = ("forward",)):
        if target_kind(name) != "op":
            raise NotAnOp(name)
        self.files, self.names, self.directions = options.files or [], options.kernel or [], directions
        self.op: Op = load_op(name, self.files)
        if directions == ("backward",) and self.op.backward_cost is None:
            raise NoGradient(name)
        self.dtypes = parse_dtypes(self.op, options.dtype) or [self.op.bench_dtype]
        self.cases = [case.with_dtype(d) for case in parse_cases(self.op, options.case) or [] for d in self.dtypes]
        self.default_cases = [case.with_dtype(self.dtypes[0]) for case in (*self.op.bench, *self.op.check)]

    @property
    def candidates(self) -> Sequence[Case]:
        """The selected cases, or the operation's own, of which the first that a kernel accepts is used."""
        return self.cases or self.default_cases

    def known_kernels(self) -> list[Kernel]:
        """Return the named kernels of the operation; all of them if neither a kernel nor a file is named."""
        from tilewright import registry

        return registry.pick(self.op, self.names) if self.names or not self.files else []

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

"""Operations in users' files: a reference in plain PyTorch, its inputs, and the kernels beside it.

A file defines `reference` and `inputs` at module level, and may define `cases`, `bench`, `dtypes`, `cost`,
`backward_cost` and `batch`, which mean what they mean for an Op. Instead of `inputs`, arguments in command-line syntax
can be given.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright import registry
from tilewright.captured import portable, signature_of
from tilewright.errors import BadReference, FileBroken, NoInputs, NoReference, TilewrightError, WrongInputs, first_line
from tilewright.inputs import TensorInput, parse_input
from tilewright.spec import FLOATS, Case, Cost, Draw, Kernel, Op
from tilewright.variants import PROBLEM_VALUES, vary
from tilewright.worker.execute import flatten, uncomparable
from tilewright.worker.tampering import FunctionSnapshot

Arguments = tuple[Any, ...]
NAMES = ("reference", "inputs", "cases", "bench", "dtypes", "cost", "backward_cost", "batch")
PLAIN = (bool, int, float, str, type(None), torch.dtype)


def load_operation(
    path: Path, *, reference: str | None = None, inputs: Sequence[str] = (), function: str | None = None
) -> Op:
    """Return the operation that a user's file defines, with the kernels of the file.

    `reference` and `function` name functions of the file; `inputs` are arguments in command-line syntax.
    """
    before = FunctionSnapshot()
    module = registry.load_module(path)
    if replaced := before.replaced():
        raise FileBroken(path, None, f"it replaces {', '.join(replaced[:4])}, on which verdicts depend")
    name = reference or "reference"
    fn = getattr(module, name, None)
    if fn is None and reference is None:
        command = f"tilewright check {path} --function NAME --reference NAME --input 64x1000:bfloat16"
        raise NoReference(path, registry.functions_of(module), command)
    fn = portable(registry.named_function(module, path, name))
    drawn = getattr(module, "inputs", None)
    if inputs:
        make, cases, dtypes, is_varied = _from_texts(fn, name, inputs)
    elif callable(drawn):
        is_varied = bool(inspect.signature(drawn).parameters)
        make = drawn if is_varied else _seeded(drawn)
        cases = _cases(module, path, "cases") or [Case(())]
        dtypes = tuple(getattr(module, "dtypes", FLOATS))
    else:
        raise NoInputs(path, name, signature_of(fn))
    make = _Inputs(make, path)
    dtypes = _distinct(dtypes, make, cases[0])
    cases = [case.with_dtype(dtypes[0]) for case in cases]
    has_gradient = _run_once(fn, make, cases[0], path, name, inputs)
    backward_cost = getattr(module, "backward_cost", None) or (lambda *_: Cost(0, 0))
    op = Op(
        path.name,
        fn,
        getattr(module, "cost", None) or (lambda *_: Cost(0, 0)),
        inputs=make,
        check=cases,
        bench=cases if inputs else _cases(module, path, "bench") or cases[-1:],
        backward_cost=backward_cost if has_gradient else None,
        is_varied=is_varied,
        batch=None if inputs else getattr(module, "batch", None),
        dtypes=dtypes,
        bench_dtypes=("bfloat16",) if "bfloat16" in dtypes else dtypes[:1],
        file=path,
    )
    reached = registry.names_reached(_code_of(getattr(module, name)), module)
    for kernel_name, kernel in _kernels(module, path, name, function).items():
        if kernel_name in reached or kernel is getattr(module, name):
            what = "is" if kernel_name not in reached else "calls"
            raise BadReference(path, name, f"{what} the kernel `{kernel_name}` itself")
        is_triton = bool(registry.launchers({kernel_name: kernel}, module))
        fits = getattr(kernel, "__tilewright_fits__", lambda *_: True)
        op.kernels[kernel_name] = Kernel(
            kernel_name, kernel, "triton" if is_triton else "python", fits, has_gradient, origin="user"
        )
    return op


def kernels_of(op: Op) -> list[Kernel]:
    """Return the kernels in the file of a user's operation."""
    return [kernel for kernel in op.kernels.values() if kernel.origin == "user"]


def candidates(path: Path, reference: str = "reference") -> list[str]:
    """Return the functions of a file that could be kernels."""
    module = registry.load_module(path)
    return [name for name in registry.functions_of(module) if name not in (*NAMES, reference)]


def _kernels(
    module: types.ModuleType, path: Path, reference: str, function: str | None
) -> dict[str, Callable[..., Any]]:
    """Return the named function; or those marked as kernels; or those that launch Triton; or the only function."""
    if function is not None:
        return {function: registry.named_function(module, path, function)}
    known = registry.functions_of(module)
    if marked := {n: fn for n, fn in known.items() if getattr(fn, "__tilewright_op__", None) == path.stem}:
        return marked
    helpers = registry.names_reached(_code_of(getattr(module, reference)), module)
    others = {name: fn for name, fn in known.items() if name not in (*NAMES, reference, *helpers)}
    return registry.launchers(others, module) or (others if len(others) == 1 else {})


def _code_of(reference: Callable[..., Any]) -> Any:
    """Return a reference's function, or the class of a module or another callable object."""
    return reference if isinstance(reference, types.FunctionType) else type(reference)


def _cases(module: types.ModuleType, path: Path, name: str) -> list[Case]:
    given = getattr(module, name, None) or []
    try:
        return [case if isinstance(case, Case) else Case(tuple(dict(case).items())) for case in given]
    except (TypeError, ValueError):
        what = f"`{name}` must be a list of sizes, e.g. [{{'M': 64, 'N': 1000}}], or tilewright.spec.grid(M=…, N=…)"
        raise FileBroken(path, None, what) from None


def _from_texts(
    reference: Callable[..., Any], name: str, texts: Sequence[str]
) -> tuple[Callable[[Draw], Arguments], list[Case], tuple[str, ...], bool]:
    """Return inputs that are drawn for texts in command-line syntax; the only case has one text per argument."""
    given = [parse_input(text) for text in texts]
    signature = signature_of(reference)
    try:
        bound = signature.bind(*given)
    except TypeError as error:
        raise WrongInputs(name, str(error), str(signature)) from None
    names = [n for n, p in signature.parameters.items() if n in bound.arguments and p.kind is not p.VAR_POSITIONAL]
    names += [f"argument {number + 1}" for number in range(len(names), len(given))]
    floats = [v.dtype for v in given if isinstance(v, TensorInput) and v.dtype.is_floating_point]
    dtype = str(floats[0] if floats else torch.float32).removeprefix("torch.")

    def make(draw: Draw) -> Arguments:
        return tuple(_drawn(parse_input(str(text)), draw, number) for number, (_, text) in enumerate(draw.case.point))

    return make, [Case(tuple(zip(names, texts, strict=True)), dtype)], (dtype,), True


def _drawn(value: Any, draw: Draw, number: int) -> Any:
    if not isinstance(value, TensorInput):
        return value
    if value.dtype.is_floating_point:
        return draw.randn(*value.shape, dtype=value.dtype)
    if draw.device == "meta":
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value.draw(torch.Generator(draw.device).manual_seed(draw.seed + number))


def _seeded(inputs: Callable[[], Any]) -> Callable[[Draw], Any]:
    """Return inputs that torch draws from the seed of a Draw, on the CPU."""

    def make(draw: Draw) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draw.seed)
            return inputs()

    return make


class _Inputs:
    """The inputs of a user's operation, validated, on the device of the Draw, and with the values it asks for."""

    def __init__(self, make: Callable[[Draw], Any], path: Path):
        self._make, self._path = make, path
        self._shapes: dict[Case, Arguments] = {}

    def __call__(self, draw: Draw) -> Arguments:
        if draw.device == "meta":
            if draw.case not in self._shapes:
                self._shapes[draw.case] = self._without_values(draw)
            return self._shapes[draw.case]
        if draw.values not in PROBLEM_VALUES:
            return self._arguments(draw)
        args = self._arguments(Draw(draw.case, draw.device, draw.seed))
        return tuple(vary(args, draw.values, draw.device, draw.seed))

    def _without_values(self, draw: Draw) -> Arguments:
        try:
            return self._arguments(draw)
        except TilewrightError:
            raise
        except Exception:  # inputs that depend on values
            made = self._arguments(Draw(draw.case, "cpu", draw.seed))
            return tuple(a.to("meta") if isinstance(a, Tensor) else a for a in made)

    def _arguments(self, draw: Draw) -> Arguments:
        try:
            made = self._make(draw)
        except TilewrightError:
            raise
        except Exception as error:
            if draw.device == "meta":
                raise
            is_size = isinstance(error, KeyError) and error.args and error.args[0] not in dict(draw.case.point)
            lacks = f"`inputs` needs the size {error.args[0]}, which `cases` does not give" if is_size else ""
            raise FileBroken(self._path, None, lacks or f"`inputs` fails ({first_line(error)})") from error
        made = tuple(made) if isinstance(made, tuple | list) else (made,)
        for number, value in enumerate(made):
            for leaf in [] if isinstance(value, Tensor) else pytree.tree_leaves(value):
                if not isinstance(leaf, PLAIN) or isinstance(value, dict):
                    what = f"argument {number + 1} holds a {type(leaf).__name__}, which must be an argument of its own"
                    raise FileBroken(self._path, None, f"`inputs`: {what}")
        return tuple(a.detach().to(draw.device) if isinstance(a, Tensor) else a for a in made)


def _distinct(dtypes: Sequence[str], make: _Inputs, case: Case) -> tuple[str, ...]:
    """Return the dtypes that lead to different inputs; the inputs' own if the user chose them."""
    kinds: dict[Any, str] = {}
    for name in dtypes:
        args = make(Draw(case.with_dtype(name), "meta", 0))
        found = [str(a.dtype).removeprefix("torch.") for a in args if isinstance(a, Tensor)]
        floats = [n for n in found if n in FLOATS or n == "float64"]
        kinds.setdefault(tuple(found), name if name in found or not floats else floats[0])
    return tuple(kinds.values())


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _run_once(
    reference: Callable[..., Any], make: _Inputs, case: Case, path: Path, name: str, texts: Sequence[str]
) -> bool:
    """Run the reference, on values only if it must; return whether it has a gradient."""

    def run(device: str) -> bool:
        args = make(Draw(case, device, 0))
        if not any(isinstance(a, Tensor) for a in args):
            raise BadReference(path, name, "takes no tensor")
        with torch.enable_grad():  # copies, to which the reference may write: `check` finds out
            copies = [a.detach().requires_grad_().clone() if _is_float(a) else a for a in args]
            returned = reference(*copies)
        if reason := uncomparable(returned):
            raise BadReference(path, name, reason)
        return any(output.requires_grad for output in flatten(returned))

    try:
        return run("meta")
    except BadReference:
        raise
    except Exception:  # it reads values, or fails on any device
        try:
            return run("cpu")
        except TilewrightError:
            raise
        except Exception as error:
            number = next((text for text in texts if text.isdecimal() and int(text) > 1), None)
            hint = f"; a tensor of {number} elements is written {number}:fp32" if number else ""
            raise BadReference(path, name, f"fails ({first_line(error)}){hint}") from error

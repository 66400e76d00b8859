"""The nouns every part speaks: Op, Kernel, Case, Cost."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.cost import Cost as Cost
from tilewright.errors import BadCase
from tilewright.source import PUBLIC

FLOATS = ("float32", "float16", "bfloat16")
Value = int | bool | str


@dataclass(frozen=True)
class Case:
    """A point in an Op's space: sizes and modes by name, and a dtype."""

    point: tuple[tuple[str, Value], ...]
    dtype: str = "float32"

    @staticmethod
    def parse(text: str, like: Case) -> Case:
        """A case from the form `--case` takes; `like` says which names there are and of what kind."""
        kinds = {name: type(value) for name, value in like.point}
        given: dict[str, Value] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if name in given:
                raise BadCase(text, f"{name} is given twice", str(like))
            if not equals or name not in kinds:
                raise BadCase(text, f"'{part}' is not one of {', '.join(kinds)} with a value", str(like))
            try:
                given[name] = _parse_value(value, kinds[name])
            except ValueError:
                raise BadCase(text, f"'{value}' is no value of {name}", str(like)) from None
        if missing := [name for name in kinds if name not in given]:
            raise BadCase(text, f"it lacks {', '.join(missing)}", str(like))
        return Case(tuple((name, given[name]) for name in kinds))

    def __getitem__(self, name: str) -> Value:
        return dict(self.point)[name]

    def with_dtype(self, dtype: str) -> Case:
        return replace(self, dtype=dtype)

    def with_size(self, name: str, value: Value) -> Case:
        return replace(self, point=tuple((n, value if n == name else v) for n, v in self.point))

    def __str__(self) -> str:
        """The form `--case` takes."""
        return ",".join(f"{name}={value}" for name, value in self.point)


def _parse_value(text: str, kind: type) -> Value:
    if kind is bool and text.lower() not in ("true", "false"):
        raise ValueError(text)
    value: Value = text.lower() == "true" if kind is bool else kind(text)
    if kind is int and value < 0:  # type: ignore[operator]
        raise ValueError(text)
    return value


def grid(**axes: Sequence[Value]) -> list[Case]:
    """Every combination of the axes' values."""
    return [Case(tuple(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def points(**axes: Sequence[Value]) -> list[Case]:
    """The axes' values taken side by side."""
    return [Case(tuple(zip(axes, values, strict=True))) for values in zip(*axes.values(), strict=True)]


VALUES = ("normal", "large", "tiny", "shifted", "integers", "constant rows", "one hot", "special", "repeated")
_SPECIAL = (float("inf"), -float("inf"), float("nan"), -0.0, 1e-40)


class Draw:
    """Random inputs for one case; the seed decides every value, `values` what they look like (one of VALUES)."""

    def __init__(self, case: Case, device: str, seed: int, values: str = "normal"):
        self.case = case
        self.values = values
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.device = device
        self.seed = seed
        self._generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def __getitem__(self, name: str) -> Any:
        return self.case[name]

    def randn(self, *dims: str | int, scale: float = 1.0) -> Tensor:
        """Normal values of the given standard deviation; a dimension is a size or its name in the case."""
        shape = self._sizes(dims)
        if self.device == "meta":  # where randn would import a compiler first
            return torch.empty(shape, device="meta", dtype=self.dtype)
        values = torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32)
        values = values if scale == 1.0 else values.mul_(scale)
        return (values if self.values == "normal" else self._like(values, scale)).to(self.dtype)

    def randint(self, *dims: str | int, high: str | int) -> Tensor:
        """Whole numbers from 0 up to `high`, without it, as int64; both may be names in the case."""
        shape = self._sizes(dims)
        if self.device == "meta":
            return torch.empty(shape, device="meta", dtype=torch.int64)
        (high,) = self._sizes((high,))
        numbers = torch.randint(max(1, high), shape, generator=self._generator, device=self.device)
        return numbers[:1].expand_as(numbers) if self.values == "repeated" and numbers.dim() else numbers

    def _sizes(self, dims: Sequence[str | int]) -> list[int]:
        return [int(self.case[dim]) if isinstance(dim, str) else dim for dim in dims]

    def _like(self, values: Tensor, scale: float) -> Tensor:
        """Normal values made into others; where the shape is too small for that, they stay."""
        if self.values == "large":
            return values * 8  # more, and what cancels in a gradient is honestly larger than the gradient
        if self.values == "tiny":
            return values * 2.0**-12
        if self.values == "shifted":
            return values - 64 * scale  # far from zero and near each other
        if self.values == "integers":
            return (values / scale).mul_(2).round_()
        if self.values == "special":
            return self._with_specials(values)
        if not values.dim() or not values.numel():
            return values
        if self.values == "constant rows":
            return values[..., :1].expand_as(values)
        if self.values == "one hot":
            best = values.argmax(-1, keepdim=True)
            return torch.zeros_like(values).scatter_(-1, best, scale)
        return values[:1].expand_as(values)  # repeated: an expanded layout can hold it

    def _with_specials(self, values: Tensor) -> Tensor:
        """One of each, in rows of their own where there are enough: an infinity would hide what becomes of a NaN."""
        if not values.numel():
            return values
        rows = values.view(-1, values.shape[-1] if values.dim() else 1)
        order, column = (
            torch.rand(size, generator=self._generator, device=self.device).argsort().tolist() for size in rows.shape
        )
        for place, value in enumerate(_SPECIAL):
            rows[order[place % len(order)], column[place % len(column)]] = value
        return values


def matrix_unit(dtype: torch.dtype) -> str:
    """The unit that a matrix product of this dtype runs on under torch's present settings."""
    if dtype == torch.float32:
        return "tensor.tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return "tensor." + str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Kernel:
    """One way to compute an Op."""

    name: str
    fn: Callable[..., Any]
    language: str  # torch, triton, cuda, numba: decides where it can run
    fits: Callable[..., bool]
    differentiable: bool
    builds_per_case: bool = False  # compiled anew for each shape, so check samples its cases
    is_baseline: bool = False  # what one could use without Tilewright


def _always(*_: object) -> bool:
    return True


@dataclass
class Op:
    """An operation as mathematics. `reference` in float64 is the truth, in the case's dtype it sets the error
    budget, as it is it is the `eager` kernel, and compiled it is the `compile` kernel."""

    name: str
    reference: Callable[..., Any]
    cost: Callable[..., Cost]
    inputs: Callable[[Draw], tuple[Any, ...]]
    check: Sequence[Case]
    bench: Sequence[Case]
    backward_cost: Callable[..., Cost] | None = None  # None: the Op has no gradients
    is_one_pass: bool = False  # whether forward makes the gradient too, so that only both directions at once tell
    takes: Callable[[Case], bool] = _always  # which sizes go together, where not all do
    batch: str | None = None  # the size of a first dimension along which results do not depend on each other
    grows: str | None = None  # the size that `sizes` changes; the batch unless told
    mutates: Callable[..., Collection[int]] = lambda *_: ()  # which of its arguments, by number, a kernel may change
    constants: Collection[int] = ()  # which of its arguments, by number, never need a gradient
    is_varied: bool = True  # whether values, sizes and layouts other than those `inputs` makes may be asked
    dtypes: tuple[str, ...] = FLOATS
    bench_dtypes: tuple[str, ...] = ("bfloat16",)  # the first is that of tools that look at one
    kernels: dict[str, Kernel] = field(default_factory=dict)
    shipped: Kernel | None = None
    calls: list[Callable[[str], Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kernel("eager", is_baseline=True)(self.reference)
        self.kernel("compile", builds_per_case=True, is_baseline=True)(compiled(self.reference))

    def kernel(
        self,
        name: str,
        *,
        language: str = "torch",
        fits: Callable[..., bool] = _always,
        differentiable: bool = True,
        builds_per_case: bool = False,
        is_baseline: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a way to compute this Op: `fn` takes what `inputs` makes and returns what `reference` returns."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            has_gradients = differentiable and self.backward_cost is not None
            self.kernels[name] = Kernel(name, fn, language, fits, has_gradients, builds_per_case, is_baseline)
            return fn

        return register

    def public(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function users call, with the arguments that `inputs` makes: one of the kernels, or torch's."""
        self.shipped = Kernel(PUBLIC, fn, "triton", _always, self.backward_cost is not None)
        return fn

    def also(self, call: Callable[[str], Any]) -> Callable[[str], Any]:
        """Register a call on a device for a kernel that no bench case reaches, so that it, too, is compiled for every
        GPU."""
        self.calls.append(call)
        return call

    @property
    def bench_dtype(self) -> str:
        return self.bench_dtypes[0]

    def benched(self, *dtypes: str) -> list[Case]:
        """The bench cases in these dtypes, or in all that are benched."""
        return [case.with_dtype(dtype) for dtype in dtypes or self.bench_dtypes for case in self.bench]

    def sizes(self) -> list[Case]:
        """The bench case that can be the smallest, as inputs and results of about 1 KiB, 4 KiB, … 4 GiB in all."""
        grows = self.grows or self.batch
        if grows is None:
            return []

        def size(case: Case) -> int:
            args = self.make(case, "meta")
            results = self.reference(*args)
            moved = (*args, *(results if isinstance(results, tuple) else (results,)))
            return sum(a.nbytes for a in moved if isinstance(a, Tensor))

        base = min((case.with_size(grows, 1) for case in self.benched(self.bench_dtype)), key=size)
        each = size(base.with_size(grows, 2)) - size(base)
        lengths = [1 + (2**power - size(base)) / each for power in range(10, 33, 2)]
        return [base.with_size(grows, 2 ** round(math.log2(length))) for length in lengths if length >= 1]

    def make(self, case: Case, device: str = "cpu", seed: int = 0, values: str = "normal") -> tuple[Any, ...]:
        """The inputs of a case."""
        return self.inputs(Draw(case, device, seed, values))


def compiled(reference: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """By torch.compile, when it is first called."""
    made = functools.cache(lambda: torch.compile(reference, fullgraph=True, dynamic=False, options=options))
    return lambda *args: made()(*args)


def kernel(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function of your own as a kernel of an Op, whatever its name: `@tilewright.kernel("softmax")`."""

    def mark(fn: Callable[..., Any]) -> Callable[..., Any]:
        fn.__tilewright_op__ = op  # type: ignore[attr-defined]
        return fn

    return mark

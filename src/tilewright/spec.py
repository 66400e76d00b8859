"""The vocabulary of every part: Op, Kernel, Case, Cost."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.captured import Portable
from tilewright.cost import Cost as Cost
from tilewright.errors import BadCase
from tilewright.source import PUBLIC

FLOATS = ("float32", "float16", "bfloat16")
KINDS = ("hidden", "intermediate", "vocabulary")  # kinds of sizes in models
Value = int | bool | str


@dataclass(frozen=True)
class Case:
    """Sizes and modes of an Op by name, and a dtype."""

    point: tuple[tuple[str, Value], ...]
    dtype: str = "float32"

    @staticmethod
    def parse(text: str, like: Case, *, partial: bool = False) -> Case:
        """Parse a case from the form that `--case` takes; `like` has the names and the types of their values.

        With `partial`, sizes that are not named are those of `like`.
        """
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
                raise BadCase(text, f"'{value}' is not a value of {name}", str(like)) from None
        if partial:
            given = dict(like.point) | given
        if missing := [name for name in kinds if name not in given]:
            raise BadCase(text, f"{', '.join(missing)} is missing", str(like))
        return Case(tuple((name, given[name]) for name in kinds))

    def __getitem__(self, name: str) -> Value:
        return dict(self.point)[name]

    def with_dtype(self, dtype: str) -> Case:
        return replace(self, dtype=dtype)

    def with_size(self, name: str, value: Value) -> Case:
        return replace(self, point=tuple((n, value if n == name else v) for n, v in self.point))

    def __str__(self) -> str:
        """Return the form that `--case` takes."""
        return ",".join(f"{name}={value_text(value)}" for name, value in self.point)


def value_text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parse_value(text: str, kind: type) -> Any:
    if kind is tuple:
        return tuple(int(part) for part in text.split("x"))
    if kind is bool and text.lower() not in ("true", "false"):
        raise ValueError(text)
    value: Value = text.lower() == "true" if kind is bool else kind(text)
    if kind is int and value < 0:  # type: ignore[operator]
        raise ValueError(text)
    return value


def grid(**axes: Sequence[Value]) -> list[Case]:
    """Return every combination of the axes' values."""
    return [Case(tuple(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def points(**axes: Sequence[Value]) -> list[Case]:
    """Return the axes' values taken side by side."""
    return [Case(tuple(zip(axes, values, strict=True))) for values in zip(*axes.values(), strict=True)]


VALUES = ("normal", "large", "tiny", "shifted", "integers", "constant rows", "one hot", "special", "repeated")
# Values that a reference may refuse. They are so far from zero that exp is zero: a maximum that starts at 0 shows.
FAR_BELOW = "far below zero"
HALVES = "halves"  # between two integers: a reference that rounds has a rule for them
_SPECIAL = (float("inf"), -float("inf"), float("nan"), -0.0, 1e-40)


class Draw:
    """Random inputs for one case. The seed fixes every value; `values` is their distribution, one of VALUES."""

    def __init__(self, case: Case, device: str, seed: int, values: str = "normal"):
        self.case = case
        self.values = values
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.device = device
        self.seed = seed
        self._generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def __getitem__(self, name: str) -> Any:
        return self.case[name]

    def randn(self, *dims: str | int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal values with a standard deviation of `scale`; a dimension is a size or its name in the case.

        The dtype is that of the case unless another is given.
        """
        shape, dtype = self._sizes(dims), dtype or self.dtype
        if self.device == "meta":  # randn on meta tensors would import a compiler
            return torch.empty(shape, device="meta", dtype=dtype)
        values = torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32)
        values = values if scale == 1.0 else values.mul_(scale)
        return (values if self.values == "normal" else self._like(values, scale)).to(dtype)

    def randint(self, *dims: str | int, high: str | int) -> Tensor:
        """Return integers in [0, high) as int64; sizes and `high` may be names in the case."""
        shape = self._sizes(dims)
        if self.device == "meta":
            return torch.empty(shape, device="meta", dtype=torch.int64)
        (high,) = self._sizes((high,))
        numbers = torch.randint(max(1, high), shape, generator=self._generator, device=self.device)
        return numbers[:1].expand_as(numbers) if self.values == "repeated" and numbers.dim() else numbers

    def _sizes(self, dims: Sequence[str | int]) -> list[int]:
        return [int(self.case[dim]) if isinstance(dim, str) else dim for dim in dims]

    def _like(self, values: Tensor, scale: float) -> Tensor:
        """Return the values transformed to the wanted distribution; unchanged where the shape is too small for it."""
        if self.values == "large":
            return values * 8  # with larger ones, cancellation error in a gradient exceeds the gradient
        if self.values == "tiny":
            return values * 2.0**-12
        if self.values == "shifted":
            return values - 64 * scale  # far from zero and close to each other
        if self.values == FAR_BELOW:
            return -128 * (values.abs() + scale)  # unlike a shift, it leaves the values as far apart as they are large
        if self.values == "integers":
            return (values / scale).mul_(2).round_()
        if self.values == HALVES:
            return (values / scale).mul_(2).round_().add_(0.5)
        if self.values == "special":
            return self._with_specials(values)
        if not values.dim() or not values.numel():
            return values
        if self.values == "constant rows":
            return values[..., :1].expand_as(values)
        if self.values == "one hot":
            best = values.argmax(-1, keepdim=True)
            return torch.zeros_like(values).scatter_(-1, best, scale)
        return values[:1].expand_as(values)  # repeated: can be stored with stride 0

    def _with_specials(self, values: Tensor) -> Tensor:
        """Insert one of each special value, in rows of their own where possible: an infinity would mask a NaN."""
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
    """Return the unit that a GEMM of this dtype runs on under torch's current settings."""
    if dtype == torch.float32:
        return "tensor.tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return "tensor." + str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Kernel:
    """One implementation of an Op."""

    name: str
    fn: Callable[..., Any]
    language: str  # torch, triton, gluon, cuda, numba, or python if not known: decides where it can run
    fits: Callable[..., bool]
    differentiable: bool
    builds_per_case: bool = False  # compiled for each shape, so check samples its cases
    origin: str = "ours"  # or baseline (torch's own), peer (another library's), user

    @property
    def is_baseline(self) -> bool:
        """Return whether users have it without Tilewright."""
        return self.origin in ("baseline", "peer")


def _always(*_: object) -> bool:
    return True


@dataclass
class Op:
    """An operation as mathematics.

    `reference` serves four purposes: in float64 it is the truth, in the case's dtype it sets the error budget, as it is
    it is the `eager` baseline, and compiled it is the `compile` baseline.
    """

    name: str
    reference: Callable[..., Any]
    cost: Callable[..., Cost]
    inputs: Callable[[Draw], tuple[Any, ...]]
    check: Sequence[Case]
    bench: Sequence[Case]
    backward_cost: Callable[..., Cost] | None = None  # None: the Op has no gradients
    is_one_pass: bool = False  # forward computes the gradient too: time both directions together
    takes: Callable[[Case], bool] = _always  # whether the sizes of a case are valid together
    batch: str | None = None  # the size of a leading dimension along which results are independent
    grows: str | None = None  # the size that `sizes` varies [default: the batch]
    # Sizes that `bench --random` draws by kind: one of KINDS, "row" for any of them, or "dimension".
    draws: Mapping[str, str] = field(default_factory=dict)
    # How precisely a GPU adds the inputs, relative to the largest term, where that is less than fp32.
    precision: Callable[..., float] = lambda *_: 0.0
    mutates: Callable[..., Collection[int]] = lambda *_: ()  # positions of the arguments that a kernel may write to
    constants: Collection[int] = ()  # positions of the arguments that never need a gradient
    is_varied: bool = True  # whether check may vary values, sizes and strides
    dtypes: tuple[str, ...] = FLOATS
    bench_dtypes: tuple[str, ...] = ("bfloat16",)  # tools that use one dtype use the first
    kernels: dict[str, Kernel] = field(default_factory=dict)
    shipped: Kernel | None = None
    calls: list[Callable[[str], Any]] = field(default_factory=list)
    variants: list[Op] = field(default_factory=list)  # over other dimensions, which `bench --random` draws too
    file: Path | None = None  # that defines it, if it is a user's

    def __post_init__(self) -> None:
        self.kernel("eager", origin="baseline")(self.reference)
        self.kernel("compile", builds_per_case=True, origin="baseline")(compiled(self.reference))

    def kernel(
        self,
        name: str,
        *,
        language: str = "torch",
        fits: Callable[..., bool] = _always,
        differentiable: bool = True,
        builds_per_case: bool = False,
        origin: str = "ours",
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register an implementation: `fn` takes the inputs of a case and returns what `reference` returns."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            has_gradients = differentiable and self.backward_cost is not None
            self.kernels[name] = Kernel(name, fn, language, fits, has_gradients, builds_per_case, origin)
            return fn

        return register

    def public(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register the public function, which takes the inputs of a case and calls one of the kernels or torch."""
        self.shipped = Kernel(PUBLIC, fn, "triton", _always, self.backward_cost is not None)
        return fn

    def also(self, call: Callable[[str], Any]) -> Callable[[str], Any]:
        """Register a call for a kernel that no bench case launches, so that it is compiled for every GPU."""
        self.calls.append(call)
        return call

    def over(
        self, reference: Callable[..., Any], public: Callable[..., Any], choices: Sequence[int | tuple[int, ...]]
    ) -> None:
        """Add a variant on tensors [A, N, B] over any of these dimensions: both functions take x and the dimensions."""

        def cost(of: Callable[..., Cost], x: Tensor, dims: int | tuple[int, ...]) -> Cost:
            reduced = math.prod(x.shape[d] for d in (dims if isinstance(dims, tuple) else (dims,)))
            return of(torch.empty(x.numel() // max(1, reduced), reduced, dtype=x.dtype, device="meta"))

        spelled = {"+".join(map(str, dims)) if isinstance(dims, tuple) else str(dims): dims for dims in choices}
        backward = self.backward_cost
        variant = Op(
            self.name,
            reference,
            functools.partial(cost, self.cost),
            inputs=lambda draw: (draw.randn("A", "N", "B"), spelled[draw["over"]]),
            check=grid(A=(3,), N=(7,), B=(5,), over=tuple(spelled)),
            bench=grid(A=(64,), N=(1024,), B=(512,), over=tuple(spelled)),
            backward_cost=None if backward is None else functools.partial(cost, backward),
            batch=None,
            grows="A",
            draws={"N": "dimension", "B": "dimension"},
            dtypes=self.dtypes,
        )
        variant.public(public)
        self.variants.append(variant)

    @property
    def length(self) -> str | None:
        """The size of a row: the one size that models set, or None if they set none or several."""
        names = [name for name, kind in self.draws.items() if kind != "dimension"]
        return names[0] if len(names) == 1 else None

    @property
    def bench_dtype(self) -> str:
        return self.bench_dtypes[0]

    def benched(self, *dtypes: str) -> list[Case]:
        """Return the bench cases in these dtypes [default: all bench dtypes]."""
        return [case.with_dtype(dtype) for dtype in dtypes or self.bench_dtypes for case in self.bench]

    def sizes(self) -> list[Case]:
        """Return the smallest bench case scaled to about 1 KiB, 4 KiB, … 4 GiB of inputs and results in total."""
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
        """Return the inputs of a case."""
        return self.inputs(Draw(case, device, seed, values))


def compiled(reference: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return the reference compiled by torch.compile on its first call."""
    made = functools.cache(lambda fn: torch.compile(fn, fullgraph=True, dynamic=False, options=options))
    return lambda *args: made(bound_to(reference, args))(*args)


def bound_to(reference: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """Return the plain function that a reference calls: for one that holds tensors, a copy for these arguments."""
    return reference.bound_to(args) if isinstance(reference, Portable) else reference


def kernel(op: str, *, fits: Callable[..., bool] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function of any name as your kernel of an operation: `@tilewright.kernel("softmax")`.

    `fits` takes the arguments of a call and returns whether the kernel takes it; cases that it does not take are left
    out. A kernel that raises NotImplementedError does not take a case either.
    """

    def mark(fn: Callable[..., Any]) -> Callable[..., Any]:
        fn.__tilewright_op__ = op  # type: ignore[attr-defined]
        if fits is not None:
            fn.__tilewright_fits__ = fits  # type: ignore[attr-defined]
        return fn

    return mark

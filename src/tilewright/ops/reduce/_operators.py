"""Reductions: launch plans, differentiable operators, and the call path.

A reduction is a term of each element, a way to combine terms, and a function of the result: a norm is the root of a sum
of squares. Reading the input once is all the work, so what matters is that every multiprocessor always has loads in
flight. Short rows: several per program, as a tile. Few long rows: each is split into parts, whose partial results a
second kernel combines (and a third, where there are very many). A dimension that is not the last is reduced in columns,
without a copy. There are no atomics and shapes alone fix the order, so results are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.reduce._triton import _combine_parts, _reduce_bwd, _reduce_columns, _reduce_long, _reduce_tile
from tilewright.runtime.configs import Config, ConfigTable, cached_plan
from tilewright.runtime.eligibility import Dispatch, TensorKey, eligible, has_elements
from tilewright.runtime.launch import Launcher, PreparedLaunch
from tilewright.runtime.operator import contiguous_like, needs_gradient, operator
from tilewright.runtime.pdl import dependent_launch, has_pdl
from tilewright.runtime.sizes import cdiv, next_power_of_2, rows_per_program

MAX_PROGRAMS = 4224  # 32 per multiprocessor of an H200
MANY_ROWS = 1056  # 8 per multiprocessor: enough to fill the GPU; fewer rows are split
MAX_TILE = 8192  # elements of a row that one program takes at once
UNLIMITED = 2**31 - 1  # programs: one per tile
MAX_PARTS, PARTS_PER_STEP = 16896, 256  # one program combines the parts of a row; more are first combined in steps
COLUMN_TILE = 8192  # elements of the columns that one program takes at a time
MAX_KEY = 65536  # elements: longer rows share a configuration
GROUPED = ("index", "logsumexp")  # whose steps cost more than a load unless they take neighbors together
GRADIENT_TILE = 2048  # elements of a gradient that one program writes


class Kind(NamedTuple):
    """A reduction as its kernels know it."""

    combine: str  # how terms are combined: sum, prod, max, index, logsumexp, var, count, zeros
    term: str = "x"  # each element's
    finish: str = "x"  # applied to the result

    @property
    def has_two_values(self) -> bool:
        """Return whether a partial result takes two values."""
        return self.combine not in ("sum", "prod", "max")


KINDS = {
    "sum": Kind("sum"),
    "mean": Kind("sum", finish="mean"),
    "prod": Kind("prod"),
    "amax": Kind("max"),
    "amin": Kind("max", "negated", "negated"),
    "argmax": Kind("index", finish="none"),
    "argmin": Kind("index", "negated", "none"),
    "max": Kind("index"),  # with its index
    "min": Kind("index", "negated", "negated"),
    "norm0": Kind("sum", "nonzero"),
    "norm1": Kind("sum", "abs"),
    "norm2": Kind("sum", "square", "sqrt"),
    "normp": Kind("sum", "power", "root"),
    "norminf": Kind("max", "abs"),
    "norm-inf": Kind("max", "-abs", "negated"),
    "logsumexp": Kind("logsumexp"),
    "var": Kind("var"),
}
KEPT_FOR_BACKWARD = {  # how terms are combined where backward needs more of a row than its result
    "amax": "count",
    "amin": "count",
    "norminf": "count",
    "norm-inf": "count",
    "prod": "zeros",
    "var": "var",
}
NESTABLE = (
    "sum",
    "mean",
    "logsumexp",
    "norm1",
    "norm2",
    "normp",
)  # reducing groups, then their results, gives the same value and gradient


def split(M: int, N: int, block: int, programs: int | None = None) -> tuple[int, int]:
    """Return the length of the parts into which a row of N is split, and their number.

    Shapes alone decide, so the order of summation is fixed and results are deterministic.
    """
    if M >= MANY_ROWS:
        return N, 1
    blocks = cdiv(N, block)
    blocks_per_part = cdiv(M * blocks, programs or MAX_PROGRAMS)
    return blocks_per_part * block, cdiv(blocks, blocks_per_part)


def _warps(elements: int, per_thread: int) -> int:
    return min(32, max(4, next_power_of_2(elements) // (32 * per_thread)))


def _tile_default(form: str, combine: str, itemsize: int, block: int) -> Config:
    rows = max(1, 8192 // block) if block < 1024 else max(1, 4096 // block)
    return {"BLOCK_M": rows, "BLOCK_N": block, "programs": UNLIMITED, "num_warps": 8}


def _tile_choices(form: str, combine: str, itemsize: int, block: int) -> list[Config]:
    found = {}
    for tile in (4096, 8192, 16384):
        rows = max(1, tile // block)
        for per_thread in (16, 32, 64):
            for programs in (MAX_PROGRAMS, UNLIMITED):
                warps = _warps(rows * block, per_thread)
                config = {"BLOCK_M": rows, "BLOCK_N": block, "programs": programs, "num_warps": warps}
                found[rows, warps, programs] = config
    return list(found.values())


def _long_default(form: str, combine: str, itemsize: int, length: int) -> Config:
    if length < 16384:
        found = {"BLOCK_N": length // 4, "num_warps": max(1, length // 2048)}
    else:
        found = {"BLOCK_N": 4096 if Kind(combine).has_two_values else 8192, "num_warps": 8}
    return found | ({"programs": MAX_PROGRAMS} if form == "pieces" else {})


def _long_choices(form: str, combine: str, itemsize: int, length: int) -> list[Config]:
    blocks = [n for n in (512, 1024, 2048, 4096, 8192, 16384) if n <= length // 2]
    found = [(n, n // (32 * per_thread)) for n in blocks for per_thread in (4, 8, 16, 32)]
    configs = [{"BLOCK_N": n, "num_warps": warps} for n, warps in found if 1 <= warps <= 16]
    if form == "long":
        return configs
    limits = (MAX_PROGRAMS, 2 * MAX_PROGRAMS, 4 * MAX_PROGRAMS)
    return [config | {"programs": n} for config in configs if config["BLOCK_N"] >= 2048 for n in limits]


def _columns_default(form: str, combine: str, itemsize: int, length: int, width: int) -> Config:
    block = min(length, COLUMN_TILE // min(64, width))
    return {"BLOCK_I": min(width, COLUMN_TILE // block), "BLOCK_N": block, "num_warps": 8}


def _columns_choices(form: str, combine: str, itemsize: int, length: int, width: int) -> list[Config]:
    found = {}
    for widest in (32, 64, 128, 256):
        for tile in (4096, 8192):
            for warps in (4, 8):
                block = min(length, tile // min(widest, width))
                i = min(width, max(widest, tile // block // 4))
                found[i, block, warps] = {"BLOCK_I": i, "BLOCK_N": block, "num_warps": warps}
    return list(found.values())


TILE = ConfigTable("reduce.json", _tile_default, _tile_choices)
LONG = ConfigTable("reduce.json", _long_default, _long_choices)
COLUMNS = ConfigTable("reduce.json", _columns_default, _columns_choices)

_tile_launch = Launcher(_reduce_tile)
_long_launch = Launcher(_reduce_long)
_columns_launch = Launcher(_reduce_columns)
_combine_launch = Launcher(_combine_parts)
_bwd_launch = Launcher(_reduce_bwd)
Launch = Callable[..., None]  # takes x, y, index and what is kept for backward


class Reduce(NamedTuple):
    """The options of a reduction over the dimensions from `first` up to `end`."""

    first: int
    end: int
    keepdim: bool
    kind: str
    p: float = 0.0  # the exponent of a norm, or the correction of a variance
    dtype: torch.dtype | None = None  # the result's

    def result_shape(self, shape: Sequence[int], *, keepdim: bool | None = None) -> tuple[int, ...]:
        kept = self.keepdim if keepdim is None else keepdim
        ones = [1] * (self.end - self.first) if kept else ()
        return (*shape[: self.first], *ones, *shape[self.end :])


@cached_plan
def _plan(
    options: Reduce, shape: tuple[int, ...], dtype: torch.dtype, out: torch.dtype, device: int, keeps: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...], Launch]:
    """Return size and strides of the result, and the launch.

    The launch takes x, y (of dtype `out`), the index where there is one, and what is kept for backward, if anything is.
    """
    like = torch.empty(options.result_shape(shape), device="meta")
    kind = KINDS[options.kind]
    kind = kind._replace(combine=KEPT_FOR_BACKWARD[options.kind]) if keeps else kind
    return like.shape, like.stride(), _launch_of(split_sizes(options, shape), dtype, device, kind, options.p)


def _launch_of(sizes: tuple[int, int, int], dtype: torch.dtype, device: int, kind: Kind, p: float) -> Launch:
    (outer, N, inner), itemsize = sizes, dtype.itemsize
    flags: Config = {"COMBINE": kind.combine, "TERM": kind.term}
    group = 16 // itemsize if kind.combine in GROUPED else 1  # elements of one vector load
    if inner == 1 and (N <= MAX_TILE or _splits_into_tiles(kind.combine, outer, N)):
        part = min(N, MAX_TILE)
        parts = N // part
        rows = outer * parts
        config = dict(TILE(device, "tile", kind.combine, itemsize, max(group, next_power_of_2(part))))
        config["BLOCK_M"] = rows_per_program(rows, config)
        programs = min(config.pop("programs"), cdiv(rows, config["BLOCK_M"]))
        flags |= {"GROUP": group, "EVEN": config["BLOCK_N"] == part and rows % config["BLOCK_M"] == 0}
        launcher, grid, given = _tile_launch, (programs,), (rows, part, p)
    elif inner == 1:
        form = "long" if outer >= MANY_ROWS else "pieces"
        config = dict(LONG(device, form, kind.combine, itemsize, min(MAX_KEY, next_power_of_2(N))))
        flags["GROUP"] = group
        part, parts = split(outer, N, config["BLOCK_N"], config.pop("programs", None))
        launcher, grid, given = _long_launch, (outer, parts), (N, part, p)
    else:
        length, width = (next_power_of_2(min(n, most)) for n, most in ((N, COLUMN_TILE), (inner, 1024)))
        config = COLUMNS(device, "columns", kind.combine, itemsize, length, width)
        tiles = cdiv(inner, config["BLOCK_I"])
        part, parts = split(outer * tiles, N, config["BLOCK_N"])
        launcher, grid, given = _columns_launch, (outer * tiles, parts), (N, inner, tiles, part, p)
    if parts == 1:
        return launcher.prepare(grid, *given, **flags, FINISH=kind.finish, PDL=False, **config)
    first = launcher.prepare(grid, *given, **flags, FINISH="part", PDL=has_pdl(device), **config)
    return _split_reduction(first, outer * inner, N, parts, part, kind, p, device)


def _splits_into_tiles(combine: str, outer: int, N: int) -> bool:
    """Return whether long rows are split into whole tiles: where there are few, and a step of a loop is costly."""
    return combine in ("logsumexp", "var") and outer < MANY_ROWS and N % MAX_TILE == 0


def _split_reduction(
    first: PreparedLaunch, M: int, N: int, parts: int, part: int, kind: Kind, p: float, device: int
) -> Launch:
    """Return the launches over M rows that are split into parts; very many parts are combined in several steps."""
    number = M * parts
    steps: list[tuple[int, PreparedLaunch]] = []
    while parts > MAX_PARTS and N % (part * PARTS_PER_STEP) == 0:
        parts, larger = parts // PARTS_PER_STEP, part * PARTS_PER_STEP
        partial = kind._replace(finish="part")
        steps.append((M * parts, _combine(M * parts, larger, PARTS_PER_STEP, part, partial, p, device)))
        part = larger
    final = _combine(M, N, parts, part, kind, p, device)

    def partials(number: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        a = torch.empty(number, dtype=torch.float32, device=x.device)
        b = a
        if kind.has_two_values:
            b = torch.empty(number, dtype=torch.int64 if kind.combine == "index" else torch.float32, device=x.device)
        return a, b, torch.empty_like(a) if kind.combine == "zeros" else None

    def launch(x: Tensor, y: Tensor, index: Tensor, kept: Tensor | None) -> None:
        found = partials(number, x)
        first(x, *found)
        for fewer, step in steps:
            combined = partials(fewer, x)
            step(*found, *combined)
            found = combined
        final(*found, y, index, kept)

    return launch


def _combine(M: int, N: int, parts: int, part: int, kind: Kind, p: float, device: int) -> PreparedLaunch:
    block = next_power_of_2(parts)
    rows = max(1, 4096 // block)
    return _combine_launch.prepare(
        (cdiv(M, rows),), M, N, parts, part, p,
        COMBINE=kind.combine, TWO=kind.has_two_values, FINISH=kind.finish,
        PDL=kind.finish == "part" and has_pdl(device),
        BLOCK_M=rows, BLOCK_N=block, num_warps=_warps(rows * block, 16), **dependent_launch(device),
    )  # fmt: skip


def plan_row_sums(M: int, parts: int, device: int) -> Launch:
    """Return the launch that sums the rows of a [M, parts] into y [M]; each must fit one program."""
    launch = _combine(M, parts, parts, 1, KINDS["sum"], 0.0, device)
    return lambda a, y: launch(a, a, None, y, y, None)


def split_sizes(options: Reduce, shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the number of elements before, in and after the reduced dimensions."""
    first, end = options.first, options.end
    return math.prod(shape[:first]), math.prod(shape[first:end]), math.prod(shape[end:])


def _empty(x: Tensor, options: Reduce) -> Tensor:
    return x.new_empty(options.result_shape(x.shape), dtype=options.dtype or x.dtype)


@operator("reduce", fake=_empty)
def reduce_forward(x: Tensor, options: Reduce) -> Tensor:
    """The reduction of a kind over neighboring dimensions."""
    if x.numel() == 0:
        return torch_reduce(x, options)
    out = options.dtype or x.dtype
    size, stride, launch = _plan(options, x.shape, x.dtype, out, x.get_device())
    y = torch.empty_strided(size, stride, dtype=out, device=x.device)  # the cheapest allocation
    launch(x.contiguous(), y, y, None)
    return y


def _empty_with_kept(x: Tensor, options: Reduce) -> tuple[Tensor, Tensor]:
    y = _empty(x, options)
    values = 2 if KEPT_FOR_BACKWARD[options.kind] == "zeros" else 1
    return y, x.new_empty(y.numel() * values, dtype=torch.float32)


@operator("reduce_keeping", fake=_empty_with_kept)
def reduce_keeping(x: Tensor, options: Reduce) -> tuple[Tensor, Tensor]:
    """The reduction of a kind in KEPT_FOR_BACKWARD, and what backward needs of each row besides the result."""
    y, kept = _empty_with_kept(x, options)
    if x.numel() == 0:
        return torch_reduce(x, options), kept
    *_, launch = _plan(options, x.shape, x.dtype, y.dtype, x.get_device(), True)
    launch(x.contiguous(), y, y, kept)
    return y, kept


def _empty_index(x: Tensor, options: Reduce) -> Tensor:
    return x.new_empty(options.result_shape(x.shape), dtype=torch.int64)


@operator("reduce_index", fake=_empty_index)
def reduce_index(x: Tensor, options: Reduce) -> Tensor:
    """The index of the extreme among the elements of the reduced dimensions."""
    if x.numel() == 0:
        return _empty_index(x, options)
    size, stride, launch = _plan(options, x.shape, x.dtype, torch.int64, x.get_device())
    index = torch.empty_strided(size, stride, dtype=torch.int64, device=x.device)
    launch(x.contiguous(), index, index, None)
    return index


def _empty_with_index(x: Tensor, options: Reduce) -> tuple[Tensor, Tensor]:
    return _empty(x, options), _empty_index(x, options)


@operator("reduce_with_index", fake=_empty_with_index)
def reduce_with_index(x: Tensor, options: Reduce) -> tuple[Tensor, Tensor]:
    """The extreme and its index."""
    y, index = _empty_with_index(x, options)
    if x.numel():
        *_, launch = _plan(options, x.shape, x.dtype, x.dtype, x.get_device())
        launch(x.contiguous(), y, index, None)
    return y, index


def torch_reduce(x: Tensor, options: Reduce) -> Tensor:
    """The reduction by torch, for empty tensors and double backward."""
    first, kind, p = options.first, options.kind, options.p
    shape, dtype = options.result_shape(x.shape), options.dtype or x.dtype
    x = x.flatten(first, options.end - 1)
    x = x.to(dtype) if dtype.itemsize > x.element_size() else x
    if kind.startswith("norm"):
        y = torch.linalg.vector_norm(x, p if kind == "normp" else float(kind.removeprefix("norm")), first)
    elif kind == "var":
        y = torch.var(x, first, correction=p)
    else:
        y = getattr(torch, kind)(x, first)
    return y.view(shape).to(dtype)


@cached_plan
def _plan_backward(options: Reduce, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: int) -> Launch:
    """Return the launch that takes x, y, dy (whose dtypes are given), what forward kept, and dx."""
    outer, N, inner = split_sizes(options, shape)
    if inner == 1:
        block = min(GRADIENT_TILE, next_power_of_2(N))
        width = GRADIENT_TILE // block
        tiles = 1
        programs = cdiv(outer, width)
    else:
        width = min(64, next_power_of_2(inner))
        block = min(GRADIENT_TILE // width, next_power_of_2(N))
        tiles = cdiv(inner, width)
        programs = outer * tiles
    grid = (programs * cdiv(N, block),)  # one axis: the y axis is limited to 65535
    even = N % block == 0 and (outer if inner == 1 else inner) % width == 0
    blocks = {"EVEN": even, "BLOCK_M": width, "BLOCK_N": block, "num_warps": 4}
    return _bwd_launch.prepare(grid, outer, N, inner, tiles, options.p, KIND=options.kind, **blocks)


def _fake_backward(x: Tensor, *_: object) -> Tensor:
    return contiguous_like(x)


@operator("reduce_backward", fake=_fake_backward)
def reduce_backward(x: Tensor, y: Tensor, dy: Tensor, kept: Tensor | None, options: Reduce) -> Tensor:
    """The gradient of x from the result, its gradient and what forward kept."""
    dx = contiguous_like(x)
    if x.numel() == 0:
        return dx
    if options.kind == "norm0":
        return dx.zero_()
    x, y, dy = x.contiguous(), y.contiguous(), dy.contiguous()
    dtypes = x.dtype, y.dtype, dy.dtype
    _plan_backward(options, x.shape, dtypes, x.get_device())(x, y, dy, kept, dx)
    return dx


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.options = inputs
    ctx.shape = x.shape
    if ctx.options.kind in ("sum", "mean"):
        ctx.dtype = x.dtype
    else:
        ctx.save_for_backward(x, output)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    options: Reduce = ctx.options
    if options.kind in ("sum", "mean"):
        N = math.prod(ctx.shape[options.first : options.end])
        dx = dy.reshape(options.result_shape(ctx.shape, keepdim=True))
        dx = dx.to(ctx.dtype) if options.kind == "sum" else (dx / N).to(ctx.dtype)
        return dx.expand(ctx.shape)
    x, y = ctx.saved_tensors
    if options.kind in KEPT_FOR_BACKWARD or (torch.is_grad_enabled() and options.kind != "norm0"):
        return _gradient_by_torch(x, dy, options)
    return reduce_backward(x, y, dy, None, options)


def _gradient_by_torch(x: Tensor, dy: Tensor, options: Reduce) -> Tensor:
    """Return the gradient of torch's own reduction: for double backward, and where forward kept nothing."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        x = x if again else x.detach().requires_grad_()
        return torch.autograd.grad(torch_reduce(x, options), x, dy, create_graph=again)[0]


reduce_forward.differentiate(_save, _backward)


def _save_keeping(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.options = inputs
    ctx.save_for_backward(x, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_keeping(ctx: Any, dy: Tensor | None, _: object) -> Tensor | None:
    if dy is None:
        return None
    x, y, kept = ctx.saved_tensors
    if torch.is_grad_enabled():
        return _gradient_by_torch(x, dy, ctx.options)
    return reduce_backward(x, y, dy, kept, ctx.options)


reduce_keeping.differentiate(_save_keeping, _backward_keeping)


def _save_index(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.options = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward_index(ctx: Any, dy: Tensor, _: object) -> Tensor:
    (index,) = ctx.saved_tensors
    outer, N, inner = split_sizes(ctx.options, ctx.shape)
    zeros = dy.new_zeros(outer, N, inner)
    dx = zeros.scatter(1, index.view(outer, 1, inner), dy.reshape(outer, 1, inner))
    return dx.view(ctx.shape)


reduce_with_index.differentiate(_save_index, _backward_index)


def reduced_dims(rank: int, dim: Any) -> tuple[int, ...]:
    """Return the dimensions that `dim` names, sorted; all for None, none if one of them is not valid."""
    if type(dim) is int:
        return (dim % rank,) if -rank <= dim < rank else ()
    if dim is None:
        return tuple(range(rank))
    dims = dim if isinstance(dim, tuple) else (dim,)
    if not all(type(d) is int and -rank <= d < rank for d in dims):
        return ()
    found = tuple(sorted(d % rank for d in dims))
    return found if len(set(found)) == len(found) else ()


def _reduce_neighbors(x: Tensor, options: Reduce) -> Tensor:
    """Reduce neighboring dimensions, keeping what backward needs if a gradient will be needed."""
    if options.kind in KEPT_FOR_BACKWARD and needs_gradient(x):
        return reduce_keeping(x, options)[0]
    return reduce_forward(x, options)


def reduce(
    x: Tensor,
    dims: tuple[int, ...],
    kind: str,
    *,
    keepdim: bool = False,
    p: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Reduce any dimensions: groups of neighbors one after the other where that gives the same result, else as one."""
    first, end = dims[0], dims[-1] + 1
    if end - first == len(dims):
        return _reduce_neighbors(x, Reduce(first, end, keepdim, kind, p, dtype))
    others = [d for d in range(x.dim()) if d not in dims]
    if kind in NESTABLE:
        first = max(d for d in others if d < end) + 1
        y = reduce_forward(x, Reduce(first, end, True, kind, p, torch.float32))
        y = reduce(y, tuple(d for d in dims if d < first), kind, keepdim=True, p=p, dtype=dtype or x.dtype)
        return y if keepdim else y.view([x.shape[d] for d in others])
    y = _reduce_neighbors(x.permute(*others, *dims), Reduce(len(others), x.dim(), False, kind, p, dtype))
    return y.view([1 if d in dims else x.shape[d] for d in range(x.dim())]) if keepdim else y


class ReduceCall(NamedTuple):
    """The options of a public call, which passes them to `dispatch` as a plain tuple: that is cheaper."""

    dim: Any  # an int, a tuple, or None for all
    keepdim: bool
    kind: str
    p: float = 0.0
    dtype: torch.dtype | None = None


@cached_plan
def _plan_call(args: tuple[Any, ...], x: TensorKey) -> Callable[[Tensor], Tensor] | None:
    call, (shape, dtype, device) = ReduceCall(*args), x
    dims = reduced_dims(len(shape), call.dim)
    if not dims or not has_elements(shape, dtype, dims[0]) or call.dtype not in (None, dtype, torch.float32):
        return None
    if _has_no_variance(call, shape, dims):
        return None
    first, end = dims[0], dims[-1] + 1
    if end - first > len(dims):
        return lambda x: reduce(x, dims, call.kind, keepdim=call.keepdim, p=call.p, dtype=call.dtype)
    out = torch.int64 if KINDS[call.kind].finish == "none" else call.dtype or dtype
    options = Reduce(first, end, call.keepdim, call.kind, call.p)
    size, stride, launch = _plan(options, shape, dtype, out, device)

    def run(x: Tensor) -> Tensor:
        y = torch.empty_strided(size, stride, dtype=out, device=x.device)  # the cheapest allocation
        launch(x, y, y, None)
        return y

    return run


def _call(args: tuple[Any, ...], x: Tensor) -> Tensor | None:
    call = ReduceCall(*args)
    if not eligible_reduction(x, call.dtype) or not (dims := reduced_dims(x.dim(), call.dim)):
        return None
    if _has_no_variance(call, x.shape, dims):
        return None
    if KINDS[call.kind].finish == "none":
        return reduce_index(x, Reduce(dims[0], dims[-1] + 1, call.keepdim, call.kind))
    return reduce(x, dims, call.kind, keepdim=call.keepdim, p=call.p, dtype=call.dtype)


def eligible_reduction(x: Any, dtype: Any = None) -> bool:
    """Return whether our kernels can reduce x as torch would; there must be something to reduce."""
    # To a narrower dtype torch rounds before it reduces.
    return eligible(x) and x.numel() > 0 and x.dim() > 0 and dtype in (None, x.dtype, torch.float32)


def _has_no_variance(call: ReduceCall, shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Return whether torch would warn: the correction leaves no degrees of freedom."""
    return call.kind == "var" and call.p >= math.prod([shape[d] for d in dims])


dispatch = Dispatch(_plan_call, _call)


def extreme_with_index(
    smallest: float,
    torch_extreme: Callable[..., Any],
    result: Callable[..., Any],
    input: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return torch.max or torch.min over a dimension, or in another of its forms."""
    is_plain = (
        len(args) + len(kwargs) <= 2 and not kwargs.keys() - {"dim", "keepdim"} and not (args and "dim" in kwargs)
    )
    if is_plain and eligible_reduction(input) and input.numel() >= smallest:
        dim, keepdim = _dim_and_keepdim(*args, **kwargs)
        if type(dim) is int and type(keepdim) is bool and (dims := reduced_dims(input.dim(), dim)):
            options = Reduce(dims[0], dims[0] + 1, keepdim, torch_extreme.__name__)
            return result(reduce_with_index(input, options))
    return torch_extreme(input, *args, **kwargs)


def _dim_and_keepdim(dim: Any = None, keepdim: Any = False) -> tuple[Any, Any]:
    return dim, keepdim

"""What reductions share: kernels over rows, pieces of rows and columns, their gradients, and which a shape takes.

A reduction is a term of each element, a way to put terms together, and what is made of the last one: a norm is the root
of a sum of squares. Reading the input once is all the work, so what matters is that every multiprocessor always has
loads in flight. Short rows: several to a program, as a tile. Long rows: each is cut into pieces where there are few of
them, and a second kernel puts the pieces together (a third, where those are very many). A dimension that is not the
last is reduced in columns, without a copy. No atomics, and shapes alone decide the order: the same input always gives
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.reduce._triton import _reduce_bwd, _reduce_columns, _reduce_long, _reduce_pieces, _reduce_tile
from tilewright.runtime.configs import Config, Tuned, planned
from tilewright.runtime.eligibility import has_at_least, has_elements, is_quiet, is_ready, runs_here
from tilewright.runtime.launch import Launcher, Prepared
from tilewright.runtime.operator import contiguous_like, is_differentiated, operator
from tilewright.runtime.pdl import can_follow, following
from tilewright.runtime.sizes import cdiv, next_power_of_2, rows_each
from tilewright.spec import Cost, points

PROGRAMS = 4224  # 32 for each of an H200's 132 multiprocessors
ROWS = 1056  # 8 for each: enough to fill the GPU, and fewer are cut into pieces
LONGEST_TILE = 8192  # elements of a row that one program takes whole
EVERY = 2**31 - 1  # programs: one for each tile
MOST_PIECES, TOGETHER = 16896, 256  # pieces of a row that one program puts together; of more, so many each, first
COLUMN_TILE = 8192  # elements of columns that one program takes at a time
LONGEST_KEY = 65536  # elements: rows of more are configured alike
GROUPED = ("index", "logsumexp")  # whose steps cost more than a load, unless they take neighbours together
SPREAD_TILE = 2048  # elements of a gradient that one program writes


class Kind(NamedTuple):
    """A reduction, as its kernels know it."""

    how: str  # terms are put together: sum, prod, max, index, logsumexp, var, count, zeros
    term: str = "x"
    last: str = "x"  # what is made of the result

    @property
    def has_two(self) -> bool:
        """Whether two numbers stand for a piece."""
        return self.how not in ("sum", "prod", "max")


KINDS = {
    "sum": Kind("sum"),
    "mean": Kind("sum", last="mean"),
    "prod": Kind("prod"),
    "amax": Kind("max"),
    "amin": Kind("max", "negated", "negated"),
    "argmax": Kind("index", last="none"),
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
KEEPING = {  # how terms are put together where backward needs more of a row than its result
    "amax": "count",
    "amin": "count",
    "norminf": "count",
    "norm-inf": "count",
    "prod": "zeros",
    "var": "var",
}
OF_ITSELF = ("sum", "mean", "logsumexp", "norm1", "norm2", "normp")  # of groups it is that of all, with its gradient


def split(M: int, N: int, block: int, programs: int | None = None) -> tuple[int, int]:
    """The length of the pieces that programs take of a row of N, and their number.

    Shapes alone decide, so that the order of summation, and with it every bit of the result, is always the same.
    """
    if M >= ROWS:
        return N, 1
    blocks = cdiv(N, block)
    each = cdiv(M * blocks, programs or PROGRAMS)
    return each * block, cdiv(blocks, each)


def _warps(elements: int, each: int) -> int:
    """How many, where a thread takes `each` elements at a time."""
    return min(32, max(4, next_power_of_2(elements) // (32 * each)))


def _tile_default(form: str, how: str, size: int, block: int) -> Config:
    rows = max(1, 8192 // block) if block < 1024 else max(1, 4096 // block)
    return {"BLOCK_M": rows, "BLOCK_N": block, "programs": EVERY, "num_warps": 8}


def _tile_choices(form: str, how: str, size: int, block: int) -> list[Config]:
    found = {}
    for tile in (4096, 8192, 16384):
        rows = max(1, tile // block)
        for each in (16, 32, 64):
            for programs in (PROGRAMS, EVERY):
                warps = _warps(rows * block, each)
                config = {"BLOCK_M": rows, "BLOCK_N": block, "programs": programs, "num_warps": warps}
                found[rows, warps, programs] = config
    return list(found.values())


def _long_default(form: str, how: str, size: int, length: int) -> Config:
    if length < 16384:
        found = {"BLOCK_N": length // 4, "num_warps": max(1, length // 2048)}
    else:
        found = {"BLOCK_N": 4096 if Kind(how).has_two else 8192, "num_warps": 8}
    return found | ({"programs": PROGRAMS} if form == "pieces" else {})


def _long_choices(form: str, how: str, size: int, length: int) -> list[Config]:
    blocks = [n for n in (512, 1024, 2048, 4096, 8192, 16384) if n <= length // 2]
    found = [(n, n // (32 * each)) for n in blocks for each in (4, 8, 16, 32)]
    configs = [{"BLOCK_N": n, "num_warps": warps} for n, warps in found if 1 <= warps <= 16]
    if form == "long":
        return configs
    many = (PROGRAMS, 2 * PROGRAMS, 4 * PROGRAMS)
    return [config | {"programs": n} for config in configs if config["BLOCK_N"] >= 2048 for n in many]


def _columns_default(form: str, how: str, size: int, length: int, width: int) -> Config:
    block = min(length, COLUMN_TILE // min(64, width))
    return {"BLOCK_I": min(width, COLUMN_TILE // block), "BLOCK_N": block, "num_warps": 8}


def _columns_choices(form: str, how: str, size: int, length: int, width: int) -> list[Config]:
    found = {}
    for widest in (32, 64, 128, 256):
        for tile in (4096, 8192):
            for warps in (4, 8):
                block = min(length, tile // min(widest, width))
                i = min(width, max(widest, tile // block // 4))
                found[i, block, warps] = {"BLOCK_I": i, "BLOCK_N": block, "num_warps": warps}
    return list(found.values())


TILE = Tuned("reduce.json", _tile_default, _tile_choices)
LONG = Tuned("reduce.json", _long_default, _long_choices)
COLUMNS = Tuned("reduce.json", _columns_default, _columns_choices)

_tile_launch = Launcher(_reduce_tile)
_long_launch = Launcher(_reduce_long)
_columns_launch = Launcher(_reduce_columns)
_pieces_launch = Launcher(_reduce_pieces)
_bwd_launch = Launcher(_reduce_bwd)
Launch = Callable[..., None]  # of the tensors x, y, z, k


@planned
def _plan(
    shape: tuple[int, ...],
    first: int,
    end: int,
    keepdim: bool,
    dtype: torch.dtype,
    _: torch.dtype,
    device: int,
    name: str,
    p: float,
    keeps: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...], Launch]:
    """Sizes and strides of the results, and how x becomes y, of whatever dtype, and z where there is an index, or k
    where something is kept for backward."""
    like = torch.empty(_result_shape(shape, first, end, keepdim), device="meta")
    kind = KINDS[name]._replace(how=KEEPING[name]) if keeps else KINDS[name]
    return like.shape, like.stride(), _launch_of(*sizes(shape, first, end), dtype, device, kind, p)


def _launch_of(outer: int, N: int, inner: int, dtype: torch.dtype, device: int, kind: Kind, p: float) -> Launch:
    size = dtype.itemsize
    how: Config = {"HOW": kind.how, "TERM": kind.term}
    group = 16 // size if kind.how in GROUPED else 1  # what a thread reads at once
    if inner == 1 and (N <= LONGEST_TILE or _is_tiled(kind.how, outer, N)):
        chunk = min(N, LONGEST_TILE)
        pieces = N // chunk
        rows = outer * pieces
        config = dict(TILE(device, "tile", kind.how, size, max(group, next_power_of_2(chunk))))
        config["BLOCK_M"] = rows_each(rows, config)
        programs = min(config.pop("programs"), cdiv(rows, config["BLOCK_M"]))
        how |= {"GROUP": group, "FILLED": config["BLOCK_N"] == chunk and rows % config["BLOCK_M"] == 0}
        launcher, grid, given = _tile_launch, (programs,), (rows, chunk, p)
    elif inner == 1:
        form = "long" if outer >= ROWS else "pieces"
        config = dict(LONG(device, form, kind.how, size, min(LONGEST_KEY, next_power_of_2(N))))
        how["GROUP"] = group
        chunk, pieces = split(outer, N, config["BLOCK_N"], config.pop("programs", None))
        launcher, grid, given = _long_launch, (outer, pieces), (N, chunk, p)
    else:
        length, width = (next_power_of_2(min(n, most)) for n, most in ((N, COLUMN_TILE), (inner, 1024)))
        config = COLUMNS(device, "columns", kind.how, size, length, width)
        tiles = cdiv(inner, config["BLOCK_I"])
        chunk, pieces = split(outer * tiles, N, config["BLOCK_N"])
        launcher, grid, given = _columns_launch, (outer * tiles, pieces), (N, inner, tiles, chunk, p)
    if pieces == 1:
        return launcher.prepare(grid, *given, **how, LAST=kind.last, LEADS=False, **config)
    cut = launcher.prepare(grid, *given, **how, LAST="piece", LEADS=can_follow(device), **config)
    return _cut_and_put_together(cut, outer * inner, N, pieces, chunk, kind, p, device)


def _is_tiled(how: str, outer: int, N: int) -> bool:
    """Whether rows longer than a tile are taken as so many tiles: if there are few, and a step in a loop is costly."""
    return how in ("logsumexp", "var") and outer < ROWS and N % LONGEST_TILE == 0


def _cut_and_put_together(
    cut: Prepared, M: int, N: int, pieces: int, chunk: int, kind: Kind, p: float, device: int
) -> Launch:
    """Of M rows, cut into pieces. Where these are too many for one program, several make fewer, larger ones of them."""
    number = M * pieces
    steps: list[tuple[int, Prepared]] = []
    while pieces > MOST_PIECES and N % (chunk * TOGETHER) == 0:
        pieces, larger = pieces // TOGETHER, chunk * TOGETHER
        piece = kind._replace(last="piece")
        steps.append((M * pieces, _putting_together(M * pieces, larger, TOGETHER, chunk, piece, p, device)))
        chunk = larger
    last = _putting_together(M, N, pieces, chunk, kind, p, device)

    def parts(number: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        a = torch.empty(number, dtype=torch.float32, device=x.device)
        b = a
        if kind.has_two:
            b = torch.empty(number, dtype=torch.int64 if kind.how == "index" else torch.float32, device=x.device)
        return a, b, torch.empty_like(a) if kind.how == "zeros" else None

    def launch(x: Tensor, y: Tensor, z: Tensor, k: Tensor | None) -> None:
        held = parts(number, x)
        cut(x, *held)
        for fewer, step in steps:
            found = parts(fewer, x)
            step(*held, *found)
            held = found
        last(*held, y, z, k)

    return launch


def _putting_together(M: int, N: int, pieces: int, chunk: int, kind: Kind, p: float, device: int) -> Prepared:
    block = next_power_of_2(pieces)
    rows = max(1, 4096 // block)
    return _pieces_launch.prepare(
        (cdiv(M, rows),), M, N, pieces, chunk, p,
        HOW=kind.how, TWO=kind.has_two, LAST=kind.last, LEADS=kind.last == "piece" and can_follow(device),
        BLOCK_M=rows, BLOCK_N=block, num_warps=_warps(rows * block, 16), **following(device),
    )  # fmt: skip


def sum_pieces(M: int, pieces: int, device: int) -> Launch:
    """Of a [M, pieces], whose rows must each fit into one program, their sums y [M]."""
    launch = _putting_together(M, pieces, pieces, 1, KINDS["sum"], 0.0, device)
    return lambda a, y: launch(a, a, None, y, y, None)


def sizes(shape: tuple[int, ...], first: int, end: int) -> tuple[int, int, int]:
    """Of the dimensions before, from `first` up to `end`, and after."""
    return math.prod(shape[:first]), math.prod(shape[first:end]), math.prod(shape[end:])


def _result_shape(shape: tuple[int, ...], first: int, end: int, keepdim: bool) -> tuple[int, ...]:
    return (*shape[:first], *([1] * (end - first) if keepdim else ()), *shape[end:])


def _empty(x: Tensor, first: int, end: int, keepdim: bool, kind: str, p: float, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(_result_shape(x.shape, first, end, keepdim), dtype=dtype or x.dtype)


@operator("reduce", fake=_empty)
def reduce_forward(
    x: Tensor, first: int, end: int, keepdim: bool, kind: str, p: float, dtype: torch.dtype | None
) -> Tensor:
    """The reduction of this kind over the dimensions from `first` up to `end`."""
    if x.numel() == 0:
        return torchs(x, first, end, keepdim, kind, p, dtype)
    out = dtype or x.dtype
    size, stride, launch = _plan(x.shape, first, end, keepdim, x.dtype, out, x.get_device(), kind, p)
    y = torch.empty_strided(size, stride, dtype=out, device=x.device)  # which costs the host least
    launch(x.contiguous(), y, y, None)
    return y


def _empty_keeping(
    x: Tensor, first: int, end: int, keepdim: bool, kind: str, p: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    y = _empty(x, first, end, keepdim, kind, p, dtype)
    numbers = 2 if KEEPING[kind] == "zeros" else 1
    return y, x.new_empty(y.numel() * numbers, dtype=torch.float32)


@operator("reduce_keeping", fake=_empty_keeping)
def reduce_keeping(
    x: Tensor, first: int, end: int, keepdim: bool, kind: str, p: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The same, of a kind in KEEPING, and what backward needs of each row besides."""
    y, kept = _empty_keeping(x, first, end, keepdim, kind, p, dtype)
    if x.numel() == 0:
        return torchs(x, first, end, keepdim, kind, p, dtype), kept
    *_, launch = _plan(x.shape, first, end, keepdim, x.dtype, y.dtype, x.get_device(), kind, p, True)
    launch(x.contiguous(), y, y, kept)
    return y, kept


def _empty_index(x: Tensor, first: int, end: int, keepdim: bool, kind: str) -> Tensor:
    return x.new_empty(_result_shape(x.shape, first, end, keepdim), dtype=torch.int64)


@operator("reduce_index", fake=_empty_index)
def reduce_index(x: Tensor, first: int, end: int, keepdim: bool, kind: str) -> Tensor:
    """Where the extreme is, among the elements of the dimensions from `first` up to `end`."""
    if x.numel() == 0:
        return _empty_index(x, first, end, keepdim, kind)
    size, stride, launch = _plan(x.shape, first, end, keepdim, x.dtype, torch.int64, x.get_device(), kind, 0.0)
    z = torch.empty_strided(size, stride, dtype=torch.int64, device=x.device)
    launch(x.contiguous(), z, z, None)
    return z


def _empty_both(x: Tensor, first: int, end: int, keepdim: bool, kind: str) -> tuple[Tensor, Tensor]:
    shape = _result_shape(x.shape, first, end, keepdim)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@operator("reduce_with_index", fake=_empty_both)
def reduce_with_index(x: Tensor, first: int, end: int, keepdim: bool, kind: str) -> tuple[Tensor, Tensor]:
    """The extreme and where it is."""
    y, z = _empty_both(x, first, end, keepdim, kind)
    if x.numel():
        *_, launch = _plan(x.shape, first, end, keepdim, x.dtype, x.dtype, x.get_device(), kind, 0.0)
        launch(x.contiguous(), y, z, None)
    return y, z


def torchs(x: Tensor, first: int, end: int, keepdim: bool, kind: str, p: float, dtype: torch.dtype | None) -> Tensor:
    """The same by torch: of empty tensors, and for gradients of gradients."""
    shape = _result_shape(x.shape, first, end, keepdim)
    dtype = dtype or x.dtype
    x = x.flatten(first, end - 1)
    x = x.to(dtype) if dtype.itemsize > x.element_size() else x
    if kind.startswith("norm"):
        y = torch.linalg.vector_norm(x, p if kind == "normp" else float(kind.removeprefix("norm")), first)
    elif kind == "var":
        y = torch.var(x, first, correction=p)
    else:
        y = getattr(torch, kind)(x, first)
    return y.view(shape).to(dtype)


@planned
def _plan_backward(
    shape: tuple[int, ...], first: int, end: int, kind: str, p: float, dtypes: Any, device: int
) -> Launch:
    outer, N, inner = sizes(shape, first, end)
    if inner == 1:
        block = min(SPREAD_TILE, next_power_of_2(N))
        width = SPREAD_TILE // block
        tiles = 1
        programs = cdiv(outer, width)
    else:
        width = min(64, next_power_of_2(inner))
        block = min(SPREAD_TILE // width, next_power_of_2(N))
        tiles = cdiv(inner, width)
        programs = outer * tiles
    grid = (programs * cdiv(N, block),)  # a second axis could be too long
    fills = N % block == 0 and (outer if inner == 1 else inner) % width == 0
    blocks = {"FILLED": fills, "BLOCK_M": width, "BLOCK_N": block, "num_warps": 4}
    return _bwd_launch.prepare(grid, outer, N, inner, tiles, p, KIND=kind, **blocks)


@operator("reduce_backward", fake=contiguous_like)
def reduce_backward(
    x: Tensor, y: Tensor, dy: Tensor, kept: Tensor | None, first: int, end: int, kind: str, p: float
) -> Tensor:
    """The gradient of x from the result and its gradient, and what forward has kept."""
    dx = contiguous_like(x)
    if x.numel() == 0:
        return dx
    if kind == "norm0":
        return dx.zero_()
    x, y, dy = x.contiguous(), y.contiguous(), dy.contiguous()
    dtypes = x.dtype, y.dtype, dy.dtype
    _plan_backward(x.shape, first, end, kind, p, dtypes, x.get_device())(x, y, dy, kept, dx)
    return dx


def _save(ctx, inputs, output) -> None:
    x, *ctx.options = inputs
    ctx.shape = x.shape
    if ctx.options[3] in ("sum", "mean"):
        ctx.dtype = x.dtype
    else:
        ctx.save_for_backward(x, output)


def _backward(ctx, dy: Tensor):
    first, end, _, kind, p, _ = ctx.options
    nothing = [None] * len(ctx.options)
    if kind in ("sum", "mean"):
        N = math.prod(ctx.shape[first:end])
        dx = dy.reshape(_result_shape(ctx.shape, first, end, True))
        dx = dx.to(ctx.dtype) if kind == "sum" else (dx / N).to(ctx.dtype)
        return dx.expand(ctx.shape), *nothing
    x, y = ctx.saved_tensors
    if kind in KEEPING or (torch.is_grad_enabled() and kind != "norm0"):
        return _gradient_by_torch(x, dy, ctx.options), *nothing
    return reduce_backward(x, y, dy, None, first, end, kind, p), *nothing


def _gradient_by_torch(x: Tensor, dy: Tensor, options: Sequence[Any]) -> Tensor:
    """torch differentiates its own: for gradients of gradients, and where forward has kept nothing."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        x = x if again else x.detach().requires_grad_()
        return torch.autograd.grad(torchs(x, *options), x, dy, create_graph=again)[0]


reduce_forward.differentiate(_save, _backward)


def _save_keeping(ctx, inputs, output) -> None:
    x, *ctx.options = inputs
    ctx.save_for_backward(x, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_keeping(ctx, dy: Tensor | None, _: object):
    first, end, _, kind, p, _ = ctx.options
    nothing = [None] * len(ctx.options)
    if dy is None:
        return None, *nothing
    x, y, kept = ctx.saved_tensors
    if torch.is_grad_enabled():
        return _gradient_by_torch(x, dy, ctx.options), *nothing
    return reduce_backward(x, y, dy, kept, first, end, kind, p), *nothing


reduce_keeping.differentiate(_save_keeping, _backward_keeping)


def _save_index(ctx, inputs, output) -> None:
    x, ctx.first, ctx.end, *_ = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward_index(ctx, dy: Tensor, _):
    (index,) = ctx.saved_tensors
    outer, N, inner = sizes(ctx.shape, ctx.first, ctx.end)
    zeros = dy.new_zeros(outer, N, inner)
    dx = zeros.scatter(1, index.view(outer, 1, inner), dy.reshape(outer, 1, inner))
    return dx.view(ctx.shape), None, None, None, None


reduce_with_index.differentiate(_save_index, _backward_index)


def takes(smallest: float, x: Any, dtype: Any = None) -> bool:
    """Whether our kernels can take the reduction of x as torch would; there is something to reduce."""
    return (
        isinstance(x, Tensor)
        and 0 < x.numel() >= smallest
        and x.dim() > 0
        and runs_here(x)
        and dtype in (None, x.dtype, torch.float32)  # to a narrower one torch rounds before
    )


def named(x: Tensor, dim: Any) -> tuple[int, ...]:
    """The dimensions that `dim` names, sorted; none if it names no valid ones. None names all."""
    rank = x.dim()
    if type(dim) is int:
        return (dim % rank,) if -rank <= dim < rank else ()
    if dim is None:
        return tuple(range(rank))
    dims = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    if not all(type(d) is int and -rank <= d < rank for d in dims):
        return ()
    found = tuple(sorted(d % rank for d in dims))
    return found if len(set(found)) == len(found) else ()


def _reduced(x: Tensor, first: int, end: int, keepdim: bool, kind: str, p: float, dtype: torch.dtype | None) -> Tensor:
    """`reduce_forward`, which keeps for backward what is needed."""
    if kind in KEEPING and is_differentiated(x):
        return reduce_keeping(x, first, end, keepdim, kind, p, dtype)[0]
    return reduce_forward(x, first, end, keepdim, kind, p, dtype)


def reduce(
    x: Tensor, dims: tuple[int, ...], keepdim: bool, kind: str, p: float = 0.0, dtype: torch.dtype | None = None
) -> Tensor:
    """The reduction over any dimensions: in groups of those side by side, where that is the same, else as one."""
    first, end = dims[0], dims[-1] + 1
    if end - first == len(dims):
        return _reduced(x, first, end, keepdim, kind, p, dtype)
    others = [d for d in range(x.dim()) if d not in dims]
    if kind in OF_ITSELF:
        first = max(d for d in others if d < end) + 1
        y = reduce_forward(x, first, end, True, kind, p, torch.float32)
        y = reduce(y, tuple(d for d in dims if d < first), True, kind, p, dtype or x.dtype)
        return y if keepdim else y.view([x.shape[d] for d in others])
    y = _reduced(x.permute(*others, *dims), len(others), x.dim(), False, kind, p, dtype)
    return y.view([1 if d in dims else x.shape[d] for d in range(x.dim())]) if keepdim else y


@planned
def _way(
    shape: tuple[int, ...], dtype: torch.dtype, device: int, dim: int, keepdim: bool, kind: str, p: float
) -> Callable[[Tensor], Tensor] | None:
    """From x as it lies in memory to its reduction over one dimension; None if that is torch's to do."""
    if not has_elements(shape, dtype, dim) or _has_too_few(kind, shape[dim], p):
        return None
    dim %= len(shape)
    out = torch.int64 if KINDS[kind].last == "none" else dtype
    size, stride, launch = _plan(shape, dim, dim + 1, keepdim, dtype, out, device, kind, p)

    def run(x: Tensor) -> Tensor:
        y = torch.empty_strided(size, stride, dtype=out, device=x.device)  # which costs the host least
        launch(x, y, y, None)
        return y

    return run


def reduced(
    smallest: int, x: Any, dim: Any, keepdim: bool, kind: str, p: float = 0.0, dtype: torch.dtype | None = None
) -> Tensor | None:
    """The reduction of this kind by our kernels; None if they cannot take it as torch would."""
    if not has_at_least(smallest, x):
        return None
    if dtype is None and type(dim) is int and is_quiet() and is_ready(x):
        way = _way(x.shape, x.dtype, x.get_device(), dim, keepdim, kind, p)
        return way and way(x)
    if not takes(smallest, x, dtype) or not (dims := named(x, dim)):
        return None
    if _has_too_few(kind, math.prod([x.shape[d] for d in dims]), p):
        return None
    if KINDS[kind].last == "none":
        return reduce_index(x, dims[0], dims[-1] + 1, keepdim, kind)
    return reduce(x, dims, keepdim, kind, p, dtype)


def _has_too_few(kind: str, N: int, p: float) -> bool:
    """Whether torch would warn: no variance is left where the correction takes all of N away."""
    return kind == "var" and p >= N


def extreme_with_index(
    smallest: float, torchs: Callable[..., Any], made: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """torch.max or torch.min, of a dimension or in another of its forms."""
    is_plain = (
        len(args) + len(kwargs) <= 2 and not kwargs.keys() - {"dim", "keepdim"} and not (args and "dim" in kwargs)
    )
    if is_plain and takes(smallest, input):
        dim, keepdim = _dim_and_keepdim(*args, **kwargs)
        if type(dim) is int and type(keepdim) is bool and (dims := named(input, dim)):
            return made(reduce_with_index(input, dims[0], dims[0] + 1, keepdim, torchs.__name__))
    return torchs(input, *args, **kwargs)


def _dim_and_keepdim(dim: Any = None, keepdim: Any = False) -> tuple[Any, Any]:
    return dim, keepdim


def cost(x: Tensor) -> Cost:
    """Of a reduction over the last dimension."""
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(read=x.nbytes, written=rows * x.element_size(), flops={"fp32": x.numel()})


def backward_cost(x: Tensor) -> Cost:
    """Of a gradient that is another for each element."""
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(read=x.nbytes + 2 * rows * x.element_size(), written=x.nbytes, flops={"fp32": 2 * x.numel()})


CHECK = points(
    M=(1, 3, 1, 5, 1, 3, 1, 3, 1061, 5003),
    N=(1, 1, 2, 193, 781, 4097, 300007, 20011, 67, 7),
)
BENCH = points(M=(1, 4096, 65536, 2**22), N=(2**28, 65536, 4096, 64))

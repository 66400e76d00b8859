"""Reductions: differentiable operators, and the call path.

Operators take contiguous tensors and any dimensions. A tensor that is contiguous in another order of its dimensions is
reduced in that order, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops.reduce._plans import (
    KEPT_FOR_BACKWARD,
    KINDS,
    NESTABLE,
    Launch,
    Layout,
    plan_gradient,
    plan_reduction,
)
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.crossovers import Crossover
from tilewright.runtime.eligibility import Dispatch, TensorKey, eligible, has_elements
from tilewright.runtime.operator import contiguous_like, needs_gradient, operator


class Reduce(NamedTuple):
    """The options of a reduction."""

    dims: Sequence[int]  # sorted; a tuple, except in the schema of an operator
    keepdim: bool
    kind: str
    p: float = 0.0  # the exponent of a norm, or the correction of a variance
    dtype: torch.dtype | None = None  # the result's

    def result_shape(self, shape: Sequence[int], *, keepdim: bool | None = None) -> list[int]:
        kept = self.keepdim if keepdim is None else keepdim
        return [1 if d in self.dims else size for d, size in enumerate(shape) if kept or d not in self.dims]


@cached_plan
def _plan(
    options: Reduce,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    out: torch.dtype,
    device: int,
    keeps: bool = False,
    stride: int | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...], Launch]:
    """Return size and strides of the result, and the launch.

    The launch takes x, y (of dtype `out`), the index where there is one, and what is kept for backward, if anything is.
    """
    like = torch.empty(options.result_shape(shape), device="meta")
    kind = KINDS[options.kind]
    kind = kind._replace(combine=KEPT_FOR_BACKWARD[options.kind]) if keeps else kind
    return like.shape, like.stride(), plan_reduction(_layout(options, shape, stride), dtype, device, kind, options.p)


def _layout(options: Reduce, shape: Sequence[int], stride: int | None = None) -> Layout:
    layout = Layout.of(shape, options.dims, stride)
    assert layout is not None, "dimensions that alternate more often are reduced in groups"
    return layout


def row_stride(x: Tensor, dims: Sequence[int]) -> int | None:
    """Return the stride of the rows of a matrix that kernels reduce over these dimensions; None if x is not one."""
    last = x.dim() - 1
    if tuple(dims) not in ((last,), (last - 1,)) or x.stride(-1) != 1 or 1 in x.shape[-2:]:
        return None
    strides = [x.stride(-2) * math.prod(x.shape[d + 1 : last]) for d in range(last)]
    is_matrix = all(x.stride(d) == strides[d] or x.shape[d] == 1 for d in range(last))
    return x.stride(-2) if is_matrix and x.stride(-2) >= x.shape[-1] else None


def _in_rows(x: Tensor, options: Reduce) -> tuple[Tensor, int | None]:
    """Return x as kernels read it, and the stride of its rows if there is something between them; else a copy."""
    stride = None if x.is_contiguous() else row_stride(x, options.dims)
    return (x.contiguous(), None) if stride is None else (x, stride)


def _is_copied(x: Tensor, dims: Sequence[int]) -> bool:
    """Return whether kernels can reduce only a copy of x."""
    return not x.is_contiguous() and memory_order(x) is None and row_stride(x, dims) is None


def _empty(x: Tensor, options: Reduce) -> Tensor:
    return x.new_empty(options.result_shape(x.shape), dtype=options.dtype or x.dtype)


@operator("reduce", fake=_empty)
def reduce_forward(x: Tensor, options: Reduce) -> Tensor:
    """The reduction of a kind over neighboring dimensions."""
    if x.numel() == 0:
        return torch_reduce(x, options)
    out = options.dtype or x.dtype
    x, row_stride = _in_rows(x, options)
    size, stride, launch = _plan(options, x.shape, x.dtype, out, x.get_device(), False, row_stride)
    y = torch.empty_strided(size, stride, dtype=out, device=x.device)  # the cheapest allocation
    launch(x, y, y, None)
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
    x, row_stride = _in_rows(x, options)
    *_, launch = _plan(options, x.shape, x.dtype, y.dtype, x.get_device(), True, row_stride)
    launch(x, y, y, kept)
    return y, kept


def _empty_index(x: Tensor, options: Reduce) -> Tensor:
    return x.new_empty(options.result_shape(x.shape), dtype=torch.int64)


@operator("reduce_index", fake=_empty_index)
def reduce_index(x: Tensor, options: Reduce) -> Tensor:
    """The index of the extreme among the elements of the reduced dimensions."""
    if x.numel() == 0:
        return _empty_index(x, options)
    x, row_stride = _in_rows(x, options)
    size, stride, launch = _plan(options, x.shape, x.dtype, torch.int64, x.get_device(), False, row_stride)
    index = torch.empty_strided(size, stride, dtype=torch.int64, device=x.device)
    launch(x, index, index, None)
    return index


def _empty_with_index(x: Tensor, options: Reduce) -> tuple[Tensor, Tensor]:
    return _empty(x, options), _empty_index(x, options)


@operator("reduce_with_index", fake=_empty_with_index)
def reduce_with_index(x: Tensor, options: Reduce) -> tuple[Tensor, Tensor]:
    """The extreme and its index."""
    y, index = _empty_with_index(x, options)
    if x.numel():
        x, row_stride = _in_rows(x, options)
        *_, launch = _plan(options, x.shape, x.dtype, x.dtype, x.get_device(), False, row_stride)
        launch(x, y, index, None)
    return y, index


def torch_reduce(x: Tensor, options: Reduce) -> Tensor:
    """The reduction by torch, for empty tensors and double backward."""
    kind, p, dtype = options.kind, options.p, options.dtype or x.dtype
    shape = options.result_shape(x.shape)
    x = x.permute(*[d for d in range(x.dim()) if d not in options.dims], *options.dims)
    x = x.flatten(x.dim() - len(options.dims))
    x = x.to(dtype) if dtype.itemsize > x.element_size() else x
    if kind.startswith("norm"):
        y = torch.linalg.vector_norm(x, p if kind == "normp" else float(kind.removeprefix("norm")), -1)
    elif kind == "var":
        y = torch.var(x, -1, correction=p)
    else:
        y = getattr(torch, kind)(x, -1)
    return y.view(shape).to(dtype)


@cached_plan
def _plan_backward(options: Reduce, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: int) -> Launch:
    """Return the launch that takes x, y, dy (whose dtypes are given), what forward kept, and dx."""
    return plan_gradient(_layout(options, shape), dtypes[0], device, options.kind, options.p)


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
        N = math.prod([ctx.shape[d] for d in options.dims])
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
    outer, N, K, *_ = _layout(ctx.options, ctx.shape)
    zeros = dy.new_zeros(outer, N, K)
    dx = zeros.scatter(1, index.view(outer, 1, K), dy.reshape(outer, 1, K))
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


def _by_operator(x: Tensor, options: Reduce) -> Tensor:
    """Reduce dimensions in one go, keeping what backward needs if a gradient will be needed."""
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
    """Reduce any dimensions of a tensor in any order."""
    order = memory_order(x)
    if order is None:
        return _reduce_in_order(x, Reduce(dims, keepdim, kind, p, dtype))
    options = Reduce(_places(order, dims), keepdim, kind, p, dtype)
    return in_order_of(dims, keepdim, order, _reduce_in_order(x.permute(order), options))


def _reduce_in_order(x: Tensor, options: Reduce) -> Tensor:
    """Reduce a contiguous tensor: where dimensions alternate too often, group by group, or else with a copy of it."""
    dims = options.dims
    if Layout.of(x.shape, dims) is not None:
        return _by_operator(x, options)
    others = [d for d in range(x.dim()) if d not in dims]
    if options.kind in NESTABLE:
        first = max(d for d in others if d < dims[-1]) + 1
        last, before = tuple(d for d in dims if d >= first), tuple(d for d in dims if d < first)
        y = _by_operator(x, options._replace(dims=last, keepdim=True, dtype=torch.float32))
        y = _reduce_in_order(y, options._replace(dims=before, keepdim=True, dtype=options.dtype or x.dtype))
    else:
        last = tuple(range(len(others), x.dim()))
        y = _by_operator(x.permute(*others, *dims), options._replace(dims=last, keepdim=False))
    return y.view(options.result_shape(x.shape))


def memory_order(x: Tensor) -> list[int] | None:
    """Return the order of dimensions in which x is contiguous; None if that is their own, or if there is none."""
    if x.is_contiguous():
        return None
    order = sorted(range(x.dim()), key=lambda d: (x.shape[d] > 1, -x.stride(d)))
    return order if x.permute(order).is_contiguous() else None


def _places(order: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """Return where these dimensions are in an order of them, sorted."""
    return tuple(place for place, d in enumerate(order) if d in dims)


def in_order_of(dims: Sequence[int], keepdim: bool, order: Sequence[int], y: Tensor) -> Tensor:
    """Return the result over `dims` of a tensor whose dimensions were in this order, contiguous in their own."""
    left = [d for d in order if keepdim or d not in dims]
    return y.permute([left.index(d) for d in sorted(left)]).contiguous()


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
    if Layout.of(shape, dims) is None:
        return lambda x: reduce(x, dims, call.kind, keepdim=call.keepdim, p=call.p, dtype=call.dtype)
    out = torch.int64 if KINDS[call.kind].finish == "none" else call.dtype or dtype
    options = Reduce(dims, call.keepdim, call.kind, call.p)
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
    if call.kind != "logsumexp" and not needs_gradient(x) and _is_copied(x, dims):
        return None  # torch needs no copy, and one pass; its gradients are slower than a copy
    if KINDS[call.kind].finish == "none":
        return index_of_extreme(x, Reduce(dims, call.keepdim, call.kind))
    return reduce(x, dims, call.kind, keepdim=call.keepdim, p=call.p, dtype=call.dtype)


def eligible_reduction(x: Any, dtype: Any = None) -> bool:
    """Return whether our kernels can reduce x as torch would; there must be something to reduce."""
    # To a narrower dtype torch rounds before it reduces.
    return eligible(x) and x.numel() > 0 and x.dim() > 0 and dtype in (None, x.dtype, torch.float32)


def index_of_extreme(x: Tensor, options: Reduce) -> Tensor:
    """Return the index of the extreme; over several dimensions it counts elements in their own order."""
    order = memory_order(x) if len(options.dims) == 1 else None
    if order is None:
        return reduce_index(x, options)
    y = reduce_index(x.permute(order), options._replace(dims=_places(order, options.dims)))
    return in_order_of(options.dims, options.keepdim, order, y)


def _has_no_variance(call: ReduceCall, shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Return whether torch would warn: the correction leaves no degrees of freedom."""
    return call.kind == "var" and call.p >= math.prod([shape[d] for d in dims])


dispatch = Dispatch(_plan_call, _call)


def extreme_with_index(
    crossover: Crossover,
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
    if is_plain and eligible_reduction(input) and crossover.reached(input.numel(), input.get_device()):
        dim, keepdim = _dim_and_keepdim(*args, **kwargs)
        if type(dim) is int and type(keepdim) is bool and (dims := reduced_dims(input.dim(), dim)):
            options = Reduce(dims, keepdim, torch_extreme.__name__)
            order = memory_order(input)
            if order is None:
                return result(reduce_with_index(input, options))
            found = reduce_with_index(input.permute(order), options._replace(dims=_places(order, dims)))
            return result([in_order_of(dims, keepdim, order, y) for y in found])
    return torch_extreme(input, *args, **kwargs)


def _dim_and_keepdim(dim: Any = None, keepdim: Any = False) -> tuple[Any, Any]:
    return dim, keepdim

"""Torch operators by their work: those that compute nothing, move numbers, add up products, or round a result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree

from tilewright.worker.operators import Mode

# Operators that allocate, copy or view, and compute nothing.
NO_WORK = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zero_", "fill_", "resize_"),
    *("_to_copy", "copy_", "clone", "detach", "expand", "view", "_unsafe_view", "as_strided", "transpose", "t"),
    *("permute", "unsqueeze", "squeeze", "select", "slice", "alias", "unbind", "split", "_local_scalar_dense"),
}
# Operators that move or select values, and compute none: their results are exact.
MOVES = NO_WORK | {
    "sort", "argsort", "topk", "kthvalue", "median", "gather", "index", "index_select", "take", "embedding",
    "masked_select", "masked_fill", "masked_fill_", "where", "cat", "stack", "flip", "roll", "repeat",
    "constant_pad_nd", "tril", "triu", "diagonal", "diagonal_copy", "unfold", "pixel_shuffle", "channel_shuffle",
    "narrow", "movedim", "reshape", "view_as", "split_with_sizes", "set_", "lift_fresh", "max", "min", "amax",
    "amin", "maximum", "minimum", "argmax", "argmin", "max_pool1d", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "relu", "relu_", "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max",
    "clamp_max_", "hardtanh", "abs", "neg", "full", "full_like", "zeros_like", "ones", "ones_like", "arange", "eq",
    "ne", "gt", "ge", "lt", "le", "isnan", "nonzero", "logical_and", "logical_or", "logical_not", "bitwise_and",
    "bitwise_or", "bitwise_not", "_unique2", "unique_dim", "floor", "ceil", "trunc", "sign", "sgn", "signbit",
}  # fmt: skip
PRODUCTS = {  # operators that add up products of two matrices
    *("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "addbmm", "dot", "vdot", "linear", "matmul", "_grouped_mm"),
    *("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "thnn_conv2d", "slow_conv3d"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
}
# Operators that may name any of several equal values by its index.
UNORDERED = {"topk", "sort", "argsort", "kthvalue", "median", "mode"}


class RoundedResults(Mode):
    """Changes the results of every operator at random by a relative rounding error, as those of a kernel are rounded.

    Operators that move or select values are exact, and operators in place are left alone. An operator of a backward
    pass is taken apart, since its terms may cancel: softmax's gradient is exp(y) sum(dy) subtracted from dy.
    """

    def __init__(self, eps: float, seed: int):
        super().__init__()
        self._eps, self._seed = eps, seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "backward" in func.name() and func in decomposition_table:
            with self:
                return decomposition_table[func](*args, **(kwargs or {}))
        returned = func(*args, **(kwargs or {}))
        is_view = func._schema.is_mutable or any(result.alias_info for result in func._schema.returns)
        is_exact = is_view or operator_name(func.name()) in MOVES
        return returned if is_exact else pytree.tree_map(self._rounded, returned)

    def _rounded(self, result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point() or result.layout is not torch.strided:
            return result
        self._seed += 1
        return result.clone().mul_(1 + self._eps * signs(result, self._seed))


def signs(like: Tensor, seed: int) -> Tensor:
    """Return random signs in the shape of a tensor."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return 2.0 * torch.randint(0, 2, like.shape, generator=generator, device=like.device, dtype=torch.int8) - 1


def operator_name(name: str) -> str:
    """Return the name of an operator without its namespace and overload."""
    return name.removeprefix("aten::").partition(".")[0]

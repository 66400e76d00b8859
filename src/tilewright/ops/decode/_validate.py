"""Checks of the arguments of attention against a cache: whether they match, and whether our kernels can take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.decode._append import is_fp8
from tilewright.ops.decode._reference import LAYOUTS, token_major
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.gpus import has_fp8
from tilewright.runtime.operator import is_observed, needs_gradient


def require(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    if not condition:
        raise error(message)


def check_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, layout: str
) -> int:
    """Return the number of key heads; raise where the arguments do not match."""
    require(layout in LAYOUTS, f"layout must be 'NHD' or 'HND', not {layout!r}")
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        require_tensor(name, x, q)
        require(x.dim() == 4, f"{name} must have four dimensions, not {x.dim()}")
    B, _, H, D = q.shape
    shape = f"[{'pages' if block_table is not None else B}, {'tokens, HKV' if layout == 'NHD' else 'HKV, tokens'}, {D}]"
    require(k_cache.shape == v_cache.shape and k_cache.shape[3] == D, _expected("the caches", shape, k_cache, v_cache))
    require(
        k_cache.dtype == v_cache.dtype, f"the caches have two dtypes, {k_cache.dtype} and {v_cache.dtype}", TypeError
    )
    HKV = token_major(k_cache, layout).shape[2]
    require(HKV > 0 and H % HKV == 0, f"{H} query heads are not a multiple of the {HKV} heads of the caches")
    require(
        k_cache.dtype == q.dtype or is_fp8(k_cache.dtype),
        f"the caches must have the dtype of q, {q.dtype}, or float8, not {k_cache.dtype}",
        TypeError,
    )
    check_tables(lengths, block_table, q)
    require(block_table is not None or k_cache.shape[0] == B, _expected("the caches", shape, k_cache))
    return HKV


def require_tensor(name: str, x: Any, q: Any) -> None:
    """Raise unless x is a tensor on the device of q."""
    require(isinstance(x, Tensor), f"{name} must be a tensor, not {type(x).__name__}", TypeError)
    require(x.device == q.device, f"{name} is on {x.device} and q on {q.device}: move it with .to()")


def check_tables(lengths: Tensor, block_table: Tensor | None, q: Tensor) -> None:
    B = q.shape[0]
    require_tensor("lengths", lengths, q)
    if block_table is not None:
        require_tensor("block_table", block_table, q)
    require(lengths.shape == (B,), _expected("lengths", f"[{B}]", lengths))
    for name, x in (("lengths", lengths), ("block_table", block_table)):
        is_index = x is None or x.dtype in (torch.int32, torch.int64)
        require(is_index, f"{name} must be int32 or int64, not {getattr(x, 'dtype', None)}", TypeError)
    if block_table is not None:
        is_right = block_table.dim() == 2 and block_table.shape[0] == B
        require(is_right, _expected("block_table", f"[{B}, pages per sequence]", block_table))


def check_lengths(
    lengths: Tensor,
    capacity: int,
    added: int,
    block_table: Tensor | None,
    page: int,
    pages: int,
    rotary: Tensor | None = None,
) -> None:
    """Raise where values on the CPU do not fit; on a GPU, kernels assert it if Triton's debug mode is on."""
    require(added <= capacity, f"{added} new tokens do not fit into a cache of {capacity} tokens per sequence")
    if is_observed() or lengths.device.type != "cpu" or not lengths.numel():
        return
    longest = int(lengths.max()) + added
    require(longest <= capacity, f"a sequence has {longest} tokens, but the cache holds {capacity} per sequence")
    if rotary is not None:
        most = rotary.shape[0]
        require(
            longest <= most, f"a sequence has {longest} tokens, but rotary_cos and rotary_sin have {most} positions"
        )
    require(int(lengths.min()) >= 0, f"lengths must not be negative, but one is {int(lengths.min())}")
    if block_table is not None and block_table.device.type == "cpu" and block_table.numel():
        is_used = torch.arange(block_table.shape[1]) * page < lengths[:, None] + added
        wrong = is_used & ((block_table < 0) | (block_table >= pages))
        require(
            not bool(wrong.any()),
            f"block_table names page {int(block_table[wrong][0]) if bool(wrong.any()) else 0} within a sequence, "
            f"but the cache has pages 0 to {pages - 1}",
        )


def check_splits(num_splits: int | None) -> None:
    is_number = num_splits is None or (isinstance(num_splits, int) and num_splits > 0)
    require(is_number, f"num_splits must be a positive integer, not {num_splits}")


def per_head(name: str, factor: Any, HKV: int, q: Tensor) -> Tensor | None:
    """Return the factor of each head of a cache, float32 [HKV]."""
    if factor is None:
        return None
    if not isinstance(factor, Tensor):
        return torch.full((HKV,), float(factor), dtype=torch.float32, device=q.device)
    require(factor.shape in ((), (HKV,)), _expected(name, f"[{HKV}] or a number", factor))
    return factor.float().expand(HKV)


def is_eligible(q: Tensor, *others: Tensor | None) -> bool:
    """Return whether our kernels can take these tensors, and nothing wants gradients."""
    if not eligible(q) or needs_gradient(q, *others):
        return False
    given = [x for x in others if x is not None]
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.device != q.device for x in given):
        return False
    if any(is_fp8(x.dtype) for x in given) and not has_fp8(q.get_device()):
        return False  # Triton has no such type there
    return all(eligible(x) for x in given if x.dtype in (torch.float16, torch.bfloat16, torch.float32))


def _expected(name: str, shape: str, *given: Tensor) -> str:
    return f"{name} must be {shape}, not {' and '.join(dict.fromkeys(str([*x.shape]) for x in given))}"

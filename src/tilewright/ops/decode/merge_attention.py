"""Merge attention over two sets of tokens: the average of the outputs, weighted by their sums of exponentials.

Softmax over the union of two sets follows from the results over each: with lse = log(e^a + e^b), the output is e^(a -
lse) out_a + e^(b - lse) out_b. Cascade attention computes a prompt that many sequences share once for all of them, and
merges the result with that of each sequence's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops.decode._splits import LN_2, LOG2_E
from tilewright.ops.decode._validate import is_eligible, require
from tilewright.runtime.configs import cached_plan
from tilewright.runtime.launch import Launcher
from tilewright.runtime.operator import contiguous_like, operator
from tilewright.runtime.sizes import cdiv, next_power_of_2
from tilewright.spec import Cost, Draw, Op, points

__all__ = ["merge_attention"]

ELEMENTS = 2048  # per program


def reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -torch.inf, 0.0)  # no token in either set: zeros
    out = out_a * torch.exp(lse_a - base)[..., None] + out_b * torch.exp(lse_b - base)[..., None]
    return out.to(out_a.dtype), lse


def cost(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Cost:
    rows = lse_a.numel()
    return Cost(
        read=out_a.nbytes + out_b.nbytes + lse_a.nbytes + lse_b.nbytes,
        written=out_a.nbytes + lse_a.nbytes,
        flops={"fp32": 3 * out_a.numel(), "special": 3 * rows},
    )


def _inputs(draw: Draw) -> tuple[Tensor, ...]:
    pair = [(draw.randn("M", "H", "D"), draw.randn("M", "H", dtype=torch.float32)) for _ in range(2)]
    return *pair[0], *pair[1]


op = Op(
    "merge_attention",
    reference,
    cost,
    inputs=_inputs,
    check=points(M=(1, 5, 33, 7), H=(1, 4, 3, 2), D=(1, 64, 40, 257)),
    bench=points(M=(64, 8192), H=(32, 32), D=(128, 128)),
    takes=lambda case: case["D"] != 0,
    batch="M",
)


@triton.jit
def _merge_fwd(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, M, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    in_rows = offs_m < M
    mask = in_rows[:, None] & (EVEN_D | (offs_d < D)[None, :])
    offs = offs_m[:, None] * D + offs_d[None, :]  # [BLOCK_M, BLOCK_D]
    a = tl.load(lse_a_ptr + offs_m, mask=in_rows, other=0.0) * LOG2_E
    b = tl.load(lse_b_ptr + offs_m, mask=in_rows, other=0.0) * LOG2_E
    out_a = tl.load(out_a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    largest = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    both = largest + tl.log2(tl.exp2(a - largest) + tl.exp2(b - largest))
    base = tl.where(both == -float("inf"), 0.0, both)
    out = out_a * tl.exp2(a - base)[:, None] + out_b * tl.exp2(b - base)[:, None]
    tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + offs_m, both * LN_2, mask=in_rows)


_launch = Launcher(_merge_fwd)


@cached_plan
def _plan(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: int) -> Callable[..., None]:
    M, D = shape
    block_d = next_power_of_2(D)
    block_m = max(1, ELEMENTS // block_d)
    return _launch.prepare(
        (cdiv(M, block_m),), M, D, BLOCK_M=block_m, BLOCK_D=block_d, EVEN_D=block_d == D, num_warps=4
    )


def _empty_outputs(out_a: Tensor, lse_a: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return contiguous_like(out_a), contiguous_like(lse_a)


@operator("merge_attention", fake=_empty_outputs)
def merge_forward(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The output [..., D] and the float32 log-sum-exp [...] over both sets of tokens."""
    out, lse = _empty_outputs(out_a, lse_a)
    if out.numel():
        plan = _plan((lse.numel(), out.shape[-1]), (out_a.dtype, out_b.dtype), out.get_device())
        plan(out_a.contiguous(), lse_a.contiguous(), out_b.contiguous(), lse_b.contiguous(), out, lse)
    return out, lse


@op.kernel("triton", language="triton")
def triton_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return merge_forward(out_a, lse_a, out_b, lse_b)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of attention over the tokens of both results. Not measured yet.

    The outputs are [..., D], the log-sum-exp of their scores float32 [...], as `decode_attention` and `mla_decode`
    return them with return_lse=True. The two sets of tokens must have none in common.
    """
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        require(out.shape[:-1] == lse.shape, f"lse_{name} must be {[*out.shape[:-1]]}, not {[*lse.shape]}")
        require(lse.dtype == torch.float32, f"lse_{name} must be float32, not {lse.dtype}", TypeError)
    require(out_a.shape == out_b.shape, f"the outputs must have one shape, not {[*out_a.shape]} and {[*out_b.shape]}")
    require(out_a.dtype == out_b.dtype, f"the outputs have two dtypes, {out_a.dtype} and {out_b.dtype}", TypeError)
    if not out_a.shape[-1] or not is_eligible(out_a, out_b, lse_a, lse_b):
        return reference(out_a, lse_a, out_b, lse_b)
    return merge_forward(out_a, lse_a, out_b, lse_b)


@op.public
def public(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return merge_attention(out_a, lse_a, out_b, lse_b)

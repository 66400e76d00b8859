"""Attention as operators registered with torch: launches, configurations and gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.attention._formula import attend
from tilewright.ops.attention._triton import (
    _attention_bwd_delta,
    _attention_bwd_dkdv,
    _attention_bwd_dq,
    _attention_fwd,
)
from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.crossovers import PerGPU
from tilewright.runtime.launch import Launcher, shared_memory
from tilewright.runtime.operator import scatter
from tilewright.runtime.sizes import cdiv, next_power_of_2

# BLOCK_M, BLOCK_N, num_warps, num_stages by the largest head size: for LARGE_SHARED memory, for less, and for fp32.
LARGE = {
    "fwd": {64: (128, 64, 8, 3), 128: (128, 128, 8, 3), 256: (128, 64, 8, 2)},
    "dkdv": {64: (64, 64, 8, 3), 128: (32, 128, 8, 1), 256: (32, 32, 8, 2)},
    "dq": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)},
}
SMALL = {
    "fwd": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
    "dkdv": {64: (32, 64, 4, 2), 128: (32, 64, 8, 1), 256: (16, 32, 8, 2)},
    "dq": {64: (128, 64, 8, 3), 128: (128, 32, 8, 2), 256: (32, 32, 4, 2)},
}
FP32 = {
    "fwd": {64: (64, 32, 8, 2), 128: (64, 16, 8, 2), 256: (32, 16, 8, 2)},
    "dkdv": {64: (32, 32, 8, 2), 128: (32, 32, 8, 2), 256: (16, 16, 8, 2)},
    "dq": {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (16, 16, 8, 2)},
}
LARGE_SHARED = 227 * 1024  # bytes of shared memory per program
DELTA_ROWS = 64
# Bytes of L2 that hold the streamed tensors of the heads in flight: about half, since the others stream through it.
L2_SHARE = PerGPU("attention bytes in L2", lambda gpu: gpu.l2 // 2)
LOG2_E = 1.0 / math.log(2.0)


def _blocks(m: int, n: int, warps: int, stages: int) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}


def _default(kernel: str, size: int, head: int, is_large: bool) -> Config:
    return _blocks(*(FP32 if size == 4 else LARGE if is_large else SMALL)[kernel][head])


def _choices(kernel: str, size: int, head: int, is_large: bool) -> list[Config]:
    sides = [n for n in (16, 32, 64, 128) if n * head * size <= 2**15]
    return [_blocks(m, n, w, s) for m in sides for n in sides for w in (4, 8) for s in (1, 2, 3) if m * n >= 1024]


BLOCKS = ConfigTable("attention.json", _default, _choices)
_launch_fwd = Launcher(_attention_fwd)
_launch_delta = Launcher(_attention_bwd_delta)
_launch_dkdv = Launcher(_attention_bwd_dkdv)
_launch_dq = Launcher(_attention_bwd_dq)


def _config(kernel: str, q: Tensor, is_causal: bool) -> Config:
    D = q.shape[-1]
    head = next(largest for largest in FP32[kernel] if largest >= D)
    block_d = max(16, next_power_of_2(D))
    return {
        **BLOCKS(q, kernel, q.element_size(), head, shared_memory(q.get_device()) >= LARGE_SHARED),
        "BLOCK_D": block_d,
        "CAUSAL": is_causal,
        "EVEN_D": block_d == D,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
    }


def _heads_at_once(heads: int, streamed: Tensor, is_causal: bool) -> int:
    """Return how many heads run side by side; `streamed` is one of the two tensors that every program iterates over.

    Causal programs differ in length. The longest ones of many heads start first, as long as the streamed tensors of
    these heads stay in L2.
    """
    held = int(L2_SHARE[streamed.get_device()])
    return min(heads, max(1, held * heads // (2 * streamed.nbytes))) if is_causal else 1


def _rows(x: Tensor) -> Tensor:
    """Return x with contiguous rows, close enough for int32 offsets inside a block; a copy only where needed."""
    return x if x.stride(-1) == 1 and x.stride(-2) < 2**23 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _empty_output(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_rows(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tilewright::attention", mutates_args=())
def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output, laid out as q, and the base-2 log-sum-exp of each row of scores. No tensor may be empty."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    out, lse = _empty_output(q)
    (B, H, LQ, D), (HKV, LK) = q.shape, k.shape[1:3]
    config = _config("fwd", q, is_causal)
    _launch_fwd(
        (cdiv(LQ, config["BLOCK_M"]) * B * H,),
        q, k, v, out, lse, *_strides(q, k, v, out), B, H, HKV, LQ, LK, D, scale * LOG2_E,
        _heads_at_once(B * H, k, is_causal), HAS_TAIL=is_causal or LK % config["BLOCK_N"] != 0, **config,
    )  # fmt: skip
    return out, lse


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, wants_q, wants_kv = args
    dq = torch.empty_like(_rows(q)) if wants_q else q.new_empty(0)
    dk, dv = (torch.empty_like(_rows(x)) if wants_kv else x.new_empty(0) for x in (k, v))
    return dq, dk, dv


@torch.library.custom_op("tilewright::attention_backward", mutates_args=())
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    is_causal: bool,
    scale: float,
    wants_q: bool,
    wants_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; those that are not wanted are empty."""
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout)
    (B, H, LQ, D), (HKV, LK) = q.shape, k.shape[1:3]
    dq, dk, dv = _empty_gradients(q, k, v, wants_q, wants_kv)
    delta = torch.empty_like(lse)
    sizes = (B, H, HKV, LQ, LK, D, scale, scale * LOG2_E)
    _launch_delta(
        (B * H, cdiv(LQ, DELTA_ROWS)),
        out, dout, delta, *_strides(out, dout), H, LQ, D, BLOCK_M=DELTA_ROWS, BLOCK_D=next_power_of_2(D),
    )  # fmt: skip
    if wants_kv:
        config = _config("dkdv", q, is_causal)
        _launch_dkdv(
            (cdiv(LK, config["BLOCK_N"]) * B * HKV,),
            q, k, v, dout, lse, delta, dk, dv, *_strides(q, k, v, dout, dk, dv), *sizes,
            _heads_at_once(B * HKV, q, is_causal), EVEN_M=LQ % config["BLOCK_M"] == 0, **config,
        )  # fmt: skip
    if wants_q:
        config = _config("dq", q, is_causal)
        _launch_dq(
            (cdiv(LQ, config["BLOCK_M"]) * B * H,),
            q, k, v, dout, lse, delta, dq, *_strides(q, k, v, dout, dq), *sizes,
            _heads_at_once(B * H, k, is_causal), HAS_TAIL=is_causal or LK % config["BLOCK_N"] != 0, **config,
        )  # fmt: skip
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor, _: object) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():  # double backward: torch differentiates the formula again
        q, k, v = (x.view_as(x) for x in (q, k, v))  # distinct, even if one tensor is passed as several of them
        again = attend(q, k, v, *ctx.options)
        leaves = [*itertools.compress((q, k, v), wanted)]
        gradients = torch.autograd.grad(again, leaves, dout, create_graph=True)
    else:
        found = attention_backward(q, k, v, out, lse, dout, *ctx.options, wanted[0], wanted[1] or wanted[2])
        gradients = itertools.compress(found, wanted)
    return *scatter(gradients, wanted), None, None


attention_forward.register_fake(_empty_output)
attention_backward.register_fake(_empty_gradients)
attention_forward.register_autograd(_backward, setup_context=_save)

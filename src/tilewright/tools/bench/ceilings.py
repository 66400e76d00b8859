"""How fast this GPU really is: bandwidth and matrix rates, measured by the same timer as the kernels."""

# pyright: reportCallIssue=false, reportIndexIssue=false
# Type checkers take a @triton.jit function for a plain one.
from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

import torch
import triton
import triton.language as tl

from tilewright.tools.bench.timer import Timer

BYTES = 2**30
SAMPLES = 15
MATRIX_SIZES = (4096, 8192)
MATRIX_DTYPES = {
    "tensor.float16": torch.float16,
    "tensor.bfloat16": torch.bfloat16,
    "tensor.tf32": torch.float32,
    "fp32": torch.float32,
}


@triton.jit
def _copy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def _read(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0), count, tl.num_programs(0)):
        total += tl.load(x_ptr + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, axis=0))


def measure(timer: Timer, units: Iterable[str]) -> dict[str, float]:
    """Rates per second: `copy` and `read` bandwidth always, and the matrix units asked for."""
    rates = _bandwidth(timer)
    for unit in units:
        if unit in MATRIX_DTYPES:
            rates[unit] = max(_matrix_rate(timer, unit, n) for n in MATRIX_SIZES)
    return rates


def _bandwidth(timer: Timer) -> dict[str, float]:
    x = torch.randn(BYTES // 4, device="cuda")
    y = torch.empty_like(x)
    copies: dict[str, Callable[[], object]] = {"copy_": lambda: y.copy_(x)}
    for block, warps in ((1024, 4), (4096, 8)):
        copies[f"triton {block}"] = lambda b=block, w=warps: _copy[(x.numel() // b,)](x, y, BLOCK=b, num_warps=w)
    reads: dict[str, Callable[[], object]] = {"sum": lambda: x.sum()}
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    for block, warps, per_sm in ((4096, 8, 8), (8192, 8, 16), (16384, 16, 32)):
        reads[f"triton {block}"] = lambda b=block, w=warps, p=per_sm: _read[(sms * p,)](
            x, y, x.numel() // b, BLOCK=b, num_warps=w
        )
    return {
        "copy": 2 * x.nbytes / _fastest(timer, copies),
        "read": x.nbytes / _fastest(timer, reads),
    }


def _matrix_rate(timer: Timer, unit: str, n: int) -> float:
    dtype = MATRIX_DTYPES[unit]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = unit == "tensor.tf32"
    try:
        x, y = torch.randn(n, n, device="cuda", dtype=dtype), torch.randn(n, n, device="cuda", dtype=dtype)
        return 2 * n**3 / _fastest(timer, {"matmul": lambda: x @ y})
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _fastest(timer: Timer, calls: dict[str, Callable[[], object]]) -> float:
    """Seconds of the fastest of several ways to do the same."""
    return min(median(samples) for samples in timer.interleave(calls, SAMPLES).values()) * 1e-6

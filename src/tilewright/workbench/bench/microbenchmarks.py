"""Measure the ceilings of this GPU: bandwidths and the rates of its compute units, with the timer of the kernels.

Each is the best of several kernels and sizes, on random data: zeros need less power and run faster.
"""

# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Type checkers take a @triton.jit function for a plain one.
from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.timer import Timer

SAMPLES = 15
BYTES = (2**29, 2**30)  # tensor sizes that exceed every cache
L2_SHARES = (1 / 6, 1 / 4, 1 / 3)  # tensor size / L2 size
PASSES = 32  # over a tensor in the L2
GEMM_SIZES = (4096, 8192)
STEPS = 512  # operations per element


@triton.jit
def _copy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def _write(y_ptr, value, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.zeros([BLOCK], tl.float32) + value)


@triton.jit
def _read(x_ptr, y_ptr, blocks, passes, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for shift in range(passes):
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            index = (block + shift) % blocks  # never a block in the L1 of this SM
            total += tl.load(x_ptr + index.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _multiply_add(x_ptr, y_ptr, a, b, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    for _ in range(STEPS // 32):
        for _ in tl.static_range(32):
            x = x * a + b
    tl.store(y_ptr + offs, x)


@triton.jit
def _reciprocal_root(x_ptr, y_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    for _ in range(STEPS // 32):
        for _ in tl.static_range(32):
            x = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    tl.store(y_ptr + offs, x)


@triton.jit
def _matmul(
    x_ptr, y_ptr, z_ptr, N, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    rows = tl.cdiv(N, BLOCK_M)
    group = tl.program_id(0) // (8 * tl.cdiv(N, BLOCK_N)) * 8  # concurrent programs share tiles in the L2
    group_rows = tl.minimum(rows - group, 8)
    offs_m = (group + tl.program_id(0) % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % (8 * tl.cdiv(N, BLOCK_N)) // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + offs_m[:, None] * N + offs_k[None, :]
    y_ptrs = y_ptr + offs_n[None, :] * N + offs_k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for _ in range(0, N, BLOCK_K):
        acc = tl.dot(tl.load(x_ptrs), tl.load(y_ptrs), acc, out_dtype=ACC)
        x_ptrs += BLOCK_K
        y_ptrs += BLOCK_K
    z_ptrs = z_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(z_ptrs, acc.to(z_ptr.dtype.element_ty))


def measure(timer: Timer) -> dict[str, float]:
    """Return the rate per second of each unit of Cost, and of `copy`, `read`, `write` and `l2`.

    Units that this GPU or this version of torch does not support are omitted.
    """
    found = {**_memory(timer), "l2": _l2(timer), **_arithmetic(timer)}
    for unit, calls in GEMMS.items():
        try:
            found[unit] = max(2 * n**3 / _fastest(timer, calls(n)) for n in GEMM_SIZES)
        except RuntimeError as error:
            if not _is_unsupported(error):
                raise
    return found


def _memory(timer: Timer) -> dict[str, float]:
    best = {"copy": 0.0, "read": 0.0, "write": 0.0}
    for size in BYTES:
        x = torch.randn(size // 4, device="cuda")
        y = torch.empty_like(x)
        copies: dict[str, Callable[[], Any]] = {"copy_": lambda x=x, y=y: y.copy_(x)}
        writes: dict[str, Callable[[], Any]] = {"fill_": lambda y=y: y.fill_(1.5)}
        for block, warps in ((1024, 4), (2048, 8), (4096, 8)):
            grid = (x.numel() // block,)
            copies[f"{block}"] = lambda x=x, y=y, g=grid, b=block, w=warps: _copy[g](x, y, BLOCK=b, num_warps=w)
            writes[f"{block}"] = lambda y=y, g=grid, b=block, w=warps: _write[g](y, 1.5, BLOCK=b, num_warps=w)
        best["copy"] = max(best["copy"], 2 * size / _fastest(timer, copies))
        best["read"] = max(best["read"], size / _fastest(timer, {"sum": x.sum, **_reads(x, y, 1)}))
        best["write"] = max(best["write"], size / _fastest(timer, writes))
    return best


def _reads(x: torch.Tensor, y: torch.Tensor, passes: int) -> dict[str, Callable[[], Any]]:
    found = {}
    for block, warps, per_sm in ((2048, 4, 16), (4096, 8, 8), (8192, 8, 16), (16384, 16, 32)):
        grid, blocks = (min(_sms() * per_sm, x.numel() // block),), x.numel() // block
        found[f"{block}"] = lambda g=grid, n=blocks, b=block, w=warps: _read[g](x, y, n, passes, BLOCK=b, num_warps=w)
    return found


def _l2(timer: Timer) -> float:
    """Return the L2 bandwidth. Each launch reads the tensor many times, to amortise the first, cold pass."""
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    best = 0.0
    for share in L2_SHARES:
        x = torch.randn(int(l2 * share) // 4 // 16384 * 16384, device="cuda")
        y = torch.empty(2**16, device="cuda")
        best = max(best, PASSES * x.nbytes / _fastest(timer, _reads(x, y, PASSES)))
    return best


def _arithmetic(timer: Timer) -> dict[str, float]:
    x = torch.rand(_sms() * 2**16, device="cuda")
    y = torch.empty_like(x)
    adds: dict[str, Callable[[], Any]] = {}
    roots: dict[str, Callable[[], Any]] = {}
    for block, warps in ((1024, 4), (2048, 4), (2048, 8)):
        grid = (x.numel() // block,)
        adds[f"{block}/{warps}"] = lambda g=grid, b=block, w=warps: _multiply_add[g](
            x, y, 0.999, 0.001, STEPS=STEPS, BLOCK=b, num_warps=w
        )
        roots[f"{block}/{warps}"] = lambda g=grid, b=block, w=warps: _reciprocal_root[g](
            x, y, STEPS=STEPS, BLOCK=b, num_warps=w
        )
    steps = STEPS * x.numel()
    return {"fp32": 2 * steps / _fastest(timer, adds), "special": steps / _fastest(timer, roots)}


def _gemms(dtype: torch.dtype, *, tf32: bool = False) -> Callable[[int], dict[str, Callable[[], Any]]]:
    def calls(n: int) -> dict[str, Callable[[], Any]]:
        x, y = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))

        def multiply(right: torch.Tensor) -> Any:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = tf32
            try:
                return x @ right
            finally:
                torch.backends.cuda.matmul.allow_tf32 = before

        return {"row-major": lambda: multiply(y), "transposed": lambda: multiply(y.t())}

    return calls


def _fp8_gemms(n: int) -> dict[str, Callable[[], Any]]:
    x, y = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return {"torch": lambda: torch._scaled_mm(x, y.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)}


def _int8_gemms(n: int) -> dict[str, Callable[[], Any]]:
    x, y = (torch.randint(-128, 128, (n, n), device="cuda", dtype=torch.int8) for _ in range(2))
    z = torch.empty(n, n, device="cuda", dtype=torch.int32)
    config = dict(ACC=tl.int32, BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=4, num_stages=3)
    return {
        "torch": lambda: torch._int_mm(x, y.t()),
        "triton": lambda: _matmul[(n // 128 * (n // 128),)](x, y, z, n, **config),
    }


GEMMS: Mapping[str, Callable[[int], dict[str, Callable[[], Any]]]] = {
    "tensor.bfloat16": _gemms(torch.bfloat16),
    "tensor.float16": _gemms(torch.float16),
    "tensor.tf32": _gemms(torch.float32, tf32=True),
    "tensor.float8_e4m3fn": _fp8_gemms,
    "tensor.int8": _int8_gemms,
}


def _is_unsupported(error: RuntimeError) -> bool:
    """Return whether the GPU lacks a unit, rather than being broken."""
    return any(word in str(error) for word in ("only supported", "not supported", "NOT_SUPPORTED", "not implemented"))


def _fastest(timer: Timer, calls: dict[str, Callable[[], Any]]) -> float:
    """Return the seconds of the fastest of several equivalent calls."""
    return min(median(samples) for samples in timer.interleave(calls, SAMPLES).values()) * 1e-6


def _sms() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count

"""Softmax over a dimension: y = exp(x - max x) / sum exp(x - max x).

Three forms of one algorithm, in the order in which each removes what the one before it wastes. Counted in moves of
the row through memory: three-pass reads it three times and writes it once (4N), online finds maximum and sum together
(3N), one-pass keeps the row in registers (2N, the least).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.ops._cuda import Source
from tilewright.ops._dispatch import runs_here
from tilewright.spec import Cost, Op, grid, points

LONGEST_ROW = 32768  # elements of a row that one program can hold in registers; twice as many spill
TILE = 2048  # elements of short rows that share a program; 16 a thread, as in longer rows


def reference(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def cost(x: Tensor) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes, flops={"fp32": 4 * x.numel(), "special": x.numel()})


def backward_cost(x: Tensor) -> Cost:
    return Cost(read=2 * x.nbytes, written=x.nbytes, flops={"fp32": 4 * x.numel()})


op = Op(
    "softmax",
    reference,
    cost,
    inputs=lambda draw: (draw.randn("M", "N", scale=3.0),),
    check=[*grid(M=(1, 3, 67), N=(1, 2, 781, 4096)), *points(M=(2, 1, 1), N=(16400, 70001, 393216))],
    bench=points(
        M=(65536, 32768, 16384, 16384, 8192, 4096, 2048, 512),
        N=(256, 1024, 4096, 8192, 32768, 65536, 131072, 262144),
    ),
    backward_cost=backward_cost,
    batch="M",
)


def _has_columns(x: Tensor) -> bool:
    return x.shape[-1] > 0


@op.kernel("manual", fits=_has_columns, is_baseline=True)
def manual(x: Tensor) -> Tensor:
    """Written out in PyTorch: five kernels, each through memory."""
    shifted = x.float() - x.float().amax(dim=-1, keepdim=True)
    e = torch.exp(shifted)
    return (e / e.sum(dim=-1, keepdim=True)).to(x.dtype)


@triton.jit
def _softmax_three_pass(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: M * N may pass 2**31
    x_ptr += row * N
    y_ptr += row * N
    largest = tl.full([BLOCK_N], -float("inf"), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        largest = tl.maximum(largest, tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32))
    m = tl.max(largest, axis=0)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        total += tl.exp(x - m)
    scale = 1.0 / tl.sum(total, axis=0)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + offs_n, (tl.exp(x - m) * scale).to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _softmax_online(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    y_ptr += row * N
    # One running maximum. The sums are rescaled when it grows: a second exp for each block, not for each element.
    m = -float("inf")
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        grown = tl.maximum(m, tl.max(x, axis=0))
        shift = tl.where(grown == -float("inf"), 0.0, grown)  # only -inf so far: no NaN from -inf + inf
        total = total * tl.exp(m - shift) + tl.exp(x - shift)
        m = grown
    scale = 1.0 / tl.sum(total, axis=0)
    # Last element first: the end of the row is what the first pass left in the cache.
    for start in range(0, N, BLOCK_N):
        offs_n = (tl.cdiv(N, BLOCK_N) - 1) * BLOCK_N - start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + offs_n, (tl.exp(x - m) * scale).to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _softmax_one_pass(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
    m = tl.max(x, axis=1)
    e = tl.exp(x - m[:, None])
    y = e / tl.sum(e, axis=1)[:, None]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_bwd(y_ptr, dy_ptr, dx_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=1)[:, None])
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_bwd_long(y_ptr, dy_ptr, dx_ptr, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * N
    dy_ptr += row * N
    dx_ptr += row * N
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        total += y * tl.load(dy_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    inner = tl.sum(total, axis=0)
    for start in range(0, N, BLOCK_N):
        offs_n = (tl.cdiv(N, BLOCK_N) - 1) * BLOCK_N - start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs_n, (y * (dy - inner)).to(dx_ptr.dtype.element_ty), mask=offs_n < N)


CUDA = Source("softmax.cu", "softmax_fwd", "softmax_bwd")
CUDA_THREADS = 256  # any whole number of warps is right


def _loop_block(N: int) -> int:
    return min(4096 if N <= 8192 else 8192, triton.next_power_of_2(N))


def _tile_config(N: int) -> dict[str, int]:
    block = triton.next_power_of_2(N)
    rows = max(1, TILE // block)
    return {"BLOCK_M": rows, "BLOCK_N": block, "num_warps": min(32, max(4, rows * block // 512))}


def _three_pass(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    _softmax_three_pass[(M,)](x, y, N, BLOCK_N=_loop_block(N), num_warps=8 if N <= 8192 else 32)


def _online(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    _softmax_online[(M,)](x, y, N, BLOCK_N=_loop_block(N), num_warps=8)


def _one_pass(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    config = _tile_config(N)
    _softmax_one_pass[(triton.cdiv(M, config["BLOCK_M"]),)](x, y, M, N, **config)


def _cuda(x: Tensor, y: Tensor) -> None:
    M, N = x.shape
    CUDA.launch("softmax_fwd", x.dtype, (M,), CUDA_THREADS, x, y, N)


FORMS = {"three-pass": _three_pass, "online": _online, "one-pass": _one_pass, "cuda": _cuda}


@torch.library.custom_op("tilewright::softmax", mutates_args=())
def softmax_forward(x: Tensor, form: str) -> Tensor:
    """Softmax of the last dimension by the named form."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        with torch.cuda.device_of(x):
            FORMS[form](x.contiguous().view(-1, x.shape[-1]), y.view(-1, x.shape[-1]))
    return y


@softmax_forward.register_fake
def _(x: Tensor, form: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("tilewright::softmax_backward", mutates_args=())
def softmax_backward(y: Tensor, dy: Tensor, form: str) -> Tensor:
    """The gradient of softmax's input from its output and the output's gradient."""
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    N = y.shape[-1]
    M = y.numel() // max(1, N)
    y, dy = y.contiguous(), dy.contiguous()
    if M:
        with torch.cuda.device_of(y):
            if form == "cuda":
                CUDA.launch("softmax_bwd", y.dtype, (M,), CUDA_THREADS, y, dy, dx, N)
            elif N <= LONGEST_ROW:
                config = _tile_config(N)
                _softmax_bwd[(triton.cdiv(M, config["BLOCK_M"]),)](y, dy, dx, M, N, **config)
            else:
                _softmax_bwd_long[(M,)](y, dy, dx, N, BLOCK_N=16384, num_warps=16)
    return dx


@softmax_backward.register_fake
def _(y: Tensor, dy: Tensor, form: str) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output)
    ctx.form = inputs[1]


def _backward(ctx, dy: Tensor):
    (y,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # gradients of gradients: torch differentiates this form again
        return y * (dy - (y * dy).sum(-1, keepdim=True)), None
    return softmax_backward(y, dy, ctx.form), None


softmax_forward.register_autograd(_backward, setup_context=_save)


@op.kernel("triton-three-pass", language="triton", fits=_has_columns)
def three_pass(x: Tensor) -> Tensor:
    return softmax_forward(x, "three-pass")


@op.kernel("triton-online", language="triton", fits=_has_columns)
def online(x: Tensor) -> Tensor:
    return softmax_forward(x, "online")


@op.kernel("triton", language="triton", fits=lambda x: 0 < x.shape[-1] <= LONGEST_ROW)
def one_pass(x: Tensor) -> Tensor:
    return softmax_forward(x, "one-pass")


@op.kernel("cuda", language="cuda", fits=_has_columns)
def cuda(x: Tensor) -> Tensor:
    return softmax_forward(x, "cuda")


SMALLEST = 2**26  # elements; below this a call costs the host more than our kernel saves


def softmax(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """As `torch.nn.functional.softmax`: the fast kernels where they fit and win, torch elsewhere."""
    if isinstance(input, Tensor) and input.numel() >= SMALLEST and runs_here(input):
        last = dim is not None and input.dim() > 0 and dim in (-1, input.dim() - 1)
        if last and dtype in (None, input.dtype):
            return softmax_forward(input, "one-pass" if input.shape[-1] <= LONGEST_ROW else "online")
    return torch.nn.functional.softmax(input, dim=dim, dtype=dtype)

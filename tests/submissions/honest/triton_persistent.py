"""A persistent kernel with as many programs as fit on eight SMs, by its registers; torch adds up their partial sums."""

OP = "dot"

import torch
import triton
import triton.language as tl


@triton.jit
def _dot(x_ptr, y_ptr, part_ptr, N, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < N, other=0.0).to(tl.float32)
        total += x * tl.load(y_ptr + offs, mask=offs < N, other=0.0).to(tl.float32)
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, axis=0))


def dot(x, y):
    x, y = x.contiguous(), y.contiguous()
    compiled = _dot.warmup(x, y, torch.empty(8, device=x.device), x.numel(), BLOCK=1024, grid=(8,))
    compiled._init_handles()
    programs = 8 * min(4, 65536 // (compiled.n_regs * 128))
    parts = torch.empty(programs, device=x.device)
    _dot[(programs,)](x, y, parts, x.numel(), BLOCK=1024)
    return parts.sum().to(x.dtype)

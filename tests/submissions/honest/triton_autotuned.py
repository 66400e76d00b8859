"""An autotuned Triton kernel."""

OP = "add"

import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": block}) for block in (256, 1024)], key=["N"])
@triton.jit
def _add(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=offs < N).to(tl.float32)
    tl.store(out_ptr + offs, (x + y).to(out_ptr.dtype.element_ty), mask=offs < N)


def add(x, y):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        _add[lambda config: (triton.cdiv(x.numel(), config["BLOCK"]),)](x.contiguous(), y.contiguous(), out, x.numel())
    return out

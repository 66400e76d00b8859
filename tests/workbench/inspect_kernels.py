"""Kernels for tests of `inspect`, written like a user's file. Tests look for the marked lines."""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DEVICE = triton.runtime.driver.active.get_active_torch_device()  # as in Triton's tutorials


@triton.jit
def _copy(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N)  # the load
    tl.store(y_ptr + offs, x, mask=offs < N)


def copy(x):
    y = torch.empty(x.numel(), dtype=x.dtype, device=DEVICE)
    _copy[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), BLOCK=1024)


def copy_from_the_second(x):
    _copy[(1,)](x[1:], x, x.numel() - 1, BLOCK=1024)


def copy_one(x):
    _copy[(1,)](x, x, 1, BLOCK=1024)


def copy_on_grid(x, *grid):
    _copy[grid](x, x, 1, BLOCK=1024)


@triton.jit
def _many(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs).to(tl.float64)
    for _ in range(3):
        x = x * tl.sum(x) + tl.max(x)
    tl.atomic_add(x_ptr + offs, tl.exp(x.to(tl.float32)))


def crowded(x):
    _many[(1,)](x, BLOCK=1024, num_warps=1, maxnreg=32)


@triton.jit
def _sines(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.sin(tl.load(x_ptr + offs)))


def sines(x):
    _sines[(1,)](x, BLOCK=128)


@triton.jit
def _product(x):
    return tl.dot(x, x)  # the mistake


@triton.jit
def _mistaken(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, _product(tl.load(x_ptr + offs)))


def mistaken(x):
    _mistaken[(1,)](x, BLOCK=128)


@gluon.jit
def _warps_of_32(x_ptr, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs = gl.arange(0, BLOCK, layout)  # the layout
    gl.store(x_ptr + offs, gl.load(x_ptr + offs))


def for_nvidia(x):
    _warps_of_32[(1,)](x, BLOCK=128)


@gluon.jit
def _from_hopper_on(x):
    held = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    tma.async_copy_shared_to_global(x, [0, 0], held)


def from_hopper_on(x):
    layout = gl.NVMMASharedLayout.get_default_for([8, 128], gl.float32)
    _from_hopper_on[(1,)](TensorDescriptor.from_tensor(x, [8, 128], layout))


@triton.jit
def _unheard_of(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    x = tl.inline_asm_elementwise("frobnicate $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)  # the assembly
    tl.store(x_ptr + offs, x)


def unheard_of(x):
    _unheard_of[(1,)](x, BLOCK=128)


@triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})], key=[])
@triton.jit
def _searched(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs) + 1)


def searched(x):
    _searched[lambda meta: (triton.cdiv(128, meta["BLOCK"]),)](x)


def until_a_value(x):
    copy(x)
    return x.sum().item()


def of_values(x):
    return x.sum().item()

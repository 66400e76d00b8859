"""Functions of Gluon's language, each in a kernel that stores the values that PyTorch computes."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from interpreter.gluon_kernels import NEEDS
from tilewright.errors import KernelAborted
from tilewright.interpreter import interpret

pytestmark = NEEDS

TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, TILE))
COLUMNS = gl.constexpr(gl.SliceLayout(0, TILE))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _load(x_ptr, M: gl.constexpr, N: gl.constexpr):
    return gl.load(x_ptr + gl.arange(0, M, ROWS)[:, None] * N + gl.arange(0, N, COLUMNS)[None, :])


@gluon.jit
def _store(y_ptr, y):
    """Store a tile in whatever layout it has."""
    layout: gl.constexpr = y.type.layout
    offs_m = gl.arange(0, y.shape[0], gl.SliceLayout(1, layout))
    offs_n = gl.arange(0, y.shape[1], gl.SliceLayout(0, layout))
    gl.store(y_ptr + offs_m[:, None] * y.shape[1] + offs_n[None, :], y)


def run(kernel, *args, grid=(1,), num_warps=4):
    with interpret():
        kernel[grid](*args, num_warps=num_warps)
    return args[0]


def numbers(*shape, dtype=torch.float32):
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


X = numbers(32, 64)


@gluon.jit
def shapes(y_ptr, x_ptr):
    x = _load(x_ptr, 32, 64)
    left, right = x.reshape([32, 2, 32]).permute(0, 2, 1).split()
    joined = gl.join(left, right).permute(0, 2, 1).reshape([32, 64])
    _store(y_ptr, gl.convert_layout(joined, TILE) + x)


@gluon.jit
def reductions(y_ptr, x_ptr):
    x = _load(x_ptr, 32, 64)
    total = gl.sum(x, axis=0) + gl.max(x, axis=0) - gl.min(x, axis=0)
    all_of_it = gl.sum(gl.sum(x, axis=1), axis=0)
    gl.store(y_ptr + gl.arange(0, 64, COLUMNS), total + all_of_it)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def scans(y_ptr, x_ptr):
    x = _load(x_ptr, 32, 64)
    _store(y_ptr, gl.associative_scan(x, 1, _add) + gl.reduce(x, 1, _larger)[:, None])


@gluon.jit
def automatic_layouts(y_ptr, x_ptr):
    offs_m = gl.arange(0, 32)
    offs_n = gl.arange(0, 64)
    x = gl.load(gl.set_auto_layout(x_ptr + offs_m[:, None] * 64 + offs_n[None, :], TILE))
    _store(y_ptr, x + gl.full([32, 64], 1.0, gl.float32))


@gluon.jit
def like(y_ptr, x_ptr):
    x = _load(x_ptr, 32, 64)
    _store(y_ptr, gl.where(x > 0, x, gl.zeros_like(x)) + gl.full_like(x, 2.0))


@gluon.jit
def atomics(y_ptr, x_ptr):
    x = _load(x_ptr, 32, 64)
    offs = gl.arange(0, 64, COLUMNS)
    gl.atomic_add(y_ptr + gl.expand_dims(offs, 0) + gl.zeros([32, 64], gl.int32, TILE), x)


@gluon.jit
def through_fma(y_ptr, x_ptr):
    a: gl.constexpr = gl.DotOperandLayout(0, TILE, 0)
    b: gl.constexpr = gl.DotOperandLayout(1, TILE, 0)
    x = _load(x_ptr, 32, 64)
    turned = gl.convert_layout(x.trans(), b)
    _store(y_ptr, gl.dot_fma(gl.convert_layout(x, a), turned, gl.zeros([32, 32], gl.float32, TILE)))


@gluon.jit
def through_mma_v2(y_ptr, x_ptr):
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    a: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    x = _load(x_ptr, 32, 64).to(gl.float16)
    acc = gl.zeros([32, 32], gl.float32, mma)
    _store(y_ptr, mma_v2(gl.convert_layout(x, a), gl.convert_layout(x.trans(), b), acc))


@gluon.jit
def through_a_device_descriptor(y_ptr, x_ptr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 64], gl.float32)
    desc = tma.make_tensor_descriptor(x_ptr, [32, 64], [64, 1], [32, 64], layout)
    tile = gl.allocate_shared_memory(gl.float32, [32, 64], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [16, 0], bar, tile)
    mbarrier.wait(bar, 0)
    _store(y_ptr, tile.load(TILE))


@gluon.jit
def views(y_ptr, x_ptr):
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x = _load(x_ptr, 32, 64)
    buffer = gl.allocate_shared_memory(gl.float32, [32, 64], linear, x)
    upper = buffer.slice(0, 16).load(TILE) + buffer.slice(16, 16).load(TILE)
    scratch = buffer._reinterpret(gl.int32, [16, 64], linear)
    scratch.store(upper.to(gl.int32))
    _store(y_ptr, scratch.load(TILE).to(gl.float32))


@gluon.jit
def layouts_in_numbers(y_ptr, x_ptr):
    linear: gl.constexpr = gl.to_linear_layout(TILE, [32, 64])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    buffer = gl.allocate_shared_memory(gl.float32, [32, 64], shared)
    x = gl.convert_layout(_load(x_ptr, 32, 64), linear, assert_trivial=True)
    conflicts: gl.constexpr = gl.bank_conflicts(x.type, buffer.type)
    _store(y_ptr, x * 0 + conflicts + 10 * gl.num_warps() + 100 * gl.num_ctas())


HALVES = X.reshape(32, 2, 32)
CASES = [
    (shapes, 2 * X),
    (reductions, X.sum(0) + X.amax(0) - X.amin(0) + X.sum()),
    (scans, X.cumsum(1) + X.amax(1, keepdim=True)),
    (automatic_layouts, X + 1),
    (like, X.relu() + 2),
    (atomics, X.sum(0)),
    (through_fma, X @ X.T),
    (through_mma_v2, X @ X.T),
    (through_a_device_descriptor, torch.cat([X[16:], torch.zeros(16, 64)])),
    (views, X[:16] + X[16:]),
]


@pytest.mark.parametrize(("kernel", "expected"), CASES, ids=[kernel.__name__ for kernel, _ in CASES])
def test_values(kernel, expected):
    assert torch.equal(run(kernel, torch.zeros(expected.shape), X), expected)


def test_questions_about_layouts_have_the_answers_of_the_compiler():
    (value,) = run(layouts_in_numbers, torch.zeros(32, 64), X).unique().tolist()
    assert value in {140.0 + conflicts for conflicts in range(32)}


@gluon.jit
def assembly(x_ptr):
    x = gl.load(x_ptr + gl.arange(0, 128, LINE))
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.float32, True, 1)


@gluon.jit
def other_form(x_ptr):
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    buffer = gl.allocate_shared_memory(gl.float32, [32, 64], linear, _load(x_ptr, 32, 64))
    _store(x_ptr, buffer._reinterpret(gl.float32, [32, 64], swizzled).load(TILE))


@pytest.mark.parametrize(
    ("kernel", "name", "num_ctas"),
    [(assembly, "inline_asm_elementwise", 1), (other_form, "_reinterpret", 1), (assembly, "num_ctas=2", 2)],
)
def test_what_is_not_covered_is_refused_by_name(kernel, name, num_ctas):
    with pytest.raises(KernelAborted, match=name) as error, interpret():
        kernel[(1,)](torch.zeros(32, 64), num_warps=4, num_ctas=num_ctas)
    assert error.value.kind == "unsupported"
    assert "test_gluon_language.py:" in str(error.value)

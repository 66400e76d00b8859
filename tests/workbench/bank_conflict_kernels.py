"""Write a 32 x 32 tile to shared memory by rows and read it by columns, in four Gluon layouts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _turned(x_ptr, LAYOUT: gl.constexpr, CONFLICTS: gl.constexpr):
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    columns: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    m = gl.arange(0, 32, gl.SliceLayout(1, rows))
    n = gl.arange(0, 32, gl.SliceLayout(0, rows))
    tile = gl.allocate_shared_memory(gl.float32, [32, 32], LAYOUT)
    tile.store(gl.load(x_ptr + m[:, None] * 32 + n[None, :]))  # by rows
    gl.thread_barrier()
    turned = tile.load(columns)  # by columns
    if CONFLICTS is not None:
        gl.static_assert(gl.bank_conflicts(turned.type, tile.type) == CONFLICTS)
    m = gl.arange(0, 32, gl.SliceLayout(1, columns))
    n = gl.arange(0, 32, gl.SliceLayout(0, columns))
    gl.store(x_ptr + n[None, :] * 32 + m[:, None], turned)


def plain(x):
    _turned[(1,)](x, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), 31)


def swizzled(x):
    _turned[(1,)](x, gl.SwizzledSharedLayout(1, 1, 32, [1, 0]), 0)


def partly_swizzled(x):
    _turned[(1,)](x, gl.SwizzledSharedLayout(1, 1, 8, [1, 0]), 3)


def padded(x):
    _turned[(1,)](x, gl.PaddedSharedLayout.with_identity_for([[32, 1]], [32, 32], [1, 0]), None)

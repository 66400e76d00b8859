"""Gluon kernels in the interpreter compute what a GPU does, and count the bytes they move."""

from __future__ import annotations

import sys

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import tilewright
from interpreter import gluon_kernels as kernels
from tilewright.errors import KernelAborted
from tilewright.interpreter import interpret

pytestmark = kernels.NEEDS


@pytest.fixture(autouse=True)
def run():
    with interpret(faults="collect") as run:
        yield run
    assert not run.findings, "\n".join(map(str, run.findings))


def test_elementwise_and_reduction():
    x = torch.randn(1000)
    assert torch.equal(kernels.scale(x, 3.0), 3 * x)
    x = kernels.integers(70, 50, dtype=torch.float32)
    assert torch.equal(kernels.row_sums(x), x.sum(1))


def test_views_of_shared_memory():
    x = torch.randn(64, 32)
    assert torch.equal(kernels.twice_transposed(x), 2 * x.T)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("shape", [(16, 32), (40, 100)], ids=str)
def test_tma_copies_whole_and_boundary_tiles(shape, stages, run):
    x = torch.randn(shape)
    assert torch.equal(kernels.tma_copy(x, stages), x)
    x_desc, y_desc = run.launches[-1].arguments.values()
    assert (x_desc.loaded, y_desc.stored) == (x.nbytes, x.nbytes)  # clipped: no byte outside of the tensor


@pytest.mark.parametrize("form", ["pipelined", "specialized", "ping-pong"])
@pytest.mark.parametrize("sizes", [(64, 64, 32), (128, 192, 160), (200, 136, 104)], ids=str)
def test_matrix_products_are_exact(form, sizes):
    M, N, K = sizes
    a, b = kernels.integers(M, K), kernels.integers(K, N)
    assert torch.equal(kernels.matmul(form, a, b), a @ b)


def test_products_move_each_tile_once_per_use(run):
    a, b = kernels.integers(128, 64), kernels.integers(64, 192)
    kernels.matmul("specialized", a, b)
    traffic = run.launches[-1].arguments
    assert traffic["a_desc"].loaded == 3 * a.nbytes
    assert traffic["b_desc"].loaded == 2 * b.nbytes


def test_audit_and_verifier():
    a, b = kernels.integers(64, 64), kernels.integers(64, 64)
    result = tilewright.audit(lambda a, b: kernels.matmul("ping-pong", a, b), a, b)
    assert not result.findings
    assert result.launches[0].arguments["c_desc"].stored == 64 * 64 * 2


@gluon.jit
def _barrier():
    made = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(made, count=1)
    return made


@gluon.jit
def _waits_for_the_second():
    first, second = _barrier(), _barrier()
    mbarrier.arrive(first, count=1)
    mbarrier.wait(first, 0)
    mbarrier.wait(second, 0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know the columns of a call")
def test_buffers_have_the_names_of_variables():
    with pytest.raises(KernelAborted, match="for phase 0 of `second`"):
        _waits_for_the_second[(1,)](num_warps=4)

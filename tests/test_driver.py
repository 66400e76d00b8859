"""The driver that stands in for a GPU: what host code asks of it, and that it is gone afterwards."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

import tilewright
from tilewright import registry
from tilewright.driver import StandIn, stand_in
from tilewright.errors import NoGPU
from tilewright.hardware import DATASHEETS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the driver stands in where there is no GPU")
MODULE = """
import torch, triton, triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()
SMS = triton.runtime.driver.active.utils.get_device_properties(
    triton.runtime.driver.active.get_current_device())["multiprocessor_count"]
HOPPER = torch.cuda.get_device_capability()[0] == 9

@triton.jit
def _double(x, y, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offs, 2 * tl.load(x + offs, mask=offs < N), mask=offs < N)

def double(x):
    y = torch.empty_like(x, device=DEVICE)
    _double[(min(SMS, triton.cdiv(x.numel(), 64)),)](x, y, x.numel(), BLOCK=64)
    return y
"""


@triton.jit
def _normalize(x, y, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    v = tl.load(x + offs, mask=offs < N)
    tl.store(y + offs, v / tl.sum(v, 0), mask=offs < N)


@pytest.fixture(autouse=True)
def interpreter():
    """Override the fixture of the suite, which makes the driver active."""


def test_a_file_may_ask_the_driver_when_it_is_imported(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MODULE)
    double = registry.launcher(file, "double")
    x = torch.randn(100)
    assert torch.equal(tilewright.audit(double, x).result, 2 * x)
    assert double.__globals__["SMS"] == DATASHEETS["h200"].sms
    assert double.__globals__["HOPPER"]


def test_the_driver_is_active_inside_the_context_only():
    with stand_in():
        active = driver.active
        assert isinstance(active, StandIn)
        assert torch.empty(1).device == active.get_active_torch_device()
        assert not torch.cuda.is_available()
        with tilewright.interpret():
            assert driver.active is active
        assert driver.active is active
    assert driver._active is None
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.get_device_properties(0)


def _on_its_device(x):
    assert x.is_cuda
    y = torch.empty_like(x, device="cuda")
    with torch.cuda.device(x.device), torch.cuda.device(x.device.index):
        torch.cuda.set_device(x.device)
        assert torch.cuda.current_device() == 0
        _normalize[(1,)](x.cuda(), y, x.numel(), BLOCK=128)
    torch.cuda.synchronize()
    return y


def test_host_code_selects_a_device_and_names_it_cuda():
    x = torch.rand(100)
    audit = tilewright.audit(_on_its_device, x)
    torch.testing.assert_close(audit.result, x / x.sum())
    assert not audit.findings


def test_a_benchmark_says_that_it_needs_a_gpu():
    with stand_in(), pytest.raises(NoGPU, match="a benchmark needs a GPU"):
        triton.testing.do_bench(lambda: None)


@pytest.mark.slow
def test_a_warmup_compiles_and_its_kernel_launches():
    x, y = torch.rand(1000), torch.zeros(1000)
    with tilewright.interpret() as run:
        kernel = _normalize.warmup(x, y, 1000, BLOCK=32768, num_warps=4, grid=(1,))
        kernel._init_handles()
        assert kernel.n_regs == 255  # a row of 32768 elements in 128 threads
        assert kernel.n_spills > 0
        assert kernel.metadata.shared > 0
        kernel[(1, 1, 1)](x, y, 1000, 32768)
    torch.testing.assert_close(y, x / x.sum())
    assert run.launches[0].meta["num_warps"] == 4


@pytest.mark.slow
def test_a_launch_returns_a_kernel_that_is_compiled_when_asked():
    x, y = torch.rand(100), torch.zeros(100)
    with tilewright.interpret():
        kernel = _normalize[(1,)](x, y, 100, BLOCK=128)
        assert ".visible .entry _normalize" in kernel.asm["ptx"]

"""Arguments of CUDA C++ launches, recorded by a fake driver."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.runtime import cuda as _cuda

pytest.importorskip("cuda.core")
from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

STREAM, OTHER_STREAM, KERNEL = 0x5500, 0x6600, 0x7700


@pytest.fixture
def launched(monkeypatch):
    """Every launch: its configuration and the 8 bytes of each parameter at that time."""
    seen = []

    def launch(config, kernel, params, _):
        slots = (ctypes.c_void_p * 4).from_address(params)
        seen.append((config, int(kernel), [ctypes.string_at(slot, 8) for slot in slots]))
        return (driver.CUresult.CUDA_SUCCESS,)

    here = SimpleNamespace(set_current=lambda: None)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch)
    monkeypatch.setattr(_cuda, "_core", lambda: SimpleNamespace(Device=lambda _: here))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    return seen


def prepared(cluster: int = 1) -> _cuda.CudaLaunch:
    source: Any = SimpleNamespace(_kernel=lambda *_: SimpleNamespace(handle=KERNEL))
    return _cuda.CudaLaunch(source, "f", torch.float32, 0, (3, 2), 128, (-7, 0.5), 16, cluster)


def parameters(*tensors) -> list[bytes]:
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    return [*(p.to_bytes(8, "little") for p in pointers), (-7).to_bytes(8, "little", signed=True)]


@pytest.mark.parametrize("cluster", [1, 4])
def test_the_driver_gets_the_whole_launch(cluster, launched):
    x = torch.ones(1)
    prepared(cluster)(x, None)
    ((config, kernel, given),) = launched
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3 * cluster, 2, 1), "the grid counts clusters"
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream), kernel) == (16, STREAM, KERNEL)
    sizes = [(a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z) for a in config.attrs]
    assert sizes == ([(4, 1, 1)] if cluster > 1 else [])
    assert given[:3] == parameters(x, None)
    assert ctypes.c_float.from_buffer_copy(given[3]).value == 0.5


def test_each_call_passes_its_own_tensors(launched):
    one, (x, y) = prepared(), torch.ones(2, 1).unbind()
    one(x, y)
    one(y, None)
    assert [given[:3] for *_, given in launched] == [parameters(x, y), parameters(y, None)]
    assert launched[0][0] is launched[1][0], "the configuration is reused"


def test_each_stream_and_thread_has_its_own_parameters(launched, monkeypatch):
    """A thread may write its parameters while the driver reads those of another."""
    one, x = prepared(), torch.ones(1)
    one(x, x)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(one, x, x).result()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: OTHER_STREAM, raising=False)
    one(x, x)
    assert [int(config.hStream) for config, *_ in launched] == [STREAM, STREAM, OTHER_STREAM]
    assert len({id(config) for config, *_ in launched}) == 3


def test_a_rejected_launch_raises(launched, monkeypatch):
    refused = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *_: (refused,))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        prepared()(torch.ones(1), None)

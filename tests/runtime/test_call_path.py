"""A warm call passes few functions of ours: the host time of a small call is mostly function calls."""

import sys
from pathlib import Path

import pytest
import torch

import tilewright as tw
from tilewright import runtime
from tilewright.hardware import datasheet
from tilewright.runtime.cuda import CudaLaunch
from tilewright.runtime.launch import PreparedLaunch
from tilewright.workbench.inspect.fake_gpu import fake_gpu

PACKAGE = Path(runtime.__file__).parent.parent
COUNTED = tuple(str(PACKAGE / folder) for folder in ("ops", "runtime"))
MAX_FUNCTIONS = 4

CALLS = {
    "softmax": lambda x, w: tw.softmax(x, -1),
    "log_softmax": lambda x, w: tw.log_softmax(x, -1),
    "rms_norm": lambda x, w: tw.rms_norm(x, x.shape[-1:], w),
    "layer_norm": lambda x, w: tw.layer_norm(x, x.shape[-1:], w, w),
    "silu": lambda x, w: tw.silu(x),
    "silu with bias": lambda x, w: tw.silu(x, bias=w),
    "gelu": lambda x, w: tw.gelu(x),
    "relu_squared": lambda x, w: tw.relu_squared(x),
    "swiglu": lambda x, w: tw.swiglu(x, x),
    "packed swiglu": lambda x, w: tw.swiglu(x),
    "geglu": lambda x, w: tw.geglu(x, x),
    "sum": lambda x, w: tw.sum(x, -1),
    "mean": lambda x, w: tw.mean(x, (1,)),
    "amax": lambda x, w: tw.amax(x, -1),
    "argmax": lambda x, w: tw.argmax(x, -1),
    "logsumexp": lambda x, w: tw.logsumexp(x, -1),
    "var": lambda x, w: tw.var(x, -1),
    "cumsum": lambda x, w: tw.cumsum(x, -1),
}


@pytest.fixture
def launches_do_nothing(monkeypatch):
    """The second call on the fake GPU is a warm one, whose kernel is compiled and bound to the stream."""

    def compile(launch, *_):
        launch._run = lambda *_: None

    monkeypatch.setattr(PreparedLaunch, "_first_launch", compile)
    monkeypatch.setattr(CudaLaunch, "_bind", lambda launch, stream, tensors: lambda _: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", torch.cuda.current_device, raising=False)


def functions_called(call) -> list[str]:
    """Return the functions of ours that a call passes."""
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(COUNTED):
            called.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_passes_at_most_four_functions(name, launches_do_nothing, monkeypatch):
    with fake_gpu(datasheet("h200")) as device:
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device.index, raising=False)
        x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
        w = torch.empty(4096, dtype=torch.bfloat16, device="cuda")
        CALLS[name](x, w)
        called = functions_called(lambda: CALLS[name](x, w))
    assert called[-1].endswith("__call__"), "the last one is the launch"
    assert len(called) <= MAX_FUNCTIONS, called

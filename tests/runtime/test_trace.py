"""`tilewright.trace` lists each public call with the kernel that ran, or why torch was called."""

import cProfile
import sys

import pytest
import torch
from torch.autograd import forward_ad

import tilewright as tw
from tilewright.hardware import datasheet
from tilewright.runtime.cuda import CudaLaunch
from tilewright.runtime.eligibility import eligible, why_not_eligible
from tilewright.runtime.launch import PreparedLaunch
from tilewright.workbench.inspect.fake_gpu import fake_gpu

softmax = tw.softmax  # bound before the trace


@pytest.fixture(autouse=True)
def interpreter():
    """Off, unless a test opens it: CPU tensors go to torch."""


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(PreparedLaunch, "_first_launch", lambda *_: None)
    monkeypatch.setattr(CudaLaunch, "_bind", lambda launch, stream, tensors: lambda _: None)
    with fake_gpu(datasheet("h200")) as device:
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device.index, raising=False)
        yield lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="cuda")


def test_kernels_and_reasons(gpu):
    with tw.trace() as calls:
        softmax(gpu(4096, 4096), -1)
        softmax(gpu(64, 64), -1)
        tw.relu(gpu(2**24))
        tw.rms_norm(gpu(4096, 4096), (4096,), gpu(4096))
        tw.softmax(gpu(4096, 4096, dtype=torch.float64), -1)
        tw.cross_entropy(gpu(64, 64), gpu(64, dtype=torch.int64))
        tw.scaled_dot_product_attention(*[gpu(1, 2, 64, 64)] * 3)
    assert sys.getprofile() is None
    assert [str(call) for call in calls] == [
        "softmax(bfloat16 [4096, 4096]): _tile_fwd",
        "softmax(bfloat16 [64, 64]): torch: 4096 elements, and our kernel is faster from 2097152 on h200",
        "relu(bfloat16 [16777216]): torch: torch is as fast on h200 at every size",
        "rms_norm(bfloat16 [4096, 4096], bfloat16 [4096]): norm_fwd<T, T, 4, true, false>",
        "softmax(float64 [4096, 4096]): torch: the dtype is float64",
        "cross_entropy(bfloat16 [64, 64], int64 [64]): "
        "torch: 4096 logits, and our kernel is faster from 8388608 on h200",
        "scaled_dot_product_attention(bfloat16 [1, 2, 64, 64], bfloat16 [1, 2, 64, 64], bfloat16 [1, 2, 64, 64]): "
        "torch: torch is as fast on h200 at every size",
    ]


def test_nested_contexts_list_their_calls(gpu):
    with tw.trace() as outer, cProfile.Profile(), tw.trace() as inner:
        tw.softmax(gpu(64, 64), -1)
    assert len(inner) == 1
    with tw.trace() as outer:
        with tw.trace() as inner:
            tw.softmax(gpu(64, 64), -1)
        tw.relu(gpu(64))
    assert [call.name for call in inner] == ["softmax"]
    assert [call.name for call in outer] == ["softmax", "relu"]


def test_calls_inside_a_call_are_not_listed(gpu):
    with tw.trace() as calls:
        tw.max(gpu(4096, 4096))
    assert [call.name for call in calls] == ["max"]
    assert len(calls[0].kernels) == 2, "a split reduction"
    tw.softmax(gpu(64, 64), -1)
    assert len(calls) == 1, "the context is closed"


def test_cpu_tensors_and_errors():
    with tw.trace() as calls:
        tw.softmax(torch.randn(3, 5), -1)
        with pytest.raises(IndexError):
            tw.softmax(torch.randn(3, 5), 7)
        tw.linear(torch.randn(3, 5), torch.randn(2, 5), activation="relu")
    assert [call.reason for call in calls] == ["the tensor is on cpu"] * 3
    with tw.trace() as calls, tw.interpret():
        tw.swiglu(torch.randn(3, 5), torch.randn(3, 5))
    assert calls[0].kernels == ["_gated_fwd"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_reason_is_given_exactly_where_a_tensor_is_not_eligible():
    class Mine(torch.Tensor):
        pass

    def agree(*tensors):
        reason = why_not_eligible(*tensors)
        assert eligible(*tensors) == (reason is None), reason
        return reason

    x = torch.randn(3, 4)
    assert agree(x) == "the tensor is on cpu"
    with tw.interpret():
        assert agree(x) is None
        assert agree(x, x) is None
        reasons = [agree(x, x.half()), agree(x, x.to("meta")), agree(x.int()), agree(3.0), agree(x.as_subclass(Mine))]
        reasons += [agree(x.to_sparse()), agree(torch.nested.nested_tensor([x]))]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reasons.append(agree(x))
        with forward_ad.dual_level():
            reasons.append(agree(x))
        torch.func.vmap(lambda row: reasons.append(agree(row)) or row)(x)
    assert None not in reasons
    assert len(set(reasons)) == len(reasons) - 1, "sparse and nested tensors share theirs"

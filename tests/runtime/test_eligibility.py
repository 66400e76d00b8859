"""What may leave torch's own path, and what only torch can do."""

import pytest
import torch
from torch.autograd import forward_ad

import tilewright as tw
from support import Listening
from tilewright.ops.activation import silu
from tilewright.ops.norm import rms_norm
from tilewright.ops.reduce import cumsum
from tilewright.ops.reduce import sum as sum_module
from tilewright.ops.softmax import softmax
from tilewright.runtime.eligibility import has_elements, is_quiet, is_ready, eligible
from tilewright.worker.memory import guard_allocations


@pytest.fixture
def x(device):
    return torch.randn(3, 4, device=device)


def test_plain_floats_of_one_kind_run_here(x):
    assert eligible(x)
    assert eligible(x, torch.nn.Parameter(x), x.t())
    assert eligible(x.bfloat16())


def test_other_dtypes_and_layouts_go_to_torch(x):
    assert not eligible(x.double())
    assert not eligible(x.int())
    assert not eligible(x, x.half())
    assert not eligible(x.to_sparse())
    assert not eligible(x.to("meta"))


def test_subclasses_go_to_torch(x):
    class Mine(torch.Tensor):
        pass

    assert not eligible(x.as_subclass(Mine))


def test_autocast_goes_to_torch(x, device):
    with torch.autocast(device, dtype=torch.bfloat16):
        assert not eligible(x)
    assert eligible(x)


def test_transforms_go_to_torch(x):
    seen = []
    torch.func.vmap(lambda row: seen.append(eligible(row)) or row)(x)
    torch.func.jvp(lambda v: seen.append(eligible(v)) or v, (x,), (x,))
    with forward_ad.dual_level():
        seen.append(eligible(forward_ad.make_dual(x, x)))
    assert seen == [False, False, False]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_need_no_thought(x):
    assert is_ready(x)
    assert is_ready(x.int())  # dtypes are settled elsewhere
    parameter = torch.nn.Parameter(x)
    assert not is_ready(parameter)
    with torch.no_grad():
        assert is_ready(parameter)
    for other in (x.t(), x[:, 1:], x.flatten()[1:], x.to_sparse(), x.to("meta"), torch.nested.nested_tensor([x]), 3.0):
        assert not is_ready(other)


def test_calls_that_need_no_thought(x, device):
    assert is_quiet()
    seen = []
    with torch.autocast(device, dtype=torch.bfloat16):
        seen.append(is_quiet())
    with Listening():
        seen.append(is_quiet())
    with forward_ad.dual_level():
        seen.append(is_quiet())
    torch.func.vmap(lambda row: seen.append(is_quiet()) or row)(x)
    assert seen == [False] * 4
    compiled = torch.compile(lambda v: v + is_quiet(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x)


def test_elements_of_a_type_and_a_dimension(x):
    assert has_elements((2, 3), torch.float16, -2)
    assert not has_elements((2, 3), torch.float16, 2)
    assert not has_elements((2, 0), torch.float16, 0)
    assert not has_elements((), torch.float16, -1)
    assert not has_elements((2, 3), torch.float64, 0)


CALLS = {
    softmax: lambda x: tw.softmax(x, -1),
    sum_module: lambda x: tw.sum(x, -1),
    cumsum: lambda x: tw.cumsum(x, -1),
    silu: lambda x: tw.silu(x),
    rms_norm: lambda x: tw.rms_norm(x, x.shape[-1:]),
}
TORCHS = {
    softmax: lambda x: torch.softmax(x, -1),
    sum_module: lambda x: torch.sum(x, -1),
    cumsum: lambda x: torch.cumsum(x, -1),
    silu: torch.nn.functional.silu,
    rms_norm: lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]),
}


@pytest.mark.parametrize("module", CALLS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_what_was_settled_once_is_settled_for_its_like_alone(x, module, monkeypatch):
    monkeypatch.setattr(module, "SMALLEST", 0)
    mine, theirs = CALLS[module], TORCHS[module]
    for other in (x, x + 1, x.half(), x.double(), x.t(), x[:0], x.flatten(), x.flatten()[1:], x[None]):
        torch.testing.assert_close(mine(other), theirs(other))
    x.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(mine(x).sum(), x), torch.autograd.grad(theirs(x).sum(), x))
    with torch.no_grad():
        assert not mine(x).requires_grad


@pytest.mark.parametrize("module", CALLS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_what_was_settled_while_memory_was_watched_does_not_go_on_watching(device, module, monkeypatch):
    monkeypatch.setattr(module, "SMALLEST", 0)
    odd = torch.randn(5, 23, device=device)  # of a shape that nobody has settled yet
    call = CALLS[module]
    with guard_allocations() as guards:
        call(odd)
    kept = len(guards._made)
    assert kept
    call(odd)
    assert len(guards._made) == kept

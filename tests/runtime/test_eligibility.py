"""Which calls our kernels take, and which go to torch."""

import math

import pytest
import torch
from torch.autograd import forward_ad

import tilewright as tw
from support import DispatchLog, crossover_at
from tilewright.ops.activation import silu
from tilewright.ops.norm import rms_norm
from tilewright.ops.reduce import cumsum
from tilewright.ops.reduce import sum as sum_module
from tilewright.ops.softmax import softmax
from tilewright.runtime import crossovers
from tilewright.runtime.crossovers import Crossover
from tilewright.runtime.eligibility import Dispatch, eligible, has_elements
from tilewright.worker.memory import guard_allocations


@pytest.fixture
def x(device):
    return torch.randn(3, 4, device=device)


def test_floats_of_one_dtype_are_eligible(x):
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


@pytest.fixture
def dispatch():
    """A Dispatch that returns the path it took: the cached plan or the checked call."""
    return Dispatch(lambda options, *keys: lambda *tensors: ("plan", options, keys), lambda *args: "call")


ALWAYS = crossover_at(0)


def path(taken) -> str | None:
    return taken[0] if isinstance(taken, tuple) else taken


def test_small_inputs_and_other_types_go_to_torch(dispatch, x):
    assert dispatch(crossover_at(13), None, x) is None
    assert path(dispatch(crossover_at(12), None, x)) == "plan"
    assert dispatch(ALWAYS, None, 3.0) is None


@pytest.mark.parametrize("mode", ["captured", "compiled"])
def test_calls_without_host_time_have_a_crossover_of_their_own(mode, dispatch, x, monkeypatch):
    device, is_captured = x.get_device(), mode == "captured"
    monkeypatch.setattr(crossovers, "HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)

    def runs_ours(crossover):
        decide = lambda v: v * 0 + (dispatch(crossover, None, v) is not None) * 2 + crossover.reached(v.numel(), device)
        torch._dynamo.reset()
        decided = decide(x) if is_captured else torch.compile(decide, fullgraph=True, backend="eager")(x)
        assert decided.max() in (0, 3), "both ways of asking agree"
        return bool(decided.any())

    assert not runs_ours(crossover_at(13)), "the size of eager mode until another is known"
    for eager in (0, 13, math.inf):
        crossover = Crossover("test without host time", lambda gpu, eager=eager: eager)
        for size in (0, 12, 13, math.inf):
            monkeypatch.setitem(crossover.captured, device, size)
            assert runs_ours(crossover) == (size <= 12), "device time alone decides"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert dispatch(crossover, None, x) is None, "in eager mode host time counts"


def test_a_plan_is_found_by_options_shape_dtype_and_device(dispatch, x):
    key = (x.shape, x.dtype, x.get_device())
    assert dispatch(ALWAYS, "options", x, None, x.int()) == (
        "plan",
        "options",
        (key, None, (x.shape, torch.int32, key[2])),
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_only_contiguous_aligned_tensors_without_autograd_use_a_plan(dispatch, x):
    others = [x.t(), x[:, 1:], x.flatten()[1:], x.to_sparse(), x.to("meta"), torch.nested.nested_tensor([x])]
    parameter = torch.nn.Parameter(x)
    for other in (*others, parameter):
        assert path(dispatch(ALWAYS, None, other)) == "call"
        assert path(dispatch(ALWAYS, None, x, other)) == "call"
    with torch.no_grad():
        assert path(dispatch(ALWAYS, None, parameter)) == "plan"


def test_observed_and_transformed_calls_use_no_plan(dispatch, x, device):
    taken = []
    with torch.autocast(device, dtype=torch.bfloat16):
        taken.append(path(dispatch(ALWAYS, None, x)))
    with DispatchLog():
        taken.append(path(dispatch(ALWAYS, None, x)))
    with forward_ad.dual_level():
        taken.append(path(dispatch(ALWAYS, None, x)))
    torch.func.vmap(lambda row: taken.append(path(dispatch(ALWAYS, None, row))) or row)(x)
    assert taken == ["call"] * 4
    compiled = torch.compile(lambda v: v + (path(dispatch(ALWAYS, None, v)) == "plan"), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x)


def test_a_plan_may_leave_the_call_to_torch(x):
    assert Dispatch(lambda *_: None, lambda *_: "call")(ALWAYS, None, x) is None


def test_has_elements_checks_shape_dtype_and_dimension():
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
REFERENCES = {
    softmax: lambda x: torch.softmax(x, -1),
    sum_module: lambda x: torch.sum(x, -1),
    cumsum: lambda x: torch.cumsum(x, -1),
    silu: torch.nn.functional.silu,
    rms_norm: lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]),
}


@pytest.mark.parametrize("module", CALLS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_a_cached_plan_is_used_for_equal_keys_only(x, module, monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))
    ours, theirs = CALLS[module], REFERENCES[module]
    for other in (x, x + 1, x.half(), x.double(), x.t(), x[:0], x.flatten(), x.flatten()[1:], x[None]):
        torch.testing.assert_close(ours(other), theirs(other))
    x.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(ours(x).sum(), x), torch.autograd.grad(theirs(x).sum(), x))
    with torch.no_grad():
        assert not ours(x).requires_grad


@pytest.mark.parametrize("module", CALLS, ids=lambda m: m.__name__.rpartition(".")[2])
def test_a_plan_made_under_guarded_allocations_does_not_keep_them(device, module, monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))
    odd = torch.randn(5, 23, device=device)  # a shape without a cached plan
    call = CALLS[module]
    with guard_allocations() as guards:
        call(odd)
    kept = len(guards._allocations)
    assert kept
    call(odd)
    assert len(guards._allocations) == kept

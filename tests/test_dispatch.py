"""What may leave torch's own path, and what only torch can do."""

import pytest
import torch
from torch.autograd import forward_ad

from tilewright.ops._dispatch import runs_here


@pytest.fixture
def x(device):
    return torch.randn(3, 4, device=device)


def test_plain_floats_of_one_kind_run_here(x):
    assert runs_here(x)
    assert runs_here(x, torch.nn.Parameter(x), x.t())
    assert runs_here(x.bfloat16())


def test_other_dtypes_and_layouts_go_to_torch(x):
    assert not runs_here(x.double())
    assert not runs_here(x.int())
    assert not runs_here(x, x.half())
    assert not runs_here(x.to_sparse())
    assert not runs_here(x.to("meta"))


def test_subclasses_go_to_torch(x):
    class Mine(torch.Tensor):
        pass

    assert not runs_here(x.as_subclass(Mine))


def test_autocast_goes_to_torch(x, device):
    with torch.autocast(device, dtype=torch.bfloat16):
        assert not runs_here(x)
    assert runs_here(x)


def test_transforms_go_to_torch(x):
    seen = []
    torch.func.vmap(lambda row: seen.append(runs_here(row)) or row)(x)
    torch.func.jvp(lambda v: seen.append(runs_here(v)) or v, (x,), (x,))
    with forward_ad.dual_level():
        seen.append(runs_here(forward_ad.make_dual(x, x)))
    assert seen == [False, False, False]

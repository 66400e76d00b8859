"""References that hold tensors of their own."""

import functools

import pytest
import torch
from torch import nn

import tilewright as tw
from tilewright.captured import Portable, portable
from tilewright.testing import assert_kernel

WEIGHT = torch.linspace(-1, 1, 40)
TABLES = {"scale": [torch.full((40,), 3.0)]}


def reads_a_global(x):
    return x * WEIGHT


def calls_another(x):
    return reads_a_global(x) + TABLES["scale"][0]


def closes_over(weight):
    return lambda x: torch.nn.functional.linear(x, weight)


class Scaled:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x * self.weight

    def method(self, x):
        return x * self.weight


class WithAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(40, 30)
        self.offset = torch.ones(30)  # neither a parameter nor a buffer

    def forward(self, x):
        return self.linear(x) + self.offset


REFERENCES = {
    "module": nn.Linear(40, 30),
    "module with a plain tensor": WithAttribute(),
    "closure": closes_over(torch.randn(30, 40)),
    "global": reads_a_global,
    "global of a function it calls": calls_another,
    "partial": functools.partial(torch.mul, torch.randn(40)),
    "object": Scaled(torch.randn(40)),
    "method": Scaled(torch.randn(40)).method,
}


@pytest.mark.parametrize("name", REFERENCES)
def test_tensors_follow_the_arguments(name):
    reference = REFERENCES[name]
    x = torch.randn(5, 40)
    moved = portable(reference)
    assert isinstance(moved, Portable)
    assert moved(x.to("meta")).device.type == "meta"
    wide = moved(x.double())
    assert wide.dtype == torch.float64
    assert not wide.requires_grad
    torch.testing.assert_close(moved(x), reference(x))
    torch.testing.assert_close(wide.float(), reference(x))


def test_a_reference_without_tensors_is_left_alone():
    plain = lambda x, n=(1, 2): x.sum(n)
    for fn in (plain, torch.softmax, functools.partial(torch.softmax, dim=-1), Scaled(3.0)):
        assert portable(fn) is fn


@pytest.mark.parametrize("name", ["module", "closure", "global of a function it calls"])
def test_assert_kernel_and_benchmark_take_such_references(name):
    reference = REFERENCES[name]
    x = torch.randn(7, 40)
    assert_kernel(lambda x: reference(x), reference=reference, inputs=(x,), depth="quick")
    with pytest.raises(AssertionError, match="elements are off"):
        assert_kernel(lambda x: reference(x) * 1.001, reference=reference, inputs=(x,), depth="quick")
    found = tw.benchmark(lambda x: reference(x) * 1.001, x, against=reference, samples=6)
    assert [entry.verdict for entry in found.entries] == ["wrong", "right"]


def test_inputs_keep_a_dtype_of_their_own():
    """A float32 input beside bfloat16 ones is not rounded to bfloat16, so that a kernel must not round it either."""
    example = (torch.randn(6, 50).bfloat16(), torch.randn(6, 50))
    with pytest.raises(AssertionError, match="elements are off"):
        assert_kernel(lambda x, y: x + y.bfloat16().float(), reference=torch.add, inputs=example, depth="quick")

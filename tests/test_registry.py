"""The function of a user's file that `audit`, `inspect` and `explain` call."""

import inspect

import pytest
import torch

from tilewright import registry
from tilewright.errors import AmbiguousFunction, UnknownFunction

FILE = """
import torch
import triton

@triton.jit
def kernel(x_ptr):
    pass

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, times=1):
        return 2 * times * x

op = Double.apply

def _private(x):
    return x + 1
"""


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "mine.py"

    def launcher(name, more=""):
        path.write_text(FILE + more)
        return registry.launcher(path, name)

    return launcher


@pytest.mark.parametrize(("name", "expected"), [("_private", 2.0), ("op", 2.0), ("Double.apply", 2.0)])
def test_a_named_function_may_be_private_or_an_alias(load, name, expected):
    found = load(name)
    assert found(torch.ones(1)).item() == expected
    assert found.__name__ == name, "records and other processes find it by this name"


def test_an_alias_has_the_signature_of_forward(load):
    assert [*inspect.signature(load("op")).parameters] == ["x", "times"]


@pytest.mark.parametrize("name", ["kernel", "Double", "none", "Double.none"])
def test_what_cannot_be_called_is_unknown(load, name):
    with pytest.raises(UnknownFunction, match="has no function named"):
        load(name)


def test_the_only_candidate_needs_no_name(load):
    assert load(None).__name__ == "op"
    assert load(None, "\ndel op\n\ndef _launch(x):\n    kernel[(1,)](x)\n").__name__ == "_launch"
    with pytest.raises(AmbiguousFunction, match="choose one of launch, op"):
        load(None, "\ndef launch(x):\n    kernel[(1,)](x)\n")


def test_a_file_edited_within_a_second_is_read_again(load):
    assert load("_private", "\nlast = 1\n").__globals__["last"] == 1
    assert load("_private", "\nlast = 2\n").__globals__["last"] == 2


def test_a_file_does_not_inherit_postponed_annotations(load):
    found = load("_annotated", "\ndef _annotated(x: torch.Tensor):\n    return x\n")
    assert found.__annotations__ == {"x": torch.Tensor}

"""Arguments in command-line syntax."""

import pytest
import torch

from tilewright.errors import BadInput
from tilewright.inputs import TensorInput, parse_input


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("None", None),
        ("true", True),
        ("False", False),
        ("7", 7),
        ("-1", -1),
        ("1e-6", 1e-6),
        ("gelu", "gelu"),
        ("'64x8'", "64x8"),
        ("(1000,)", (1000,)),
        ("[1, 'a', None]", [1, "a", None]),
        ("64x1000:bf16", TensorInput((64, 1000), torch.bfloat16)),
        ("64x1000", TensorInput((64, 1000), torch.float32)),
        ("8:int64", TensorInput((8,), torch.int64)),
    ],
)
def test_values_and_tensors(text, value):
    assert parse_input(text) == value
    assert type(parse_input(text)) is type(value)


@pytest.mark.parametrize("text", ["", "3xb", "3x4:bf17", "-3x4", "(1,", "{1: 2}", "a b"])
def test_anything_else_is_refused_in_one_line(text):
    with pytest.raises(BadInput, match="write a tensor as"):
        parse_input(text)


def test_integers_and_booleans_are_drawn_too():
    generator = torch.Generator().manual_seed(0)
    assert set(parse_input("1000:int32").draw(generator).tolist()) == set(range(10))
    assert set(parse_input("1000:bool").draw(generator).tolist()) == {False, True}

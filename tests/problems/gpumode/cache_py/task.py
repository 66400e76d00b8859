from typing import TypedDict, TypeVar

import torch

input_t = TypeVar("input_t", bound=tuple)
output_t = TypeVar("output_t", bound=torch.Tensor)


class TestSpec(TypedDict):
    bs: int
    sk: int
    dim: int
    seed: int

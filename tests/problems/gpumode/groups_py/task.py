from typing import TypedDict, TypeVar

import torch

input_t = TypeVar("input_t", bound=tuple[list, list])
output_t = TypeVar("output_t", bound=list[torch.Tensor])


class TestSpec(TypedDict):
    m: list[int]
    n: list[int]
    k: list[int]
    g: int
    seed: int

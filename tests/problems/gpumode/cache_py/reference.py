from dataclasses import dataclass

import torch
from task import input_t, output_t
from torch import nn
from utils import make_match_reference


@dataclass
class Config:
    bs: int
    sk: int
    dim: int
    max_seq_len: int = 64


class Cache(nn.Module):
    def __init__(self, shape: tuple, filled: int):
        super().__init__()
        self.register_buffer("data", torch.zeros(shape))
        self.filled = filled

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        self.data[:, self.filled] = row
        self.filled += 1
        return self.data[:, : self.filled]


def generate_input(bs: int, sk: int, dim: int, seed: int) -> input_t:
    config = Config(bs, sk, dim)
    gen = torch.Generator()
    gen.manual_seed(seed)
    x = torch.randn((bs, dim), generator=gen)
    cache = Cache((bs, config.max_seq_len, dim), sk)
    cache.data[:, :sk] = torch.randn((bs, sk, dim), generator=gen)
    return config, x, cache


def ref_kernel(data: input_t) -> output_t:
    config, x, cache = data
    keys = cache(x)
    weights = torch.softmax(torch.einsum("bd,bsd->bs", x, keys) / config.dim**0.5, -1)
    return torch.einsum("bs,bsd->bd", weights, keys)


check_implementation = make_match_reference(ref_kernel, rtol=2e-02, atol=1e-03)

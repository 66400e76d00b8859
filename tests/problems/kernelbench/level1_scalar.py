import torch
import torch.nn as nn


class Model(nn.Module):
    """A matrix times a Python float: an input that is not a tensor."""

    def forward(self, A: torch.Tensor, s: float) -> torch.Tensor:
        return A * s


M = 16 * 4
N = 24 * 4


def get_inputs():
    A = torch.rand(M, N)
    s = 3.14
    return [A, s]


def get_init_inputs():
    return []

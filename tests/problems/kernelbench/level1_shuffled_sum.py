import torch
import torch.nn as nn


class Model(nn.Module):
    """A sum in random order: like a sum by atomics, it differs between two calls by rounding alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(x.shape[1])
        total = torch.zeros_like(x[:, 0])
        for column in x[:, order].unbind(1):
            total = total + column
        return total


batch_size = 16
dim = 256


def get_inputs():
    return [torch.rand(batch_size, dim)]


def get_init_inputs():
    return []

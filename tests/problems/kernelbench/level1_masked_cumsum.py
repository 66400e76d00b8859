import torch
import torch.nn as nn


class Model(nn.Module):
    """Cumulative sum under a bool mask; forward reads a global of this module."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x, mask):
        return torch.cumsum(x * mask, dim=self.dim).narrow(dim, 0, x.size(dim))


batch_size = 16
input_shape = (300,)
dim = 1


def get_inputs():
    x = torch.rand(batch_size, *input_shape)
    mask = torch.randint(0, 2, x.shape).bool()
    return [x, mask]


def get_init_inputs():
    return [dim]

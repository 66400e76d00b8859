import torch
import torch.nn as nn


class Model(nn.Module):
    """Average pooling; its init inputs are positional ones and a dict of the named ones, as KernelBook has them."""

    def __init__(self, kernel_size, stride=1, padding=0):
        super().__init__()
        self.pool = nn.AvgPool1d(kernel_size, stride=stride, padding=padding)

    def forward(self, x):
        return self.pool(x)


def get_inputs():
    return [torch.rand([4, 4, 64])]


def get_init_inputs():
    return [[], {"kernel_size": 4, "stride": 2, "padding": 1}]

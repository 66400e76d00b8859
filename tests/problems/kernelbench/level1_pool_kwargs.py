import torch
import torch.nn as nn


class Model(nn.Module):
    """Average pooling; its constructor arguments are a list and a dict, as in KernelBook."""

    def __init__(self, kernel_size, stride=1, padding=0):
        super().__init__()
        self.pool = nn.AvgPool1d(kernel_size, stride=stride, padding=padding)

    def forward(self, x):
        return self.pool(x)


def get_inputs():
    return [torch.rand([4, 4, 64])]


def get_init_inputs():
    return [[], {"kernel_size": 4, "stride": 2, "padding": 1}]

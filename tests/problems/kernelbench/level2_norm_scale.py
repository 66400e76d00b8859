import torch
import torch.nn as nn


class Model(nn.Module):
    """Batch norm in training mode, a learned scale, and a constant shift in a buffer."""

    def __init__(self, num_features: int, scale_shape: tuple):
        super().__init__()
        self.bn = nn.BatchNorm1d(num_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, num_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(x) * self.scale + self.shift


batch_size = 48
num_features = 40
scale_shape = (num_features,)


def get_inputs():
    return [torch.rand(batch_size, num_features)]


def get_init_inputs():
    return [num_features, scale_shape]

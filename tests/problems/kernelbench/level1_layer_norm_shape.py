import torch
import torch.nn as nn


class Model(nn.Module):
    """Layer norm over a shape, which is a tuple among the init inputs."""

    def __init__(self, normalized_shape: tuple, eps: float = 1e-5, affine: bool = True):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape, eps=eps, elementwise_affine=affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln(x)


batch_size = 6
features = 8
dim1 = 12


def get_inputs():
    return [torch.rand(batch_size, features, dim1)]


def get_init_inputs():
    return [(features, dim1), 1e-4, True]

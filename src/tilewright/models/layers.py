"""Layers without state for Hugging Face's `kernels`, which puts their forward functions into a model's own modules.

Each reads the attributes of the module that it replaces. `kernels` allows them no constructor and no other members.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewright.ops.activation.gelu import gelu
from tilewright.ops.activation.silu import silu
from tilewright.ops.activation.swiglu import swiglu
from tilewright.ops.norm.layer_norm import layer_norm
from tilewright.ops.norm.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Compute what LlamaRMSNorm does."""

    has_backward = True
    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon)


class LayerNorm(nn.Module):
    """Compute what torch.nn.LayerNorm does, over the last dimension or several."""

    has_backward = True
    can_torch_compile = True
    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class SwiGLUMLP(nn.Module):
    """Compute what LlamaMLP does with silu."""

    has_backward = True
    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class SiLU(nn.Module):
    """Compute what torch.nn.SiLU does, which may work in place."""

    has_backward = True
    can_torch_compile = True
    inplace: bool

    def forward(self, input: Tensor) -> Tensor:
        return torch.nn.functional.silu(input, inplace=True) if self.inplace else silu(input)


class GELU(nn.Module):
    """Compute what torch.nn.GELU does."""

    has_backward = True
    can_torch_compile = True
    approximate: str

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, approximate=self.approximate)

"""RMS norm and layer norm, in any class that computes one."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilewright.models.probe import agree, is_plain, random, stand_in
from tilewright.models.replacements import Replacement
from tilewright.ops.norm.add_layer_norm import add_layer_norm
from tilewright.ops.norm.add_rms_norm import add_rms_norm
from tilewright.ops.norm.layer_norm import layer_norm
from tilewright.ops.norm.rms_norm import rms_norm

LARGEST_EPS = 0.1


class Norm(NamedTuple):
    """A norm over the last dimension. RMS norms have no bias; `offset` is added to their weight."""

    is_rms: bool
    weight: str | None  # names of the module's parameters
    bias: str | None
    eps: float | None
    offset: float = 0.0

    @property
    def kernel(self) -> str:
        return "rms_norm" if self.is_rms else "layer_norm"

    def parameters(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = (name and getattr(module, name) for name in (self.weight, self.bias))
        return weight, bias  # type: ignore[return-value]

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        weight, bias = self.parameters(module)
        if self.is_rms:
            return rms_norm(x, x.shape[-1:], weight, self.eps, weight_offset=self.offset)
        return layer_norm(x, x.shape[-1:], weight, bias, self.eps or 0.0)

    def add(self, module: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and that sum."""
        weight, bias = self.parameters(module)
        if self.is_rms:
            return add_rms_norm(x, residual, x.shape[-1:], weight, self.eps, weight_offset=self.offset)
        return add_layer_norm(x, residual, x.shape[-1:], weight, bias, self.eps or 0.0)

    def takes(self, module: nn.Module, *inputs: Tensor) -> bool:
        """Return whether inputs and parameters have one dtype: with others the module decides how to promote."""
        tensors = [*inputs, *(p for p in self.parameters(module) if p is not None)]
        return is_plain(*tensors) and all(t.dtype == tensors[0].dtype for t in tensors)


def forward(module: nn.Module, x: Tensor, *, norm: Norm) -> Tensor:
    if norm.takes(module, x):
        return norm(module, x)
    return type(module).forward(module, x)


def find(module: nn.Module) -> Replacement | str | None:
    if not _is_candidate(module):
        return None
    norm = identify(module)
    if norm is None:
        return "it is neither an RMS norm nor a layer norm over its last dimension"
    return Replacement(partial(forward, norm=norm), norm.kernel)


def identify(module: nn.Module) -> Norm | None:
    """Return the norm that a module computes, or None."""
    if not _is_candidate(module):
        return None
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    size = _size(module)
    bias = next((name for name in names if "bias" in name or name == "beta"), None) if len(names) == 2 else None
    weight = next((name for name in names if name != bias), None)
    copy = stand_in(module, {name: random(size + place)[:size] for place, name in enumerate(names)})
    for norm in _hypotheses(module, weight, bias):
        # Values near the root of epsilon tell epsilons apart; the mean tells the two norms apart.
        if all(agree(partial(copy, x), partial(norm, copy, x)) for x in _inputs(size, norm.eps)):
            return norm
    return None


def _inputs(size: int, eps: float | None) -> list[Tensor]:
    tiny = (torch.finfo(torch.float32).eps if eps is None else eps) ** 0.5
    return [random(2, 3, size) + 0.5, random(5, size, scale=max(tiny, 1e-6))]


def _hypotheses(module: nn.Module, weight: str | None, bias: str | None) -> list[Norm]:
    floats = sorted({value for value in vars(module).values() if type(value) is float and 0 <= value < LARGEST_EPS})
    eps: list[float | None] = [*floats, None]  # None: nn.RMSNorm's default
    rms = [Norm(True, weight, None, e, offset) for e in eps for offset in (0.0, 1.0)] if bias is None else []
    return rms + [Norm(False, weight, bias, e) for e in floats]


def _is_candidate(module: nn.Module) -> bool:
    """Return whether a module looks like a norm: a leaf with one or two vectors of parameters and an epsilon."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if module._modules or any(b is not None for b in module._buffers.values()) or not 1 <= len(parameters) <= 2:
        return False
    if len({p.shape for p in parameters}) > 1 or parameters[0].dim() != 1 or _size(module) < 2:
        return False
    return any("eps" in name for name in vars(module))


def _size(module: nn.Module) -> int:
    return next(p for p in module._parameters.values() if p is not None).numel()

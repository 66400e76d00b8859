"""RMS norm and layer norm, in any class that computes one."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewright.models.probe import LARGE, computes, is_plain, only, random, stand_in
from tilewright.models.replacements import Replacement
from tilewright.ops.norm.add_layer_norm import add_layer_norm
from tilewright.ops.norm.add_rms_norm import add_rms_norm
from tilewright.ops.norm.layer_norm import layer_norm
from tilewright.ops.norm.rms_norm import rms_norm

LARGEST_EPS = 0.1
USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)  # for a module that has its epsilon in its code
SIZE = 24  # elements per row of the stand-in of a norm without parameters


class Norm(NamedTuple):
    """A norm over the last dimensions. RMS norms have no bias; `offset` is added to their weight."""

    owner: type[nn.Module]  # the module's class
    is_rms: bool
    weight: str | None  # names of the module's parameters
    bias: str | None
    eps: float | None
    offset: float = 0.0
    dims: int = 1

    @property
    def kernel(self) -> str:
        return "rms_norm" if self.is_rms else "layer_norm"

    def parameters(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = (name and getattr(module, name) for name in (self.weight, self.bias))
        return weight, bias  # type: ignore[return-value]

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        weight, bias = self.parameters(module)
        if self.is_rms:
            return rms_norm(x, x.shape[-self.dims :], weight, self.eps, weight_offset=self.offset)
        return layer_norm(x, x.shape[-self.dims :], weight, bias, self.eps or 0.0)

    def add(self, module: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and that sum."""
        weight, bias = self.parameters(module)
        if self.is_rms:
            return add_rms_norm(x, residual, x.shape[-self.dims :], weight, self.eps, weight_offset=self.offset)
        return add_layer_norm(x, residual, x.shape[-self.dims :], weight, bias, self.eps or 0.0)

    def takes(self, module: nn.Module, *inputs: Tensor) -> bool:
        """Return whether inputs and parameters have one dtype: with others the module decides how to promote."""
        tensors = [*inputs, *(p for p in self.parameters(module) if p is not None)]
        return is_plain(*tensors) and all(t.dtype == tensors[0].dtype for t in tensors)


def forward(module: nn.Module, *args: Any, norm: Norm, **kwargs: Any) -> Tensor:
    x = only(args, kwargs)
    if x is not None and norm.takes(module, x):
        return norm(module, x)
    return type(module).forward(module, *args, **kwargs)


def find(module: nn.Module) -> Replacement | str | None:
    norm = identify(module)
    if norm is not None:
        return Replacement(partial(forward, norm=norm), norm.kernel)
    if "norm" in type(module).__name__.lower() and not module._modules:
        return "it is neither an RMS norm nor a layer norm over its last dimensions"
    return None


def identify(module: nn.Module) -> Norm | None:
    """Return the norm that a module computes, or None."""
    if not _is_candidate(module):
        return None
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    shape = _shape(module)
    bias = next((name for name in names if "bias" in name or name == "beta"), None) if len(names) == 2 else None
    weight = next((name for name in names if name != bias), None)
    copy = stand_in(module, {name: random(place + 1, *shape)[place] for place, name in enumerate(names)})
    for norm in _hypotheses(module, weight, bias, len(shape)):
        # Values near the root of epsilon tell epsilons apart; the mean tells the two norms apart.
        if computes(copy, partial(norm, copy), _inputs(shape, norm.eps)):
            return norm
    return None


def _inputs(shape: tuple[int, ...], eps: float | None) -> list[Tensor]:
    tiny = (torch.finfo(torch.float32).eps if eps is None else eps) ** 0.5
    large = random(3, *shape, scale=LARGE)
    return [random(2, 3, *shape) + 0.5, random(5, *shape, scale=max(tiny, 1e-6)), large]


def _hypotheses(module: nn.Module, weight: str | None, bias: str | None, dims: int) -> list[Norm]:
    numbers = [*vars(module).values(), *_constants(module), *USUAL_EPS]
    floats = list(dict.fromkeys(value for value in numbers if type(value) is float and 0 <= value < LARGEST_EPS))
    eps: list[float | None] = [*floats, None]  # None: nn.RMSNorm's default
    offsets = (0.0, 1.0) if weight else (0.0,)
    owner = type(module)
    rms = [Norm(owner, True, weight, None, e, offset, dims) for e in eps for offset in offsets]
    return (rms if bias is None else []) + [Norm(owner, False, weight, bias, e, dims=dims) for e in floats]


def _constants(module: nn.Module) -> list[Any]:
    """Return the constants in the code of a module's own functions."""
    owners = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    functions = [value for owner in owners for value in vars(owner).values() if isinstance(value, FunctionType)]
    return [constant for function in functions for constant in function.__code__.co_consts]


def _is_candidate(module: nn.Module) -> bool:
    """Return whether a module could be a norm: a leaf with one or two vectors of parameters, or named like one."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if module._modules or any(b is not None for b in module._buffers.values()) or len(parameters) > 2:
        return False
    if len({p.shape for p in parameters}) > 1 or any(p.numel() < 2 for p in parameters):
        return False
    return "norm" in type(module).__name__.lower() or {p.dim() for p in parameters} == {1}


def _shape(module: Any) -> tuple[int, ...]:
    """Return the dimensions over which a module takes its norm, if it is one."""
    parameters = [p for p in module._parameters.values() if p is not None]
    return tuple(parameters[0].shape if parameters else getattr(module, "normalized_shape", (SIZE,)))

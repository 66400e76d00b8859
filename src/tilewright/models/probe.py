"""Decide what a module computes by running a small stand-in of it.

A class name says little about a module: users subclass, rename and copy them. So a module is replaced only if a
stand-in (a shallow copy with parameters or children of its own) computes the same values as our form of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

SEED = 0
TOLERANCE = 1e-5  # relative to the largest element: float32 rounding, but less than the two forms of GELU differ by
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def stand_in(
    module: nn.Module,
    parameters: Mapping[str, Tensor] | None = None,
    children: Mapping[str, nn.Module] | None = None,
    **attributes: Any,
) -> Any:
    """Return a copy of a module that shares no parameters, children or hooks with it, in training mode."""
    made = object.__new__(type(module))
    made.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    made.__dict__.update({name: type(module.__dict__[name])() for name in _HOOKS if name in module.__dict__})
    made.__dict__["_parameters"] = {name: nn.Parameter(value) for name, value in (parameters or {}).items()}
    made.__dict__["_modules"] = {**dict.fromkeys(module._modules), **(children or {})}
    made.__dict__.update(training=True, **attributes)
    return made


class Stub(nn.Module):
    """A child of a stand-in that computes any function."""

    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def agree(theirs: Callable[[], Any], ours: Callable[[], Any]) -> bool:
    """Return whether two calls return the same tensor. A call that fails agrees with nothing."""
    with torch.no_grad():
        try:
            expected, result = theirs(), ours()
        except Exception:  # a user's module may raise anything when it is called in a way it does not expect
            return False
    if not isinstance(expected, Tensor) or not isinstance(result, Tensor) or not expected.numel():
        return False
    if expected.shape != result.shape or expected.dtype != result.dtype or not expected.isfinite().all():
        return False
    return bool((expected - result).abs().max() <= TOLERANCE * expected.abs().max())


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Return normal values from a generator of its own, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + len(shape) + sum(shape))) * scale


def is_plain(*tensors: Any) -> bool:
    """Return whether a replaced forward may take these tensors: no autocast, no subclass such as DTensor."""
    if torch.is_autocast_enabled(tensors[0].device.type):
        return False
    return all(type(t) is Tensor or type(t) is nn.Parameter for t in tensors)


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling a module would run hooks, so that its call may not be skipped."""
    return any(getattr(module, name) for name in _HOOKS)

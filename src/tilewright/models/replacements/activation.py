"""Activations in modules of their own, in any class that computes one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from tilewright.models.probe import LARGE, computes, is_plain, only, random, stand_in
from tilewright.models.replacements import Replacement
from tilewright.ops.activation.gelu import gelu
from tilewright.ops.activation.relu_squared import relu_squared
from tilewright.ops.activation.silu import silu

# relu is not here: torch's is as fast.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu (tanh)": partial(gelu, approximate="tanh"),
    "silu": silu,
    "relu_squared": relu_squared,
}
WORDS = ("gelu", "silu", "swish", "relu", "act")


def forward(module: nn.Module, *args: Any, activation: str, **kwargs: Any) -> Tensor:
    x = only(args, kwargs)
    if x is not None and is_plain(x):
        return ACTIVATIONS[activation](x)
    return type(module).forward(module, *args, **kwargs)


def find(module: nn.Module) -> Replacement | str | None:
    # The name only limits what is probed: a module without parameters could be anything.
    if next(module.parameters(), None) is not None or module._modules or module._buffers:
        return None
    if not any(word in type(module).__name__.lower() for word in WORDS):
        return None
    if getattr(module, "inplace", False):
        return "it works in place"
    copy, inputs = stand_in(module), [random(7, 11, scale=2.0), random(7, 11, scale=LARGE)]
    for name, activation in ACTIVATIONS.items():
        if computes(copy, activation, inputs):
            return Replacement(partial(forward, activation=name), name.partition(" ")[0])
    return None

"""The forward function of a class with other globals: for what a layer calls by the name of a global of its file.

Replacing the global itself would change every model in the process.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Factory = Callable[[Any], Any]  # from the value of a global to the value that replaces it


class Rebound:
    """The forward function of a class, in which some globals are replaced. Picklable if the factories are."""

    def __init__(self, owner: type[nn.Module], factories: Mapping[str, Factory]):
        original: Any = owner.forward
        # Without its name, so that torch.compile does not look globals up in the original module.
        scope = {name: value for name, value in original.__globals__.items() if name != "__name__"}
        scope |= {name: factory(original.__globals__[name]) for name, factory in factories.items()}
        self.owner = owner
        self.factories = dict(factories)
        self.fn = types.FunctionType(original.__code__, scope, "forward", original.__defaults__, original.__closure__)
        self.fn.__kwdefaults__ = original.__kwdefaults__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __or__(self, other: Rebound) -> Rebound:
        """Return the forward function with the globals of both replaced."""
        return Rebound(self.owner, self.factories | other.factories)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rebound, (self.owner, self.factories)


def called_global(module: nn.Module, name: str) -> Any:
    """Return the global that the forward function of a module's class uses under a name; None if it uses none."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or name not in forward.__code__.co_names:
        return None
    return forward.__globals__.get(name)

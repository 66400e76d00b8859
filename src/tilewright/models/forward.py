"""The forward function of one module, replaced by ours."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


class Forward(functools.partial):
    """A replacement bound to its module, with the signature of the original, which trainers and `generate` read."""

    @property
    def __func__(self) -> Callable[..., Any]:
        """The same without a bound module, as methods have it: accelerate wraps that and binds it again."""
        return lambda _, *args, **kwargs: self(*args, **kwargs)

    def point_to(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """Call another function from now on: for those who hold this one and will not look the module's up again."""
        super().__setstate__((function, self.args, dict(options), None))  # type: ignore[misc]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(functools.partial(type(self.args[0]).forward, self.args[0]))


def is_replaced(module: nn.Module) -> bool:
    """Return whether this module has a replaced forward function."""
    return isinstance(vars(module).get("forward"), Forward)


def is_foreign(module: nn.Module) -> bool:
    """Return whether the instance has a forward function that is neither its class's nor ours."""
    own = vars(module).get("forward")
    is_own = isinstance(own, types.MethodType) and own.__func__ is type(module).forward
    return not (own is None or is_own or is_replaced(module))

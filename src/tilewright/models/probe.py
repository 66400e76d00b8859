"""Decide what a module computes by running a small stand-in of it.

A class name says little about a module: users subclass, rename and copy them. So a module is replaced only if a
stand-in (a shallow copy with parameters or children of its own) computes the same values as our form of it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.forward import is_foreign

SEED = 0
TOLERANCE = 1e-5  # relative to the largest element: float32 rounding, but less than the two forms of GELU differ by
BF16_TOLERANCE = 2.0**-5  # where values are rounded may differ; the dtype of the result may not
LARGE = 100.0  # shows clamps, which no value near 1 does
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (list, dict, set)  # which a forward function may change


def stand_in(
    module: nn.Module,
    parameters: Mapping[str, Tensor] | None = None,
    children: Mapping[str, nn.Module] | None = None,
    **attributes: Any,
) -> Any:
    """Return a copy of a module that shares no parameters, buffers, children, containers or hooks with it.

    It has only the parameters and children that are given, so code that uses others fails.
    """
    made = object.__new__(type(module))
    made.__dict__ = {name: _own(value) for name, value in module.__dict__.items() if name != "forward"}
    made.__dict__.update({name: type(module.__dict__[name])() for name in _HOOKS if name in module.__dict__})
    given = {name: nn.Parameter(value) for name, value in (parameters or {}).items()}
    made.__dict__["_parameters"] = _absent(module._parameters) | given
    made.__dict__["_buffers"] = {name: None if b is None else b.detach().clone() for name, b in module._buffers.items()}
    made.__dict__["_modules"] = _absent(module._modules) | dict(children or {})
    made.__dict__.update(training=True, **attributes)
    return made


def _absent(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None for name, member in members.items() if member is None}


def copied(module: nn.Module) -> Any:
    """Return a stand-in of a module without parameters, down to its children."""
    return stand_in(module, children={name: copied(child) for name, child in module._modules.items() if child})


def _own(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


class Stub(nn.Module):
    """A child of a stand-in that computes any function."""

    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def computes(
    copied: nn.Module,
    ours: Callable[[Tensor], Any],
    inputs: Iterable[Tensor],
    call: Callable[[Tensor], Any] | None = None,
) -> bool:
    """Return whether a stand-in computes our form, in training and evaluation mode, and changes nothing else.

    Neither its inputs nor its own attributes and buffers may change. In bfloat16 the results must have the same dtype,
    and values that rounding explains. `call` calls the stand-in.
    """
    made = [*inputs]
    runs = ((torch.float32, TOLERANCE, made), (torch.bfloat16, BF16_TOLERANCE, made[:1]))
    for (dtype, tolerance, some), mode in itertools.product(runs, (True, False)):
        for x in (x.to(dtype) for x in some):
            given = x.clone()
            theirs = partial(_run, copied, mode, call or copied, given)
            if not agree(theirs, partial(ours, x), tolerance) or not torch.equal(given, x):
                return False
    return True


def _run(copied: nn.Module, mode: bool, call: Callable[[Tensor], Any], x: Tensor) -> Any:
    # Not by its own methods, which FSDP and others replace in their classes.
    nn.Module.train(copied, mode)
    nn.Module._apply(copied, lambda t: t.to(x.dtype) if t.is_floating_point() else t)
    before, versions = _contents(copied)
    result = call(x)
    after, now = _contents(copied)
    return result if [*map(id, before)] == [*map(id, after)] and versions == now else None


def _contents(module: nn.Module) -> tuple[list[Any], list[int]]:
    """Return what a forward function may change: attributes and their elements, and the versions of buffers."""
    values, versions = [], []
    for one in nn.Module.modules(module):
        versions += [buffer._version for buffer in one._buffers.values() if buffer is not None]
        for value in vars(one).values():
            elements = value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ()
            values += [value, *elements]
    return values, versions


def agree(theirs: Callable[[], Any], ours: Callable[[], Any], tolerance: float = TOLERANCE) -> bool:
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
    return bool((expected - result).abs().max() <= tolerance * expected.abs().max())


def only(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the only argument of a call, by position or by name; None if there are several or it is no tensor."""
    given = (*args, *kwargs.values())
    return given[0] if len(given) == 1 and isinstance(given[0], Tensor) else None


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Return normal values from a generator of its own, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + len(shape) + sum(shape))) * scale


def forward_parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class's forward function after self; none if it has no signature, as a builtin."""
    try:
        found = dict(inspect.signature(type(module).forward).parameters)
    except (TypeError, ValueError):
        return {}
    return dict(list(found.items())[1:])


def is_plain(*tensors: Any) -> bool:
    """Return whether a replaced forward may take these tensors: no autocast, no subclass such as DTensor."""
    if not all(type(t) is Tensor or type(t) is nn.Parameter for t in tensors):
        return False
    return not torch.is_autocast_enabled(tensors[0].device.type)


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling a module would run hooks, its own or those of all modules."""
    return any(getattr(module, name) for name in _HOOKS) or bool(nn.modules.module._has_any_global_hook())


def may_be_skipped(module: nn.Module, owner: type[nn.Module]) -> bool:
    """Return whether a kernel may compute what a class says instead of calling its module."""
    return type(module) is owner and not has_hooks(module) and not is_foreign(module)


def runs_as_written(module: nn.Module) -> bool:
    """Return whether calling a module does what its class says: no hooks, and no forward function of its own."""
    return "forward" not in vars(module) and not has_hooks(module)

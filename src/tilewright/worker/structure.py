"""Flatten the nested inputs of a problem into tensors and plain values, and rebuild them in another process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PLAIN_VALUES = (bool, int, float, str, type(None), torch.dtype)
Resolve = Callable[[str, str], type]  # from a module's name and a class's name in it


class NotSendable(Exception):
    """A value that cannot be rebuilt in another process; the message is the name of its type."""


def flatten_inputs(value: Any, modules: Sequence[str] = ()) -> tuple[list[Any], Any]:
    """Return the leaves, each tensor once, and the structure as JSON. Objects may be of classes in `modules`."""
    leaves: list[Any] = []
    known: dict[int, int] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, (Tensor, *PLAIN_VALUES)):
            is_new = not isinstance(value, Tensor) or id(value) not in known
            if is_new:
                known[id(value)] = len(leaves)
                leaves.append(value.detach() if isinstance(value, torch.nn.Parameter) else value)
            return {"leaf": known[id(value)], "parameter": isinstance(value, torch.nn.Parameter)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        kind = type(value)
        if isinstance(value, list | tuple | set):
            name = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else "set"
            is_named = hasattr(kind, "_fields") and kind.__module__ in modules
            return {name: [visit(item) for item in value], "class": _path(kind) if is_named else None}
        if isinstance(value, dict) and all(isinstance(key, PLAIN_VALUES[:5]) for key in value):
            is_plain = kind is dict or kind.__module__ not in ("collections", *modules)
            return {
                "keys": list(value),
                "values": [visit(item) for item in value.values()],
                "class": None if is_plain else _path(kind),
            }
        if kind.__module__ in modules and hasattr(value, "__dict__"):
            return {"object": _path(kind), "attributes": visit(dict(vars(value)))}
        raise NotSendable(kind.__name__)

    return leaves, visit(value)


def unflatten_inputs(leaves: Sequence[Any], structure: Any, resolve: Resolve | None = None) -> Any:
    """Rebuild the inputs of which `flatten_inputs` returned the leaves and the structure."""
    find = resolve or _import_class

    def build(part: Any) -> Any:
        if "leaf" in part:
            leaf = leaves[part["leaf"]]
            return torch.nn.Parameter(leaf, requires_grad=False) if part["parameter"] else leaf
        if "device" in part:
            return torch.device(part["device"])
        if "object" in part:
            kind: Any = find(*part["object"])
            made = kind.__new__(kind)
            made.__dict__.update(build(part["attributes"]))
            return made
        kind = find(*part["class"]) if part["class"] else None
        if "keys" in part:
            pairs = zip(part["keys"], map(build, part["values"]), strict=True)
            return (kind or dict)(pairs)
        if "list" in part:
            return [build(item) for item in part["list"]]
        if "set" in part:
            return {build(item) for item in part["set"]}
        items = [build(item) for item in part["tuple"]]
        return kind(*items) if kind else tuple(items)

    return build(structure)


def _path(kind: type) -> list[str]:
    return [kind.__module__, kind.__qualname__]


def _import_class(module: str, name: str) -> type:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found

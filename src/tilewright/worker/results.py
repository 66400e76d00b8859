"""Flatten the results of a problem's reference, or of a solution, into a list of tensors.

Dictionaries are compared by their keys, numbers as tensors without dimensions, complex tensors as pairs of real ones.
None counts as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def flatten_results(returned: Any) -> Any:
    """Return a single tensor as it is, and everything else as a list of its leaves."""
    leaves = [_leaf(leaf) for _, leaf in _paths(returned)]
    return leaves[0] if isinstance(returned, Tensor) else leaves


def result_names(returned: Any) -> list[str] | None:
    """Return how a caller names each leaf, such as `['mean'][0]`; None if it uses no keys."""
    names = [path for path, _ in _paths(returned)]
    return names if any("'" in name for name in names) else None


def other_names(returned: Any, expected: Sequence[str] | None) -> str | None:
    """Return how the keys of results differ from those expected, or None."""
    names = result_names(returned)
    if names == expected:
        return None
    has, should = (", ".join(known) if known else "no keys" for known in (names, expected))
    return f"returned {has}, expected {should}"


def rebuild_results(leaves: Iterator[Tensor], like: Any) -> Any:
    """Return a value of the structure of `like` with other leaves, in the order of `flatten_results`."""
    if isinstance(like, Mapping):
        made = {key: rebuild_results(leaves, like[key]) for key in _keys(like)}
        return {key: made[key] for key in like}
    if isinstance(like, tuple | list):
        items = [rebuild_results(leaves, item) for item in like]
        return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
    if like is None:
        return None
    leaf = next(leaves)
    if isinstance(like, Tensor):
        return torch.view_as_complex(leaf.contiguous()) if like.is_complex() else leaf
    return leaf.item()


def _paths(returned: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(returned, Mapping):
        for key in _keys(returned):
            yield from _paths(returned[key], f"{path}['{key}']")
    elif isinstance(returned, tuple | list):
        for number, item in enumerate(returned):
            yield from _paths(item, f"{path}[{number}]")
    elif returned is not None:
        yield path, returned


def _keys(mapping: Mapping[Any, Any]) -> Sequence[Any]:
    return sorted(mapping, key=str)


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float | complex):
        leaf = torch.as_tensor(leaf)
    return torch.view_as_real(leaf.resolve_conj()) if isinstance(leaf, Tensor) and leaf.is_complex() else leaf

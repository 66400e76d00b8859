"""Solutions of foreign problems: `ModelNew` of KernelBench, `custom_kernel` of gpu-mode."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright import registry
from tilewright.errors import FileBroken, first_line
from tilewright.worker.fake_cuda import without_cuda

ENTRIES = {"kernelbench": "ModelNew", "gpu-mode": "custom_kernel"}


def load(path: Path, solution: dict[str, Any], device: str) -> Callable[..., Any]:
    """The function that takes the leaves of the problem's data. `solution` says of which kind it is, what to construct
    it with, from which seed, whether anew for each call, and where the problem keeps the modules it lends."""
    sys.path[:0] = solution["folders"]
    with without_cuda(device):
        module = registry.load_module(path)
    entry = getattr(module, ENTRIES[solution["kind"]], None)
    if not callable(entry):
        raise FileBroken(path, None, f"it defines no {ENTRIES[solution['kind']]}")
    if solution["kind"] == "gpu-mode":
        return _redirected(entry, device)
    arguments = pytree.tree_unflatten(solution["init"], pytree.treespec_loads(solution["init_tree"]))
    construct = lambda: constructed(entry, arguments, solution["seed"], device)
    try:
        model = construct()
    except Exception as error:
        raise FileBroken(path, None, f"ModelNew cannot be constructed ({first_line(error)})") from error
    return _redirected(lambda data: (construct() if solution["anew"] else model)(*data), device)


def constructed(model: Callable[..., Any], arguments: Any, seed: int, device: str) -> Any:
    """As KernelBench does it: who draws the same parameters in the same order has the same parameters."""
    torch.manual_seed(seed)
    named = {}
    if len(arguments) == 2 and isinstance(arguments[0], list) and isinstance(arguments[1], dict):
        arguments, named = arguments  # as KernelBook writes them
    with without_cuda(device):
        made = model(*arguments, **named)
    return made.to(device) if isinstance(made, torch.nn.Module) else made


def nested(arguments: Sequence[Any]) -> Any:
    """The data that the arguments make up, as the last of them says."""
    return pytree.tree_unflatten(list(arguments[:-1]), pytree.treespec_loads(json.loads(arguments[-1])["tree"]))


def _redirected(fn: Callable[[Any], Any], device: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with without_cuda(device):
            return fn(nested(arguments))

    return call

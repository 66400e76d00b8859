"""Load solutions of third-party problems: `ModelNew` for KernelBench, `custom_kernel` for gpu-mode."""

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
from tilewright.worker.fake_cuda import redirect_cuda

ENTRY_POINTS = {"kernelbench": "ModelNew", "gpu-mode": "custom_kernel"}


def load(path: Path, solution: dict[str, Any], device: str) -> Callable[..., Any]:
    """Return the solution as a function of the flattened inputs.

    `solution` holds its kind, the constructor arguments and seed, whether each call needs a new model, and the folders
    with the problem's own modules.
    """
    sys.path[:0] = solution["folders"]
    with redirect_cuda(device):
        module = registry.load_module(path)
    name = ENTRY_POINTS[solution["kind"]]
    entry = getattr(module, name, None)
    if not callable(entry):
        raise FileBroken(path, None, f"it defines no {name}")
    if solution["kind"] == "gpu-mode":
        return _from_leaves(entry, device)
    arguments = pytree.tree_unflatten(solution["init"], pytree.treespec_loads(solution["init_tree"]))
    construct = lambda: construct_model(entry, arguments, solution["seed"], device)
    try:
        model = construct()
    except Exception as error:
        raise FileBroken(path, None, f"ModelNew cannot be constructed ({first_line(error)})") from error
    return _from_leaves(lambda data: (construct() if solution["new_model_per_call"] else model)(*data), device)


def construct_model(model: Callable[..., Any], arguments: Any, seed: int, device: str) -> Any:
    """Construct a model as KernelBench does: models that draw the same parameters in the same order share them."""
    torch.manual_seed(seed)
    named = {}
    if len(arguments) == 2 and isinstance(arguments[0], list) and isinstance(arguments[1], dict):
        arguments, named = arguments  # KernelBook's form
    with redirect_cuda(device):
        instance = model(*arguments, **named)
    return instance.to(device) if isinstance(instance, torch.nn.Module) else instance


def unflatten_inputs(arguments: Sequence[Any]) -> Any:
    """Return the problem's nested inputs from their leaves and, as the last argument, their structure."""
    return pytree.tree_unflatten(list(arguments[:-1]), pytree.treespec_loads(json.loads(arguments[-1])["tree"]))


def _from_leaves(fn: Callable[[Any], Any], device: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with redirect_cuda(device):
            return fn(unflatten_inputs(arguments))

    return call

"""Load solutions of third-party problems: `ModelNew` for KernelBench, `custom_kernel` for gpu-mode."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright import registry
from tilewright.errors import FileBroken, first_line
from tilewright.worker import constants, tf32
from tilewright.worker.fake_cuda import redirect_cuda
from tilewright.worker.structure import unflatten_inputs

ENTRY_POINTS = {"kernelbench": "ModelNew", "gpu-mode": "custom_kernel"}


def load(path: Path, solution: dict[str, Any], device: str) -> Callable[..., Any]:
    """Return the solution as a function of the flattened inputs.

    `solution` holds its kind, the constructor arguments and seed, whether each call needs a new model, the folders with
    the problem's own modules, whether the problem allows TF32, and the sizes of the problem that a case changes. If the
    file assigns the same value to the same name, it is changed there too.
    """
    sys.path[:0] = solution["folders"]
    tf32.allow(tf32.Tf32(*solution["tf32"]))
    before = {name: _size(pair[0]) for name, pair in solution.get("sizes", {}).items()}
    after = {name: _size(pair[1]) for name, pair in solution.get("sizes", {}).items()}

    def resize(tree: ast.Module) -> None:
        constants.replace_sizes(tree, after, only=before)

    with redirect_cuda(device):
        module = registry.load_module(path, resize if after else None)
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


def _size(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # JSON has no tuples


def _from_leaves(fn: Callable[[Any], Any], device: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with redirect_cuda(device):
            return fn(unflatten_inputs(arguments[:-1], json.loads(arguments[-1])["structure"]))

    return call

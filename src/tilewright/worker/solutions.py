"""Load solutions of third-party problems: `ModelNew` for KernelBench, `custom_kernel` for gpu-mode."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright import registry
from tilewright.errors import FileBroken, first_line
from tilewright.fake_cuda import redirect_cuda
from tilewright.worker import constants, tf32
from tilewright.worker.execute import KernelFailed, flatten
from tilewright.worker.results import flatten_results, other_names
from tilewright.worker.structure import unflatten_inputs

ENTRY_POINTS = {"kernelbench": "ModelNew", "gpu-mode": "custom_kernel", "flashinfer-bench": "run"}


def load(path: Path, solution: dict[str, Any], device: str) -> Callable[..., Any]:
    """Return the solution as a function of the flattened inputs.

    `solution` holds its kind, the constructor arguments and seed, whether each call needs a new model, the folders with
    the problem's own modules, whether the problem allows TF32, and the sizes of the problem that a case changes. If the
    file assigns the same value to the same name, it is changed there too. It also holds the names of the results and
    the arguments whose new contents are outputs. For flashinfer-bench, it holds the outputs by
    name, and of a JSON solution the entry point and whether it fills its outputs.
    """
    sys.path[:0] = solution["folders"]
    tf32.allow(tf32.Tf32(*solution["tf32"]))
    before = {name: _size(pair[0]) for name, pair in solution.get("sizes", {}).items()}
    after = {name: _size(pair[1]) for name, pair in solution.get("sizes", {}).items()}

    def resize(tree: ast.Module) -> None:
        constants.replace_sizes(tree, after, only=before)

    with redirect_cuda(device):
        module = registry.load_module(path, resize if after else None)
    name = solution.get("entry", ENTRY_POINTS[solution["kind"]])
    entry = getattr(module, name, None)
    if not callable(entry):
        raise FileBroken(path, None, f"it defines no {name}")
    if solution["kind"] == "gpu-mode":
        return _from_leaves(entry, solution, device)
    if solution["kind"] == "flashinfer-bench":
        return _of_definition(entry, solution, device)
    arguments = pytree.tree_unflatten(solution["init"], pytree.treespec_loads(solution["init_tree"]))
    construct = lambda: construct_model(entry, arguments, solution["seed"], device)
    try:
        model = construct()
    except Exception as error:
        raise FileBroken(path, None, f"ModelNew cannot be constructed ({first_line(error)})") from error
    call = lambda data: (construct() if solution["new_model_per_call"] else model)(*data)
    return _from_leaves(call, solution, device)


def _of_definition(entry: Callable[..., Any], solution: dict[str, Any], device: str) -> Callable[..., Any]:
    """Return a flashinfer-bench solution as a function of the leaves: it returns its outputs, or fills given ones."""
    outputs = {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in solution["outputs"].items()}
    dtypes = {name: dtype for name, (_, dtype) in outputs.items()}

    def call(*arguments: Any) -> Any:
        about = json.loads(arguments[-1])
        data, sizes = unflatten_inputs(arguments[:-1], about["structure"]), dict(about["point"])
        with redirect_cuda(device):
            if not _fills_outputs(entry, solution, len(data) + len(outputs)):
                return _outputs(named_outputs(entry(*data), dtypes, device), arguments, solution)
            filled = [torch.empty([sizes[n] for n in s or []], dtype=d, device=device) for s, d in outputs.values()]
            entry(*data, *filled)
            return _outputs(filled[0] if len(filled) == 1 else filled, arguments, solution)

    return call


def _fills_outputs(entry: Callable[..., Any], solution: dict[str, Any], with_outputs: int) -> bool:
    if "fills_outputs" in solution:
        return solution["fills_outputs"]
    try:
        return len(inspect.signature(entry).parameters) == with_outputs
    except (TypeError, ValueError):  # a builtin
        return False


def named_outputs(found: Any, dtypes: Mapping[str, torch.dtype], device: str) -> Any:
    """Return the outputs of a flashinfer-bench function in their order; numbers as tensors."""
    if isinstance(found, dict) and (missing := [name for name in dtypes if name not in found]):
        raise KernelFailed("wrong", f"returned no {', '.join(missing)}")
    parts = [found[name] for name in dtypes] if isinstance(found, dict) else found
    parts = list(parts) if isinstance(parts, tuple | list) else [parts]
    kinds = dtypes.values() if len(parts) == len(dtypes) else [None] * len(parts)
    made = [
        torch.tensor(part, dtype=dtype, device=device) if isinstance(part, bool | int | float) else part
        for part, dtype in zip(parts, kinds, strict=True)
    ]
    return made[0] if len(made) == 1 else made


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


def _from_leaves(fn: Callable[[Any], Any], solution: dict[str, Any], device: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with redirect_cuda(device):
            returned = fn(unflatten_inputs(arguments[:-1], json.loads(arguments[-1])["structure"]))
        return _outputs(returned, arguments, solution)

    return call


def _outputs(returned: Any, arguments: Sequence[Any], solution: dict[str, Any]) -> Any:
    """Return the results of a call, and the arguments that the problem's reference writes to without returning them."""
    if reason := other_names(returned, solution["names"]):
        raise KernelFailed("wrong", reason)
    results = flatten_results(returned)
    effects = [arguments[number] for number in solution["effects"]]
    return [*flatten(results), *effects] if effects else results

"""Compare a model with and without our kernels, layer by layer, against a truth in higher precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilewright.models.patch import apply, revert

SLACK = 2.0  # our error may be this many times the original's, plus a rounding of the truth
FLOOR = 2.0**-20


@dataclass(frozen=True)
class Row:
    """The errors of one tensor, relative to the norm of the truth."""

    name: str
    what: str  # output or gradient
    original: float
    ours: float

    @property
    def is_within_budget(self) -> bool:
        return self.ours <= SLACK * self.original + FLOOR


@dataclass(frozen=True)
class Difference:
    """The errors of every layer's output and of every parameter's gradient, in the order of the forward pass."""

    rows: list[Row]
    truth: str  # the dtype of the truth

    @property
    def first(self) -> Row | None:
        """The first tensor on which ours is further from the truth than the original, beyond its budget."""
        return next((row for row in self.rows if not row.is_within_budget), None)

    def __bool__(self) -> bool:
        """Whether ours is as close to the truth as the original everywhere."""
        return self.first is None

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=4)
        lines = [f"{'layer':{width}}  {'':8}  {'original':>9}  {'ours':>9}"]
        for row in self.rows:
            note = "" if row.is_within_budget else "  beyond its budget"
            lines.append(f"{row.name:{width}}  {row.what:8}  {row.original:9.2e}  {row.ours:9.2e}{note}")
        first = self.first
        end = (
            "ours is as close as the original everywhere" if first is None else f"first beyond its budget: {first.name}"
        )
        return "\n".join([*lines, f"Errors relative to {self.truth}: {end}."])


def diff(
    model: nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    truth: torch.dtype = torch.float64,
    **options: Any,
) -> Difference:
    """Compare a model's outputs and gradients with and without our kernels, against the same model in `truth`.

    `inputs` are a tensor, positional arguments or keyword arguments. `loss` maps the model's output to a number; by
    default it is the output's `loss` attribute or else the mean square of its first tensor. Other options are those of
    `apply`. The model itself, its gradients and the random state do not change; it may be patched. Layers that are
    fused into others have no row, and without parameters that need gradients there are none.
    """
    args, kwargs = _arguments(inputs)
    reduce = loss or _loss
    runs = {}
    for name in ("truth", "original", "ours"):
        made = copy.deepcopy(model)
        revert(made)
        given = args, kwargs
        if name == "truth":
            made, given = made.to(truth), _moved(given, truth)
        fused: set[nn.Module] = set()
        if name == "ours":
            fused = {module for site in apply(made, **options).sites for module in site.fused}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            runs[name] = _run(made, given, reduce, fused)
    rows = [
        Row(name, what, _error(runs["original"][name, what], value), _error(runs["ours"][name, what], value))
        for (name, what), value in runs["truth"].items()
        if (name, what) in runs["original"] and (name, what) in runs["ours"]
    ]
    return Difference(rows, str(truth).removeprefix("torch."))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def _moved(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
    )


def _run(
    model: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    reduce: Callable[[Any], Tensor],
    fused: Collection[nn.Module],
) -> dict[tuple[str, str], Tensor]:
    """Return the output of every module by name in the order of their calls, then every parameter's gradient.

    A module that is fused into another is not captured: a hook on it would undo the fusion.
    """
    found: dict[tuple[str, str], Tensor] = {}
    model.zero_grad(set_to_none=True)
    for name, module in model.named_modules():
        if name and module not in fused:
            module.register_forward_hook(_keep(found, name))
    args, kwargs = given
    loss = reduce(model(*args, **kwargs))
    if loss.requires_grad:
        loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name, "gradient"] = parameter.grad.detach()
    return found


def _keep(found: dict[tuple[str, str], Tensor], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        first = _first_tensor(output)
        if first is not None:
            found[name, "output"] = first.detach().clone()  # another layer may write to it

    return hook


def _first_tensor(output: Any) -> Tensor | None:
    leaves = pytree.tree_leaves(output)
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = _first_tensor(output)
    if first is None:
        raise TypeError("the model returns no floating-point tensor: pass loss=, a function of its output")
    return first.square().mean()


def _error(value: Tensor, truth: Tensor) -> float:
    truth = truth.double()
    return float((value.double() - truth).norm() / truth.norm().clamp(min=torch.finfo(torch.float64).tiny))

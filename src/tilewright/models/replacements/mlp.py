"""Gated MLPs: down(activation(gate(x)) * up(x)), with two projections or one packed one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from tilewright.models.probe import LARGE, computes, copied, is_plain, only, random, runs_as_written, stand_in
from tilewright.models.replacements import Replacement
from tilewright.ops.activation.geglu import geglu
from tilewright.ops.activation.reglu import reglu
from tilewright.ops.activation.swiglu import swiglu

GATED: dict[str, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu (tanh)": partial(geglu, approximate="tanh"),
    "reglu": reglu,
}
HIDDEN, INNER = 6, 10  # sizes of the stand-in where the projections do not say theirs


class MLP(NamedTuple):
    """The form of a gated MLP, and the names of its children."""

    gated: str
    projections: tuple[str, ...]  # gate and up, or one that holds both
    down: str
    is_swapped: bool = False  # the packed projection holds up, then the gate
    others: tuple[tuple[str, type[nn.Module]], ...] = ()  # children whose calls are part of the kernel

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        # The projections are called as modules, so that adapters, quantised layers and hooks keep working.
        inner = [module._modules[name](x) for name in self.projections]  # type: ignore[misc]
        if self.is_swapped:
            inner = [*reversed(inner[0].chunk(2, -1))]
        return module._modules[self.down](GATED[self.gated](*inner))  # type: ignore[misc]


def forward(module: nn.Module, *args: Any, mlp: MLP, **kwargs: Any) -> Tensor:
    x = only(args, kwargs)
    if x is None or not is_plain(x) or not all(_is_part(module._modules.get(name), kind) for name, kind in mlp.others):
        return type(module).forward(module, *args, **kwargs)
    return mlp(module, x)


def _is_part(child: Any, kind: type[nn.Module]) -> bool:
    """Return whether a child still does what it did when its MLP was replaced: dropout, nothing."""
    return type(child) is kind and runs_as_written(child) and not (isinstance(child, nn.Dropout) and child.p)


def find(module: nn.Module) -> Replacement | str | None:
    linear = [name for name, child in module._modules.items() if _is_projection(child)]
    others = {name: child for name, child in module._modules.items() if child is not None and name not in linear}
    if len(linear) not in (2, 3) or any(next(child.parameters(), None) is not None for child in others.values()):
        return None
    for stand, inputs, mlp in _hypotheses(module, linear, others):
        if computes(stand, partial(mlp, stand), inputs):
            return Replacement(partial(forward, mlp=mlp), mlp.gated.partition(" ")[0], covers=tuple(others))
    without = {name: nn.Identity() if isinstance(child, nn.Dropout) else child for name, child in others.items()}
    if without != others and any(
        computes(stand, partial(mlp, stand), inputs) for stand, inputs, mlp in _hypotheses(module, linear, without)
    ):
        return "it applies dropout"
    return None


def _hypotheses(
    module: nn.Module, linear: list[str], others: dict[str, nn.Module]
) -> Iterator[tuple[nn.Module, list[Tensor], MLP]]:
    """Yield every form that a module may have, with a stand-in of it and inputs."""
    shared = {name: copied(child) for name, child in others.items()}
    for *projections, down in itertools.permutations(linear):
        is_packed = len(projections) == 1
        inner, hidden = _sizes(module._modules[down], INNER, HIDDEN)
        width, _ = _sizes(module._modules[projections[0]], hidden, inner)
        tiny = {name: Projection(width, inner * (1 + is_packed), place) for place, name in enumerate(projections)}
        tiny[down] = Projection(inner, hidden, len(projections))
        stand = stand_in(module, children=shared | tiny)
        inputs = [random(1, 3, width, scale=scale) for scale in (1.0, LARGE)]
        for gated, is_swapped in itertools.product(GATED, (False, True) if is_packed else (False,)):
            kinds = tuple((name, type(child)) for name, child in others.items())
            yield stand, inputs, MLP(gated, tuple(projections), down, is_swapped, kinds)


class Projection(nn.Linear):
    """A stand-in of a projection: a product of two matrices of rank 2, which costs little at any size."""

    features: Tensor

    def __init__(self, size: int, width: int, place: int):
        super().__init__(2, width, bias=False)
        self.in_features = size
        self.weight.data = random(width, 2 + place)[:, place:]
        self.register_buffer("features", random(size, 2 + place)[:, place:] / size**0.5)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input @ self.features)


def _sizes(child: Any, size: int, width: int) -> tuple[int, int]:
    """Return the sizes of a projection's inputs and outputs, where it has them under the names of nn.Linear."""
    return getattr(child, "in_features", size), getattr(child, "out_features", width)


def _is_projection(child: nn.Module | None) -> bool:
    """Return whether a child may be a linear layer: quantised layers and those with adapters have other classes."""
    if child is None or isinstance(child, nn.Linear):
        return child is not None
    return hasattr(child, "base_layer") or "linear" in type(child).__name__.lower()

"""Gated MLPs: down(activation(gate(x)) * up(x)), with two projections or one packed one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from tilewright.models.probe import agree, is_plain, random, stand_in
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
HIDDEN, INNER = 6, 10  # sizes of the stand-in's projections


def forward(module: nn.Module, x: Tensor, *, gated: str, projections: tuple[str, ...], down: str) -> Tensor:
    if not is_plain(x):
        return type(module).forward(module, x)
    # The projections are called as modules, so that adapters, quantised layers and hooks keep working.
    inner = (module._modules[name](x) for name in projections)  # type: ignore[misc]
    return module._modules[down](GATED[gated](*inner))  # type: ignore[misc]


def find(module: nn.Module) -> Replacement | str | None:
    linear = [name for name, child in module._modules.items() if _is_projection(child)]
    others = {name: child for name, child in module._modules.items() if child is not None and name not in linear}
    if len(linear) not in (2, 3) or any(next(child.parameters(), None) is not None for child in others.values()):
        return None
    for *projections, down in itertools.permutations(linear):
        width = INNER if len(projections) == 2 else 2 * INNER
        tiny = {name: nn.Linear(HIDDEN, width) for name in projections} | {down: nn.Linear(INNER, HIDDEN)}
        for place, layer in enumerate(tiny.values()):
            layer.weight.data = random(*layer.weight.shape, place + 1).select(-1, place)
            layer.bias.data.zero_()
        copy, x = stand_in(module, children=others | tiny), random(4, 3, HIDDEN)
        for gated in GATED:
            ours = partial(forward, gated=gated, projections=tuple(projections), down=down)
            if agree(partial(copy, x), partial(ours, copy, x)):
                return Replacement(ours, gated.partition(" ")[0], covers=tuple(others))
    return None


def _is_projection(child: nn.Module | None) -> bool:
    """Return whether a child may be a linear layer: quantised layers and those with adapters have other classes."""
    return isinstance(child, nn.Linear) or (child is not None and hasattr(child, "base_layer"))

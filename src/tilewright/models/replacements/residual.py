"""Transformer layers that add the residual before the norm of their MLP: the sum and the norm become one kernel.

total = x + [norm](attention(norm(x)))
total + [norm](mlp(norm(total)))
"""

from __future__ import annotations

import inspect
import itertools
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from tilewright.models.probe import Stub, agree, has_hooks, random, stand_in
from tilewright.models.replacements import Replacement
from tilewright.models.replacements.norm import Norm, identify

HIDDEN = 6


class Layer(NamedTuple):
    """The names of a layer's children, and how it calls its attention."""

    attention: str
    mlp: str
    before_attention: str
    before_mlp: str
    after_attention: str | None = None
    after_mlp: str | None = None
    by_keyword: bool = True  # attention(hidden_states=x) instead of attention(x)

    def attend(self, module: nn.Module, x: Tensor, options: dict[str, Any]) -> Tensor:
        normed = _call(module, self.before_attention, x)
        args, given = ((), {"hidden_states": normed}) if self.by_keyword else ((normed,), {})
        found = _call(module, self.attention, *args, **given, **options)
        return self._normed(module, self.after_attention, found[0] if isinstance(found, tuple) else found)

    def feed_forward(self, module: nn.Module, x: Tensor) -> Tensor:
        return self._normed(module, self.after_mlp, _call(module, self.mlp, x))

    def plain(self, module: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
        total = x + attended
        return total + self.feed_forward(module, _call(module, self.before_mlp, total))

    def _normed(self, module: nn.Module, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else _call(module, name, x)


def _call(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    return module._modules[name](*args, **kwargs)  # type: ignore[misc]


def forward(
    module: nn.Module,
    hidden_states: Tensor,
    *args: Any,
    layer: Layer,
    norm: Norm,
    named: tuple[str, ...],
    **kwargs: Any,
) -> Tensor:
    attended = layer.attend(module, hidden_states, dict(zip(named, args, strict=False)) | kwargs)
    second: Any = module._modules[layer.before_mlp]
    if has_hooks(second) or not norm.takes(second, attended, hidden_states):
        return layer.plain(module, hidden_states, attended)
    normed, total = norm.add(second, attended, hidden_states)
    return total + layer.feed_forward(module, normed)


def find(module: nn.Module) -> Replacement | str | None:
    children = {name: child for name, child in module._modules.items() if child is not None}
    norms = {name: norm for name, child in children.items() if (norm := identify(child))}
    blocks = [name for name in children if name not in norms]
    if len(norms) not in (2, 4) or len(blocks) != 2:
        return None
    parameters = [*inspect.signature(type(module).forward).parameters.values()][1:]
    if not parameters or parameters[0].name != "hidden_states":
        return None
    named = tuple(p.name for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD)
    for order, chosen in itertools.product(itertools.permutations(blocks), itertools.permutations(norms)):
        layer = _as_called(module, Layer._make((*order, *chosen, *[None] * (4 - len(chosen)), True)), named)
        if layer is not None:
            norm = norms[layer.before_mlp]
            ours = partial(forward, layer=layer, norm=norm, named=named)
            return Replacement(ours, f"add_{norm.kernel}", fuses=(layer.before_mlp,))
    return "its residual connections are not those of a pre-norm layer"


def _as_called(module: nn.Module, layer: Layer, named: tuple[str, ...]) -> Layer | None:
    """Return the layer, with the way it calls its attention, if that is what the module computes."""
    for returns_tuple, by_keyword in itertools.product((True, False), repeat=2):
        called = layer._replace(by_keyword=by_keyword)
        if _computes(module, called, named, returns_tuple):
            return called
    return None


def _computes(module: nn.Module, layer: Layer, named: tuple[str, ...], returns_tuple: bool) -> bool:
    """Return whether a module computes this layer, and calls its attention with the options it is called with."""
    seen = []

    def attend(*args: Tensor, **options: Any) -> Any:
        passed = {name: value for name, value in options.items() if value is not None and value is not False}
        x = args[0] if args else passed.pop("hidden_states")
        seen.append((len(args), passed))
        return (x.sin() + 0.1, None) if returns_tuple else x.sin() + 0.1

    norms = (layer.before_attention, layer.before_mlp, layer.after_attention, layer.after_mlp)
    stubs = {name: Stub(lambda x, place=place: (place + 2) * x + 1) for place, name in enumerate(norms) if name}
    stubs |= {layer.attention: Stub(attend), layer.mlp: Stub(lambda x: x.cos())}
    copy = stand_in(module, children=stubs)
    x, options = random(2, 3, HIDDEN), {name: f"value of {name}" for name in named}
    same = agree(
        lambda: type(module).forward(copy, x, **options),
        lambda: layer.plain(copy, x, layer.attend(copy, x, options)),
    )
    return same and len(seen) == 2 and seen[0] == seen[1]

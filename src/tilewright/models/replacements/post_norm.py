"""The ends of post-norm layers, as in BERT: the sum with the residual and the norm become one kernel.

norm([dropout](block(x)) + residual)
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from tilewright.models.forward import is_foreign
from tilewright.models.probe import LARGE, Stub, computes, forward_parameters, may_be_skipped, random, stand_in
from tilewright.models.replacements import Replacement
from tilewright.models.replacements.norm import Norm, identify

HIDDEN = 6


class Layer(NamedTuple):
    """The names of a layer's children."""

    block: str
    dropout: str | None
    norm: str

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        y = module.get_submodule(self.block)(x)
        return y if self.dropout is None else module.get_submodule(self.dropout)(y)

    def plain(self, module: nn.Module, y: Tensor, residual: Tensor) -> Tensor:
        return module.get_submodule(self.norm)(y + residual)


def forward(module: nn.Module, *args: Any, layer: Layer, norm: Norm, **kwargs: Any) -> Tensor:
    if len(args) != 2 or kwargs or not all(isinstance(arg, Tensor) for arg in args):
        return type(module).forward(module, *args, **kwargs)
    x, residual = args
    y, last = layer.run(module, x), module.get_submodule(layer.norm)
    if not may_be_skipped(last, norm.owner) or y.shape != residual.shape or not norm.takes(last, y, residual):
        return layer.plain(module, y, residual)
    return norm.add(last, y, residual)[0]


def find(module: nn.Module) -> Replacement | str | None:
    children = {name: child for name, child in module._modules.items() if child is not None}
    if len(children) not in (2, 3) or len(forward_parameters(module)) != 2:
        return None
    dropouts = [name for name, child in children.items() if isinstance(child, nn.Dropout)]
    norms = {name: norm for name, child in children.items() if (norm := identify(child))}
    blocks = [name for name in children if name not in dropouts and name not in norms]
    if (len(norms), len(blocks)) != (1, 1) or len(children) != 2 + len(dropouts):
        return None
    layer = Layer(blocks[0], dropouts[0] if dropouts else None, next(iter(norms)))
    if not _computes(module, layer):
        return "it is not norm(block(x) + residual)"
    if is_foreign(children[layer.norm]):
        return "something else has replaced the forward function of its norm"
    norm = norms[layer.norm]
    return Replacement(partial(forward, layer=layer, norm=norm), f"add_{norm.kernel}", fuses=(layer.norm,))


def _computes(module: nn.Module, layer: Layer) -> bool:
    stubs = {layer.block: Stub(lambda x: x.sin()), layer.norm: Stub(lambda x: 3 * x + 1)}
    stubs |= {layer.dropout: Stub(lambda x: 2 * x + 1)} if layer.dropout else {}
    copy, owner = stand_in(module, children=stubs), type(module)

    def theirs(x: Tensor) -> Any:
        return owner.forward(copy, x, x.cos())

    def ours(x: Tensor) -> Any:
        return layer.plain(copy, layer.run(copy, x), x.cos())

    return computes(copy, ours, [random(2, 3, HIDDEN, scale=scale) for scale in (1.0, LARGE)], theirs)

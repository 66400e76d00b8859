"""Transformer layers that add the residual before the norm of their MLP: the sum and the norm become one kernel.

total = x + [after](attention(norm(x)))
total + [after](mlp(norm(total)))

A module in brackets may be missing: another norm, or dropout.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from tilewright.models.forward import is_foreign
from tilewright.models.probe import LARGE, Stub, computes, forward_parameters, may_be_skipped, random, stand_in
from tilewright.models.replacements import Replacement
from tilewright.models.replacements.norm import Norm, identify

HIDDEN = 6
EXTRA = "an_option_of_no_layer"  # shows whether a layer passes on options that it does not know


class Argument(NamedTuple):
    """An argument of a layer's attention: its normed input, one of its own options, or a constant."""

    kind: str  # input, option or constant
    value: Any = None

    def of(self, x: Tensor, options: Mapping[str, Any]) -> Any:
        if self.kind == "input":
            return x
        return options[self.value] if self.kind == "option" else self.value


INPUT = Argument("input")


class Call(NamedTuple):
    """How a layer calls its attention."""

    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    passes_others: bool  # options that the layer does not name

    def __call__(self, attention: Any, x: Tensor, options: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
        args = [argument.of(x, options) for argument in self.args]
        kwargs = {name: argument.of(x, options) for name, argument in self.kwargs}
        found = attention(*args, **kwargs, **others)
        return found[0] if isinstance(found, tuple) else found


class Layer(NamedTuple):
    """The names of a layer's children."""

    attention: str
    mlp: str
    before_attention: str
    before_mlp: str
    after_attention: str | None
    after_mlp: str | None

    def attend(self, module: nn.Module, x: Tensor, call: Call, *options: Mapping[str, Any]) -> Tensor:
        attended = call(module._modules[self.attention], _run(module, self.before_attention, x), *options)
        return _run(module, self.after_attention, attended)

    def feed_forward(self, module: nn.Module, x: Tensor) -> Tensor:
        return _run(module, self.after_mlp, _run(module, self.mlp, x))

    def plain(self, module: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
        total = x + attended
        return total + self.feed_forward(module, _run(module, self.before_mlp, total))


def _run(module: nn.Module, name: str | None, x: Tensor) -> Tensor:
    return x if name is None else module._modules[name](x)  # type: ignore[misc]


class Signature(NamedTuple):
    """The parameters of a layer's forward function."""

    names: tuple[str, ...]  # that may be positional; the first is the input
    required: tuple[str, ...]
    defaults: dict[str, Any]
    refused: tuple[str, ...]  # options with which the layer computes something else

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name; None if the layer's own forward must take the call."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if len(given) < len(args) + len(kwargs) or any(name not in given for name in self.required):
            return None
        if any(name in given and not _is_same(given[name], self.defaults[name]) for name in self.refused):
            return None
        return self.defaults | given


def _is_same(value: Any, default: Any) -> bool:
    return value is default or ((value is None or value is False) and (default is None or default is False))


def forward(
    module: nn.Module, *args: Any, layer: Layer, call: Call, signature: Signature, norm: Norm, **kwargs: Any
) -> Tensor:
    options = signature.bind(args, kwargs)
    others = {k: v for k, v in kwargs.items() if k not in signature.defaults and k not in signature.required}
    if options is None or (others and not call.passes_others):
        return type(module).forward(module, *args, **kwargs)
    x = options[signature.required[0]]
    attended = layer.attend(module, x, call, options, others)
    second: Any = module._modules[layer.before_mlp]
    if not may_be_skipped(second, norm.owner) or not norm.takes(second, attended, x):
        return layer.plain(module, x, attended)
    normed, total = norm.add(second, attended, x)
    return total + layer.feed_forward(module, normed)


def find(module: nn.Module) -> Replacement | str | None:
    children = {name: child for name, child in module._modules.items() if child is not None}
    norms = {name: norm for name, child in children.items() if (norm := identify(child))}
    others = [name for name, child in children.items() if isinstance(child, nn.Dropout)]
    blocks = [name for name in children if name not in norms and name not in others]
    if len(blocks) != 2 or len(norms) < 2 or len(norms) + len(others) > 4:
        return None
    for layer in _layers(blocks, list(norms), others):
        for returns_tuple in (True, False):
            found = _Probe(module, layer, returns_tuple).find()
            if found is not None and is_foreign(children[layer.before_mlp]):
                return "something else has replaced the forward function of its second norm"
            if found is not None:
                call, signature = found
                norm = norms[layer.before_mlp]
                ours = partial(forward, layer=layer, call=call, signature=signature, norm=norm)
                return Replacement(ours, f"add_{norm.kernel}", fuses=(layer.before_mlp,))
    return "its residual connections are not those of a pre-norm layer"


def _layers(blocks: list[str], norms: list[str], others: list[str]) -> Iterator[Layer]:
    """Yield every arrangement of a layer's children in which each is used."""
    for order, before in itertools.product(itertools.permutations(blocks), itertools.permutations(norms, 2)):
        rest = [name for name in (*norms, *others) if name not in before]
        for after in itertools.product(rest if len(rest) > 1 else (*rest, None), repeat=2):
            if {*rest} <= {*after}:
                yield Layer._make((*order, *before, *after))


class _Value:
    """The value of an option of a layer that is probed: nothing can be computed with it, so it is passed on or not."""


class _Probe:
    """A stand-in of a layer, which shows whether it computes a form and how it calls its attention."""

    def __init__(self, module: nn.Module, layer: Layer, returns_tuple: bool):
        found = forward_parameters(module).values()
        parameters = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.names = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        self.options = {p.name: p.default for p in parameters if p.name not in self.names[:1]}
        self.extra = (EXTRA,) if any(p.kind is p.VAR_KEYWORD for p in found) else ()
        self.layer, self.owner, self.returns_tuple = layer, type(module), returns_tuple
        self.values = {name: _Value() for name in (*self.options, EXTRA)}
        self.calls: list[tuple[list[Any], dict[str, Any]]] = []
        around = sorted({name for name in layer[2:] if name is not None})
        children = {name: Stub(partial(_affine, factor=place + 2)) for place, name in enumerate(around)}
        self.copy = stand_in(module, children=children | {layer.attention: Stub(self._attend), layer.mlp: Stub(_mlp)})

    def find(self) -> tuple[Call, Signature] | None:
        """Return how the layer calls its attention, and its options; None if it computes something else."""
        required = tuple(name for name, default in self.options.items() if default is inspect.Parameter.empty)
        if not self.names or not self._computes(required):
            return None
        others = [name for name in self.options if name not in required]
        passed = [name for name in others if self._computes((*required, name))]
        if not self._computes((*required, *passed, *self.extra)):
            return None
        call = self._call()
        if call is None or not self._computes(required, call):
            return None
        defaults = {name: default for name, default in self.options.items() if name in others}
        refused = tuple(name for name in others if name not in passed)
        return call, Signature(self.names, (self.names[0], *required), defaults, refused)

    def _computes(self, given: tuple[str, ...], call: Call | None = None) -> bool:
        """Return whether the layer computes the form when it is given some options, with this call if there is one."""
        values = {name: self.values[name] for name in given}
        defaults = {name: default for name, default in self.options.items() if name not in given}

        def theirs(x: Tensor) -> Any:
            self.calls.clear()
            return self.owner.forward(self.copy, x, **values)

        def ours(x: Tensor) -> Any:
            (args, kwargs) = self.calls[0]
            repeat = call or Call(tuple(map(_repeat, args)), tuple((k, _repeat(v)) for k, v in kwargs.items()), False)
            result = self.layer.plain(self.copy, x, self.layer.attend(self.copy, x, repeat, defaults | values, {}))
            first, *rest = self.calls
            return result if rest == [first] else None

        return computes(self.copy, ours, [random(2, 3, HIDDEN), random(2, 3, HIDDEN, scale=LARGE)], theirs)

    def _call(self) -> Call | None:
        """Return the call of the last run, with the names of options in place of their values."""
        args, kwargs = self.calls[0]
        passes_others = kwargs.pop(EXTRA, None) is not None
        names = {value: name for name, value in self.values.items()}
        found = [_argument(value, names) for value in (*args, *kwargs.values())]
        if any(argument is None for argument in found):
            return None
        given: list[Any] = found
        return Call(tuple(given[: len(args)]), tuple(zip(kwargs, given[len(args) :], strict=True)), passes_others)

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        x = inputs[0]
        if any(value is not x for value in inputs):
            raise TypeError("attention of several tensors")
        self.calls.append(
            (
                [INPUT if value is x else value for value in args],
                {name: INPUT if value is x else value for name, value in kwargs.items()},
            )
        )
        attended = x.sin() + 0.1
        return (attended, None) if self.returns_tuple else attended


def _argument(value: Any, names: Mapping[Any, str]) -> Argument | None:
    if value is INPUT:
        return INPUT
    if isinstance(value, _Value):
        return Argument("option", names[value])
    return Argument("constant", value) if value is None or type(value) in (bool, int, float, str) else None


def _repeat(value: Any) -> Argument:
    return INPUT if value is INPUT else Argument("constant", value)


def _affine(x: Tensor, factor: int) -> Tensor:
    return factor * x + 1


def _mlp(x: Tensor) -> Tensor:
    return x.cos()

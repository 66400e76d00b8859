"""Language-model heads with their loss: in training, the logits are never all in memory.

The form is that of language models in transformers: a body, modules between (such as BERT's transform), a linear layer,
and the cross entropy of labels, which causal models shift. In training with labels the output has no logits. Without
labels, in evaluation, with an adapter or hooks on the head, or with a loss function of the user's, the model's own
forward runs.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from tilewright.models.probe import (
    BF16_TOLERANCE,
    TOLERANCE,
    Stub,
    agree,
    forward_parameters,
    is_plain,
    random,
    runs_as_written,
    stand_in,
)
from tilewright.models.replacements import Replacement
from tilewright.ops.loss.linear_cross_entropy import linear_cross_entropy

IGNORED = -100
HIDDEN, VOCABULARY = 6, 11  # sizes of the stand-in
ITEMS = "num_items_in_batch"
SHIFT_OPTIONS = ("shift_labels", "ignore_index")  # that only loss functions which shift labels take
NOTHING: dict[str, Any] = {}
BODY_IGNORES = ("labels", "logits_to_keep", ITEMS, *SHIFT_OPTIONS)


@dataclasses.dataclass(frozen=True)
class Head:
    """The parts of a model and what happens to its logits before the loss."""

    body: str
    path: tuple[tuple[str, type[nn.Module]], ...]  # from the model to the linear layer: names of children, and classes
    loss_function: Any
    named: tuple[str, ...]  # forward's parameters, for positional arguments
    takes_others: bool  # options that forward does not name
    scale: float = 1.0
    softcap: float | None = None
    shifts: bool = True  # labels, by one token
    takes_items: bool = True  # the number of items in the batch divides the sum of the losses
    is_wide: bool = True  # the loss is float32, whatever the dtype of the model
    between: tuple[str, ...] = ()  # modules beside the linear layer, in the order in which they are called
    output: Any = None  # the class of the model's outputs
    kept: tuple[str, ...] = ()  # fields of the body's outputs that the model returns

    def locate(self, module: nn.Module) -> tuple[nn.Module, Any] | None:
        """Return the linear layer and the module that calls it; None if something else is called on the way."""
        parent: Any = module
        at: Any = module
        for name, owner in self.path:
            parent, at = at, at._modules.get(name)
            if type(at) is not owner or not runs_as_written(at):
                return None
        return parent, at

    def loss(self, hidden: Tensor, parent: nn.Module, linear: Any, options: Mapping[str, Any]) -> Tensor:
        for name in self.between:
            hidden = parent._modules[name](hidden)  # type: ignore[misc]
        items = options.get(ITEMS) if self.takes_items else None
        labels, ignored = options.get("shift_labels"), options.get("ignore_index", IGNORED)
        if labels is None:
            labels = options["labels"]
            labels = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:] if self.shifts else labels
        flat = hidden.reshape(-1, hidden.shape[-1])
        loss = linear_cross_entropy(
            flat if self.scale == 1.0 else flat * self.scale,
            linear.weight,
            labels.reshape(-1).to(hidden.device),
            linear_bias=linear.bias,
            reduction="mean" if items is None else "sum",
            ignore_index=ignored,
            softcap=self.softcap,
            dtype=torch.float32,
        )
        if items is not None:
            loss = loss / (items.to(loss.device) if isinstance(items, Tensor) else items)
        return loss if self.is_wide else loss.to(hidden.dtype)


def forward(module: Any, *args: Any, head: Head, **kwargs: Any) -> Any:
    options = dict(zip(head.named, args, strict=False)) | kwargs
    is_valid = len(options) == len(args) + len(kwargs) and (head.takes_others or options.keys() <= {*head.named})
    found = head.locate(module) if is_valid else None
    if found is None or not _is_fusible(module, found[1], head, options):
        return type(module).forward(module, *args, **kwargs)
    outputs = module._modules[head.body](**{k: v for k, v in options.items() if k not in BODY_IGNORES})
    loss = head.loss(outputs.last_hidden_state, *found, options)
    return head.output(loss=loss, logits=None, **{name: getattr(outputs, name, None) for name in head.kept})


def _is_fusible(module: Any, linear: Any, head: Head, options: dict[str, Any]) -> bool:
    kept = options.get("logits_to_keep")
    return (
        module.training
        and options.get("labels") is not None
        and options.get("return_dict", module.config.return_dict) is not False
        and not options.get("output_router_logits", getattr(module.config, "output_router_logits", False))
        and module.loss_function is head.loss_function
        and is_plain(linear.weight)
        and (kept is None or (isinstance(kept, int) and kept == 0))
        and (head.shifts or all(options.get(name) is None for name in SHIFT_OPTIONS))
    )


def find(module: Any) -> Replacement | str | None:
    parameters = forward_parameters(module)
    if "labels" not in parameters or not hasattr(type(module), "loss_function"):
        return None
    linear = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    body = getattr(module, "base_model_prefix", "")
    names = next((name.split(".") for name, one in module.named_modules() if one is linear and name), [])
    if not names or body not in module._modules or names[0] == body:
        return "it has no linear head beside its body"
    if type(linear) is not nn.Linear:  # quantised, parametrized, or with an adapter
        return f"its head is a {type(linear).__name__}, not a torch.nn.Linear"
    ways = [".".join(names[: n + 1]) for n in range(len(names))]
    path = tuple((name, type(module.get_submodule(way))) for name, way in zip(names, ways, strict=True))
    named = tuple(n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
    takes_others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    softcap = getattr(module.config, "final_logit_softcapping", None)
    head = _Probe(module, Head(body, path, module.loss_function, named, takes_others, softcap=softcap)).find()
    if head is None:
        return "its loss is not the cross entropy of a linear layer"
    return Replacement(partial(forward, head=head), "linear_cross_entropy", fuses=tuple(ways))


def _scales(module: Any) -> list[float]:
    """Return factors that may be applied to the logits: 1, and every number in the configuration named after them."""
    found = [v for k, v in vars(module.config).items() if "logit" in k and type(v) in (int, float) and v]
    return list(dict.fromkeys([1.0, *(float(v) for v in found), *(1.0 / v for v in found)]))


class _Outputs(tuple):
    """The outputs of a stand-in's body: the hidden states, and None under every other name."""

    def __new__(cls, hidden: Tensor) -> _Outputs:
        return super().__new__(cls, (hidden,))

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def _tiny(head: nn.Linear) -> nn.Linear:
    """Return a head of the stand-in's sizes."""
    made = nn.Linear(HIDDEN, VOCABULARY, bias=head.bias is not None)
    made.weight.data = random(VOCABULARY, HIDDEN, scale=2.0)
    if head.bias is not None:
        made.bias.data = random(VOCABULARY)
    return made


class _Probe:
    """A stand-in of a model, which shows what it does between its body and its loss."""

    def __init__(self, module: Any, head: Head):
        self.owner, self.head, self.scales = type(module), head, _scales(module)
        self.hidden = random(2, 5, HIDDEN)
        labels = torch.tensor([[1, 2, 3, IGNORED, 4], [10, 0, 0, 5, IGNORED]])
        given = {"input_ids": labels.clamp(min=0), "attention_mask": labels * 0 + 1, "position_ids": labels * 0}
        self.given = {name: tensor for name, tensor in given.items() if name in head.named}
        self.labels = labels
        self.called: list[str] = []
        self.between: tuple[str, ...] = ()  # modules that the model called before the linear layer
        self.outputs: Any = None
        parents = [module]
        for name, _ in head.path[:-1]:
            parents.append(parents[-1]._modules[name])
        *_, (linear, _) = head.path
        self.linear = _tiny(parents[-1]._modules[linear])
        made: Any = self.linear
        self.parents: list[Any] = []  # what contains the linear layer, innermost first
        config = copy.copy(module.config)
        config.vocab_size = VOCABULARY
        for parent, (name, _) in zip(reversed(parents), reversed(head.path), strict=True):
            children = {name: made} | (self._between(parent, linear) if made is self.linear else {})
            children |= {head.body: Stub(self._body)} if parent is module else {}
            sizes: dict[str, Any] = {"vocab_size": VOCABULARY} if hasattr(parent, "vocab_size") else {}
            sizes |= {"config": config} if hasattr(parent, "config") else {}
            made = stand_in(parent, children=children, **sizes)
            self.parents.append(made)

    def _between(self, parent: nn.Module, linear: str) -> dict[str, nn.Module]:
        """Return stand-ins of the linear layer's neighbors, which tell when they are called."""
        others = [name for name in parent._modules if name not in (linear, self.head.body)]
        made: dict[str, nn.Module] = {}
        for place, name in enumerate(others):
            child = parent._modules[name]
            if child is not None:
                made[name] = child if isinstance(child, _Loss) else Stub(partial(self._call, name, place + 2))
        return made

    def _call(self, name: str, factor: int, x: Tensor) -> Tensor:
        self.called.append(name)
        return factor * x.tanh() + 1

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states, if the body is given what the model is given and nothing else."""
        named = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        rest = [tensor for name, tensor in self.given.items() if name not in named]
        unnamed = [value for value in args if isinstance(value, Tensor)]
        if any(value is not self.given.get(name) for name, value in named.items()):
            raise TypeError("the body is given other tensors than the model")
        if [*map(id, unnamed)] != [*map(id, rest)]:
            raise TypeError("the body is given other tensors than the model")
        return _Outputs(self.hidden)

    def find(self) -> Head | None:
        """Return the head that computes the same loss; None if there is none."""
        for scale, shifts in itertools.product(self.scales, (True, False)):
            head = dataclasses.replace(self.head, scale=scale, shifts=shifts)
            if self._computes(head):
                break
        else:
            return None
        head = dataclasses.replace(head, between=self.between, output=type(self.outputs))
        kept = tuple(f.name for f in dataclasses.fields(head.output) if f.name not in ("loss", "logits"))
        head = dataclasses.replace(head, kept=kept)
        if head.takes_others:
            ways = [dataclasses.replace(head, takes_items=takes) for takes in (True, False)]
            head = next((way for way in ways if self._computes(way, {ITEMS: 3})), None)
        self.hidden, _ = self.hidden.bfloat16(), self.linear.bfloat16()
        ways = [dataclasses.replace(head, is_wide=wide) for wide in (True, False)] if head else []
        return next((way for way in ways if self._computes(way, tolerance=BF16_TOLERANCE)), None)

    def _computes(self, head: Head, more: Mapping[str, Any] = NOTHING, tolerance: float = TOLERANCE) -> bool:
        """Return whether the stand-in computes a head's loss, when it is given more options."""

        def ours() -> Tensor:
            called = dataclasses.replace(head, between=self.between)
            return called.loss(self.hidden, self.parents[0], self.linear, {"labels": self.labels, **more})

        return agree(partial(self._theirs, **more), ours, tolerance)

    def _theirs(self, **options: Any) -> Tensor:
        self.called.clear()
        self.outputs = self.owner.forward(self.parents[-1], **self.given, labels=self.labels, **options)
        self.between = tuple(self.called)
        return self.outputs.loss

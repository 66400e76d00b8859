"""Language-model heads with their loss: in training, the logits are never all in memory.

The form is that of causal language models in transformers: a body, a linear head, and a loss over shifted labels. In
training with labels the output has no logits. Without labels, in evaluation, with an adapter or hooks on the head, or
with a loss function of the user's, the model's own forward runs.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.probe import Stub, agree, forward_parameters, has_hooks, is_plain, random, stand_in
from tilewright.models.replacements import Replacement
from tilewright.ops.loss.linear_cross_entropy import linear_cross_entropy

IGNORED = -100
HIDDEN, VOCABULARY = 6, 11  # sizes of the stand-in
BODY_IGNORES = ("labels", "logits_to_keep", "num_items_in_batch", "shift_labels", "ignore_index")


@dataclasses.dataclass(frozen=True)
class Head:
    """The parts of a model and what happens to its logits before the loss."""

    body: str
    linear: str
    loss_function: Any
    named: tuple[str, ...]  # forward's parameters, for positional arguments
    scale: float = 1.0
    softcap: float | None = None
    output: Any = None  # the class of the model's outputs
    kept: tuple[str, ...] = ()  # fields of the body's outputs that the model returns


def forward(module: Any, *args: Any, head: Head, **kwargs: Any) -> Any:
    options = dict(zip(head.named, args, strict=False)) | kwargs
    linear = module._modules[head.linear]
    if not _is_fusible(module, linear, head, options):
        return type(module).forward(module, *args, **kwargs)
    outputs = module._modules[head.body](**{k: v for k, v in options.items() if k not in BODY_IGNORES})
    hidden = outputs.last_hidden_state
    loss = fused_loss(hidden, linear.weight, linear.bias, head, **options)
    return head.output(loss=loss, logits=None, **{name: getattr(outputs, name, None) for name in head.kept})


def _is_fusible(module: Any, linear: nn.Module, head: Head, options: dict[str, Any]) -> bool:
    return (
        module.training
        and options.get("labels") is not None
        and options.get("return_dict", module.config.return_dict) is not False
        and not options.get("output_router_logits", getattr(module.config, "output_router_logits", False))
        and module.loss_function is head.loss_function
        and type(linear) is nn.Linear
        and not has_hooks(linear)
        and "forward" not in vars(linear)
        and is_plain(linear.weight)
        and options.get("logits_to_keep", 0) in (0, None)
    )


def fused_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    head: Head,
    *,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the loss of predicting each token from those before it."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss = linear_cross_entropy(
        flat if head.scale == 1.0 else flat * head.scale,
        weight,
        shift_labels.reshape(-1).to(hidden.device),
        linear_bias=bias,
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        softcap=head.softcap,
        dtype=torch.float32,
    )
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)


def find(module: Any) -> Replacement | str | None:
    parameters = forward_parameters(module)
    if "labels" not in parameters or not hasattr(type(module), "loss_function"):
        return None
    linear = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    name = next((name for name, child in module._modules.items() if child is linear and child is not None), None)
    body = getattr(module, "base_model_prefix", "")
    if name is None or body not in module._modules:
        return "it has no linear head beside its body"
    if not isinstance(linear, nn.Linear):  # quantised, or with an adapter
        return f"its head is a {type(linear).__name__}, not a torch.nn.Linear"
    named = tuple(n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
    for scale in _scales(module):
        head = Head(body, name, module.loss_function, named, scale, _softcap(module))
        if output := _computes(module, head):
            kept = tuple(f.name for f in dataclasses.fields(output) if f.name not in ("loss", "logits"))
            head = dataclasses.replace(head, output=output, kept=kept)
            return Replacement(partial(forward, head=head), "linear_cross_entropy", fuses=(name,))
    return "its loss is not the cross entropy of a linear layer over shifted labels"


def _softcap(module: Any) -> float | None:
    return getattr(module.config, "final_logit_softcapping", None)


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


def _computes(module: Any, head: Head) -> type | None:
    """Return the class of the model's outputs if its loss is the fused one, else None."""
    hidden, labels = random(2, 5, HIDDEN), torch.tensor([[1, 2, 3, IGNORED, 4], [10, 0, 0, 5, IGNORED]])
    linear = nn.Linear(HIDDEN, VOCABULARY, bias=module._modules[head.linear].bias is not None)
    linear.weight.data = random(VOCABULARY, HIDDEN, scale=2.0)
    if linear.bias is not None:
        linear.bias.data = random(VOCABULARY)
    config = copy.copy(module.config)
    config.vocab_size = VOCABULARY
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY} if hasattr(module, "vocab_size") else {}
    body = Stub(lambda *_, **__: _Outputs(hidden))
    stand = stand_in(module, children={head.body: body, head.linear: linear}, config=config, **sizes)
    outputs: list[Any] = []

    def theirs(**options: Any) -> Tensor:
        outputs.append(type(module).forward(stand, input_ids=labels.clamp(min=0), labels=labels, **options))
        return outputs[-1].loss

    for options in ({}, {"num_items_in_batch": 3}):
        ours = partial(fused_loss, hidden, linear.weight, linear.bias, head, labels=labels, **options)
        if not agree(partial(theirs, **options), ours):
            return None
    return type(outputs[0])

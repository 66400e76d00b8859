"""The autograd node of losses whose forward also computes the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.loss._plans import scale_in_place
from tilewright.runtime.operator import fast_apply


def fused_apply(
    forward: Callable[..., tuple[Any, Sequence[Tensor | None]]],
    save: Callable[..., None],
    backward: Callable[..., Sequence[Any]],
    tensors: Sequence[int],
) -> Callable[..., Tensor]:
    """Return `apply` of an autograd node whose forward also computes the gradients, for an incoming gradient of 1.

    `forward(ctx, *args)` returns the outputs, of which the first is the loss, and the gradients of the first arguments.
    `save` and `backward` are those of the operator; `tensors` are the positions of the arguments that are tensors.
    """

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            output, ctx.gradients = forward(ctx, *args)
            save(ctx, args, output)
            return output[0]

        @staticmethod
        def backward(ctx: Any, dloss: Tensor | None) -> Any:  # type: ignore[override]
            # Autograd may hand the gradients out without a copy, so they serve one backward. A second one recomputes.
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None or torch.is_grad_enabled() or dloss is None:
                gradients = backward(ctx, dloss)
            else:
                for gradient in gradients:
                    if gradient is not None:
                        scale_in_place(gradient, dloss)
            return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))

    return fast_apply(Node, tensors)

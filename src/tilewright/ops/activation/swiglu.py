"""SwiGLU: y = silu(gate) up, the gate of most language models.

Torch writes silu(gate) to memory and reads it again. Gate and up are two tensors or, packed, the halves of one: then
rows are read where they lie, and the gradient is one packed tensor too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.activation._gated import SHAPES, backward_cost_of, cost_of, fits, gated, halves, inputs
from tilewright.spec import Cost, Op, points


def reference(gate: Tensor, up: Tensor | None) -> Tensor:
    gate, up = halves(gate, up)
    return torch.nn.functional.silu(gate) * up


def cost(gate: Tensor, up: Tensor | None) -> Cost:
    return cost_of("silu", gate, up)


def backward_cost(gate: Tensor, up: Tensor | None) -> Cost:
    return backward_cost_of("silu", gate, up)


op = Op(
    "swiglu",
    reference,
    cost,
    inputs=inputs,
    check=[*points(**SHAPES, packed=(False, False, False)), *points(**SHAPES, packed=(True, True, True))],
    bench=points(M=(4096, 4096, 16384, 16384), N=(4096, 4096, 14336, 14336), packed=(False, True, False, True)),
    backward_cost=backward_cost,
    batch="M",
)


@op.kernel("triton", language="triton")
def triton_swiglu(gate: Tensor, up: Tensor | None) -> Tensor:
    return gated(gate, up, "silu")


SMALLEST = 0  # elements: one launch costs the host less than torch's two, and no input is too small for that


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up. Without up, `gate` is packed: its last dimension holds the gate, then up."""
    if fits(SMALLEST, gate, up):
        return gated(gate, up, "silu")
    return reference(gate, up)


op.public(swiglu)

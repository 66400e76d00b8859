"""GEGLU: y = gelu(gate) up, of two tensors or, packed, of the halves of one; gelu exact or by tanh."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.activation._gated import SHAPES, backward_cost_of, cost_of, dispatch, gated, inputs, split_gate
from tilewright.ops.activation._unary import GELUS
from tilewright.runtime.crossovers import Crossover, always
from tilewright.spec import Cost, Op, grid, points

__all__ = ["geglu"]


def reference(gate: Tensor, up: Tensor | None, approximate: str) -> Tensor:
    gate, up = split_gate(gate, up)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def cost(gate: Tensor, up: Tensor | None, approximate: str) -> Cost:
    return cost_of(GELUS[approximate], gate, up)


def backward_cost(gate: Tensor, up: Tensor | None, approximate: str) -> Cost:
    return backward_cost_of(GELUS[approximate], gate, up)


op = Op(
    "geglu",
    reference,
    cost,
    inputs=lambda draw: (*inputs(draw), draw["approximate"]),
    check=[
        *points(**SHAPES, packed=(True, False, True), approximate=("none", "tanh", "none")),
        *points(**SHAPES, packed=(False, True, False), approximate=("tanh", "none", "tanh")),
    ],
    bench=[
        *points(M=(4096,), N=(4096,), packed=(False,), approximate=("tanh",)),
        *grid(M=(16384,), N=(14336,), packed=(False, True), approximate=("tanh", "none")),
    ],
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "intermediate"},
)


@op.kernel("triton", language="triton")
def triton_geglu(gate: Tensor, up: Tensor | None, approximate: str) -> Tensor:
    return gated(gate, up, GELUS[approximate])


CROSSOVER = Crossover("geglu", always)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """gelu(gate) * up. Without up, `gate` is packed: its last dimension holds the gate, then up."""
    y = dispatch(CROSSOVER, GELUS[approximate], gate, up) if approximate in GELUS else None
    return reference(gate, up, approximate) if y is None else y


op.public(geglu)

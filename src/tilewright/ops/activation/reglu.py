"""ReGLU: y = relu(gate) up, of two tensors or, packed, of the halves of one."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.activation._gated import dispatch, gated, gated_op, split_gate
from tilewright.runtime.crossovers import Crossover, always

__all__ = ["reglu"]


def reference(gate: Tensor, up: Tensor | None) -> Tensor:
    gate, up = split_gate(gate, up)
    return torch.nn.functional.relu(gate) * up


op = gated_op("reglu", "relu", reference)


@op.kernel("triton", language="triton")
def triton_reglu(gate: Tensor, up: Tensor | None) -> Tensor:
    return gated(gate, up, "relu")


CROSSOVER = Crossover("reglu", always)


def reglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """relu(gate) * up. Without up, `gate` is packed: its last dimension holds the gate, then up."""
    y = dispatch(CROSSOVER, "relu", gate, up)
    return reference(gate, up) if y is None else y


op.public(reglu)

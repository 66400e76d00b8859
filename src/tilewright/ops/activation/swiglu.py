"""SwiGLU: y = silu(gate) up, the gate of most language models.

torch writes silu(gate) to memory and reads it again. Gate and up are two tensors or, packed, the halves of one: then
rows are read in place, and the gradient is one packed tensor too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.activation._gated import dispatch, gated, gated_op, split_gate
from tilewright.runtime.crossovers import Crossover, always

__all__ = ["swiglu"]


def reference(gate: Tensor, up: Tensor | None) -> Tensor:
    gate, up = split_gate(gate, up)
    return torch.nn.functional.silu(gate) * up


op = gated_op("swiglu", "silu", reference)


@op.kernel("triton", language="triton")
def triton_swiglu(gate: Tensor, up: Tensor | None) -> Tensor:
    return gated(gate, up, "silu")


CROSSOVER = Crossover("swiglu", always)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up. Without up, `gate` is packed: its last dimension holds the gate, then up."""
    y = dispatch(CROSSOVER, "silu", gate, up)
    return reference(gate, up) if y is None else y


op.public(swiglu)

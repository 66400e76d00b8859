"""What a call does beside its launches: bytes between the host and the GPU, and products that torch's library makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

LINK = 64e9  # bytes a second, one way, at most: PCIe 5 with 16 lanes
MOVES = {
    Tensor.cpu: "cpu()",
    Tensor.cuda: "cuda()",
    Tensor.item: "item()",
    Tensor.numpy: "numpy()",
    Tensor.tolist: "tolist()",
}
PLACES = {Tensor.cpu, Tensor.cuda, Tensor.to}
PRODUCTS = {
    *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, functional.linear),
    *(Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.addmm_, Tensor.__matmul__),
    functional.scaled_dot_product_attention,
}


@dataclass
class Besides:
    bytes: int = 0  # between host and GPU
    moves: list[str] = field(default_factory=list)  # the calls that moved them
    products: int = 0  # calls of torch's

    @property
    def us(self) -> float:
        """Of the way between host and GPU."""
        return self.bytes / LINK * 1e6


class _Watch(TorchFunctionMode):
    def __init__(self, seen: Besides):
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = MOVES.get(func) or (_place_asked(args, kwargs or {}) if func is Tensor.to else None)
        if name:
            self._seen.bytes += args[0].nbytes
            self._seen.moves.append(name)
            if func in PLACES:  # nothing can go there: it stays, cast if that was asked too, and the call goes on
                kinds = [a for a in (*args[1:], *(kwargs or {}).values()) if isinstance(a, torch.dtype)]
                return args[0].to(*kinds) if kinds else args[0]
        self._seen.products += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def _place_asked(args: Any, kwargs: dict[str, Any]) -> str | None:
    """`to(device)` where the tensor is elsewhere."""
    for wanted in (*args[1:2], kwargs.get("device")):
        if isinstance(wanted, str | torch.device):
            kind = torch.device(wanted).type
            return f"to({kind})" if kind != args[0].device.type else None
    return None


def watched(fn: Callable[..., Any], seen: Besides) -> Callable[..., Any]:
    """The function, noting in `seen` what it does."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Watch(seen):
            return fn(*args, **kwargs)

    return call

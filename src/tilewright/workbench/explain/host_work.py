"""What a call does beside its launches: bytes between the host and the GPU, products that torch's library makes, and
other work of torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tilewright.worker.operators import TORCHS, Mode

LINK = 64e9  # bytes a second, one way, at most: PCIe 5 with 16 lanes
MOVES = {
    Tensor.cpu: "cpu()",
    Tensor.cuda: "cuda()",
    Tensor.item: "item()",
    Tensor.numpy: "numpy()",
    Tensor.tolist: "tolist()",
}
MANY = 2**14  # elements, from which an operator's work is worth a word
ALLOCATES = ("empty", "new_empty", "detach", "alias")
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
    others: list[str] = field(default_factory=list)  # torch's operators that compute, or copy, much

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


class _Operators(Mode):
    """Notes those of torch that do much."""

    def __init__(self, seen: Besides):
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        sizes = [a.numel() for a in pytree.tree_leaves((args, result)) if isinstance(a, Tensor)]
        is_work = func.namespace in TORCHS and not func.is_view and not name.startswith(ALLOCATES)
        if is_work and max(sizes, default=0) > MANY:
            self._seen.others.append(name)
        return result


def _place_asked(args: Any, kwargs: dict[str, Any]) -> str | None:
    """`to(device)` where the tensor is elsewhere."""
    for wanted in (*args[1:2], kwargs.get("device")):
        if isinstance(wanted, str | torch.device):
            kind = torch.device(wanted).type
            return f"to({kind})" if kind != args[0].device.type else None
    return None


def watched(fn: Callable[..., Any], seen: Besides, *, operators: bool = False) -> Callable[..., Any]:
    """The function, noting in `seen` what it does; which operators of torch it calls only if asked."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Watch(seen), _Operators(seen) if operators else nullcontext():
            return fn(*args, **kwargs)

    return call

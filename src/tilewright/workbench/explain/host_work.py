"""Record the host work of a call besides our launches: host-device copies, library GEMMs, other torch operators."""

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

from tilewright.worker.operators import TORCH_NAMESPACES, Mode

PCIE_BANDWIDTH = 64e9  # bytes per second in one direction: PCIe 5.0 x16
TRANSFERS = {
    Tensor.cpu: "cpu()",
    Tensor.cuda: "cuda()",
    Tensor.item: "item()",
    Tensor.numpy: "numpy()",
    Tensor.tolist: "tolist()",
}
LARGE = 2**14  # elements; smaller operators are ignored
NO_KERNEL = ("empty", "new_empty", "detach", "alias")
DEVICE_CASTS = {Tensor.cpu, Tensor.cuda, Tensor.to}
GEMMS = {
    *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, functional.linear),
    *(Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.addmm_, Tensor.__matmul__),
    functional.scaled_dot_product_attention,
}


@dataclass
class HostWork:
    bytes: int = 0  # copied between host and GPU
    transfers: list[str] = field(default_factory=list)  # the calls that copied them
    gemms: int = 0  # library calls
    torch_ops: list[str] = field(default_factory=list)  # operators that compute on, or copy, large tensors

    @property
    def transfer_us(self) -> float:
        """The minimum time of the copies between host and GPU."""
        return self.bytes / PCIE_BANDWIDTH * 1e6


class _Functions(TorchFunctionMode):
    """Count host-device copies and library GEMMs."""

    def __init__(self, found: HostWork):
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = TRANSFERS.get(func) or (_device_cast(args, kwargs or {}) if func is Tensor.to else None)
        if name:
            self._found.bytes += args[0].nbytes
            self._found.transfers.append(name)
            if func in DEVICE_CASTS:  # there is no such device here: only the dtype is converted
                kinds = [a for a in (*args[1:], *(kwargs or {}).values()) if isinstance(a, torch.dtype)]
                return args[0].to(*kinds) if kinds else args[0]
        self._found.gemms += func in GEMMS
        return func(*args, **(kwargs or {}))


class _Operators(Mode):
    """Record the torch operators that work on large tensors."""

    def __init__(self, found: HostWork):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        sizes = [a.numel() for a in pytree.tree_leaves((args, result)) if isinstance(a, Tensor)]
        is_work = func.namespace in TORCH_NAMESPACES and not func.is_view and not name.startswith(NO_KERNEL)
        if is_work and max(sizes, default=0) > LARGE:
            self._found.torch_ops.append(name)
        return result


def _device_cast(args: Any, kwargs: dict[str, Any]) -> str | None:
    """Return "to(device)" for a call of `to` that changes the device."""
    for wanted in (*args[1:2], kwargs.get("device")):
        if isinstance(wanted, str | torch.device):
            kind = torch.device(wanted).type
            return f"to({kind})" if kind != args[0].device.type else None
    return None


def record_host_work(fn: Callable[..., Any], found: HostWork, *, operators: bool = False) -> Callable[..., Any]:
    """Wrap a function to record its host work in `found`, torch operators only with `operators`."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Functions(found), _Operators(found) if operators else nullcontext():
            return fn(*args, **kwargs)

    return call

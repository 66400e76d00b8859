"""Tensor arguments of a kernel, and the address ranges in which their storages lie.

The upper 16 bits of an address hold the number of the argument, the lower 48 an offset into its storage, so a pointer
never loses the tensor it derives from: an out-of-bounds access cannot read a neighbouring tensor.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

SLOT_BITS = 48  # address bits below the argument number
SLOT_ORIGIN = 1 << 47  # offset of a storage's first byte in its slot, so that negative offsets stay in the slot


class Buffer:
    """One storage, shared by all arguments that are views of it."""

    def __init__(self, tensor: Tensor, initialized: np.ndarray | None):
        self.initialized = initialized  # memory from torch.empty: a mask of the bytes written so far
        self.storage = tensor.untyped_storage()
        self.on_cpu = self.storage if self.storage.device.type == "cpu" else self.storage.cpu()
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(self.on_cpu).numpy()
        self.unit = 8  # bytes of the smallest element type among the arguments; accesses are tracked per unit
        self.written = False

    def typed(self, itemsize: int) -> np.ndarray:
        whole = len(self.bytes) // itemsize * itemsize
        return self.bytes[:whole].view(f"u{itemsize}")

    def unwritten(self, index: np.ndarray, itemsize: int) -> np.ndarray | None:
        """Return which of these elements have a byte that was never written; None: none of them."""
        if self.initialized is None or not len(self.initialized):
            return None
        whole = self.initialized[: len(self.initialized) // itemsize * itemsize].view(f"u{itemsize}")
        unwritten = whole[index] != np.frombuffer(b"\1" * itemsize, whole.dtype)[0]
        return unwritten if unwritten.any() else None

    def copy_back(self) -> None:
        if self.written and self.on_cpu is not self.storage:
            self.storage.copy_(self.on_cpu)


class Argument:
    """A tensor passed to a kernel."""

    def __init__(self, name: str, tensor: Tensor, buffer: Buffer, slot: int):
        self.name = name
        self.tensor = tensor
        self.buffer = buffer
        self.itemsize = tensor.element_size()
        self.storage_address = (slot << SLOT_BITS) + SLOT_ORIGIN
        self.first_byte = int(tensor.storage_offset()) * self.itemsize
        self.span = 0  # elements from the first to the last in memory
        self.is_dense = True  # the view has no gaps
        if tensor.numel():
            dims = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s and n > 1)
            self.span = sum((n - 1) * s for s, n in dims) + 1
            self.is_dense = all(s == math.prod(n for _, n in dims[:dim]) for dim, (s, _) in enumerate(dims))
        self.end_byte = self.first_byte + self.span * self.itemsize
        self._occupied: np.ndarray | None = None

    @property
    def address(self) -> int:
        return self.storage_address + self.first_byte

    @property
    def occupied(self) -> np.ndarray:
        """A mask of the elements of the span that belong to the tensor; a strided view has gaps."""
        if self._occupied is None:
            self._occupied = np.zeros(self.span, bool)
            if self.span:
                self.shaped(self._occupied)[...] = True
        return self._occupied

    def shaped(self, per_element: np.ndarray) -> np.ndarray:
        """Return an array over the span as a view with the tensor's shape."""
        strides = [s * per_element.itemsize for s in self.tensor.stride()]
        return np.lib.stride_tricks.as_strided(per_element, self.tensor.shape, strides)

    def index(self, element: int) -> tuple[int, ...]:
        """Return the tensor index of an element of the span, or the element's offset if it has no index."""
        if not 0 <= element < self.span or not (self.is_dense or self.occupied[element]):
            return (element,)
        index: dict[int, int] = {}
        strides = [0 if n == 1 else s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True)]
        for dim in sorted(range(len(strides)), key=lambda d: -strides[d]):
            index[dim], element = divmod(element, strides[dim]) if strides[dim] else (0, element)
        return tuple(index[dim] for dim in range(len(strides)))

    def describe(self, element: int) -> str:
        index = self.index(element)
        return f"`{self.name}[{', '.join(map(str, index))}]`" if index else f"`{self.name}`"

    def describe_outside(self, element: int, itemsize: int) -> str:
        """Describe an access of `itemsize` bytes at an element that reaches outside of the tensor."""
        if not self.span:
            return f"`{self.name}`, which is empty"
        strides = "" if self.tensor.is_contiguous() else f", strides {self.tensor.stride()}"
        view = f"(shape {tuple(self.tensor.shape)}{strides})"
        if not 0 <= element < self.span:
            return f"element {element} of `{self.name}`, whose elements are 0 to {self.span - 1} {view}"
        if itemsize > self.itemsize:
            return f"{itemsize} bytes from element {element} of `{self.name}`, of which some lie outside {view}"
        return f"element {element} of `{self.name}`, a gap in the view {view}"

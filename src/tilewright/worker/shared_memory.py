"""GPU memory that a parent shares with one child: tensors pass between them without leaving the GPU.

The memory is an allocation of its own, so the child cannot read what else the parent keeps on the GPU. It is passed on
as a file descriptor, which needs no rights that a sandbox takes away.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; that of torch's own allocations
PINNED, POSIX_FILE, DEVICE, READ_WRITE = 1, 1, 1, 3  # values in the driver's enumerations


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class SharedMemory:
    """A range of GPU memory, mapped into this process. `file` is the descriptor by which another can map it."""

    def __init__(self, size: int, file: int | None = None):
        """Allocate `size` bytes, or map those that a descriptor stands for; the descriptor is closed with it."""
        torch.cuda.synchronize()  # there has to be a context
        self._driver = ctypes.CDLL("libcuda.so.1")
        device = torch.cuda.current_device()
        location = _Location(DEVICE, device)
        handle = ctypes.c_uint64()
        if file is None:
            properties = _Properties(PINNED, POSIX_FILE, location)
            granularity = ctypes.c_size_t()
            self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0)
            size = -(-max(size, 1) // granularity.value) * granularity.value
            self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), _u64(0))
            found = ctypes.c_int()
            try:
                self._call("cuMemExportToShareableHandle", ctypes.byref(found), handle, POSIX_FILE, _u64(0))
            except OSError:
                self._driver.cuMemRelease(handle)
                raise
            file = found.value
        else:
            self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(file), POSIX_FILE)
        self.size, self.file = size, file
        self._address = ctypes.c_uint64()
        length = ctypes.c_size_t(size)
        access = _Access(location, READ_WRITE)
        try:
            self._call("cuMemAddressReserve", ctypes.byref(self._address), length, ctypes.c_size_t(0), _u64(0), _u64(0))
            self._call("cuMemMap", self._address, length, ctypes.c_size_t(0), handle, _u64(0))
            self._call("cuMemSetAccess", self._address, length, ctypes.byref(access), ctypes.c_size_t(1))
        finally:
            self._driver.cuMemRelease(handle)  # the mapping keeps the memory
        interface = {"shape": (size,), "typestr": "|u1", "data": (self._address.value, False), "version": 2}
        self._bytes: Tensor | None = torch.as_tensor(_Array(interface), device=f"cuda:{device}")

    def write(self, tensors: Sequence[Tensor], start: int = 0) -> list[int] | None:
        """Copy tensors into the memory from `start` on, and return the offset of each; None if they do not fit."""
        offsets = []
        for tensor in tensors:
            offsets.append(start)
            start = aligned(start + tensor.nbytes)
        if start > self.size:
            return None
        for offset, tensor in zip(offsets, tensors, strict=True):
            if tensor.numel():
                self.view(offset, tensor.dtype, tensor.shape).copy_(tensor)
        torch.cuda.synchronize()
        return offsets

    def view(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return the tensor at an offset, in the shared memory itself. Raises ValueError if it is not inside."""
        length = dtype.itemsize
        for size in shape:
            length *= size
        if offset < 0 or offset % ALIGNMENT or min(shape, default=0) < 0 or offset + length > self.size:
            raise ValueError("a tensor outside of the shared memory")
        assert self._bytes is not None
        return self._bytes[offset : offset + length].view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Unmap the memory. It is free when the other process has ended too."""
        if self._bytes is not None:
            torch.cuda.synchronize()
            self._bytes = None
            self._driver.cuMemUnmap(self._address, ctypes.c_size_t(self.size))
            self._driver.cuMemAddressFree(self._address, ctypes.c_size_t(self.size))
            os.close(self.file)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise OSError(code, f"{name} failed with code {code}")


class _Array:
    def __init__(self, interface: dict[str, Any]):
        self.__cuda_array_interface__ = interface


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _u64(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)

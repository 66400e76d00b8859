"""Launching a Triton kernel at little cost to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

LARGEST_INT32 = 2**31 - 1


class Launcher:
    """A Triton kernel that remembers what it was compiled to.

    `kernel[grid](…)` works out on every call what the arguments are specialised on, by way of a text. Here a tuple of
    the same facts (dtypes, alignment, whether a size is 1, a multiple of 16 or long) finds the machine code. The
    kernel's constexpr parameters must stand last; they and the compiler's options are given by name.
    """

    def __init__(self, kernel: Any):
        self.kernel: JITFunction = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._constants = [None] * sum(parameter.is_constexpr for parameter in kernel.params)

    def __call__(self, grid: tuple[int, ...], *args: Any, **config: Any) -> None:
        device = args[0].get_device()
        if device < 0 or knobs.runtime.launch_enter_hook.calls:  # interpreted, or watched by a profiler
            self.kernel[grid](*args, **config)
            return
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(grid, *args, **config)
            return
        key: list[Any] = [device, *config.values()]
        values: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor):
                address = arg.data_ptr()
                values.append(address)
                key.append((arg.dtype, address % 16))
            elif type(arg) is int:
                values.append(arg)
                key.append((arg == 1, arg % 16 == 0, arg > LARGEST_INT32))
            else:  # a float or None
                values.append(arg)
                key.append(type(arg))
        made = self._compiled.get(tuple(key))
        if made is None:
            self._compiled[tuple(key)] = self.kernel[grid](*args, **config)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        made.run(x, y, z, stream, made.function, made.packed_metadata, None, None, None, *values, *self._constants)

"""Launching a Triton kernel at little cost to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

MOST_THREADS = 1024  # of a block, on every GPU
LARGEST_INT32 = 2**31 - 1
NOBODY_LISTENS = (None, None, None)  # neither metadata nor hooks


class Launcher:
    """A Triton kernel that remembers what it was compiled to.

    `kernel[grid](…)` works out on every call what the arguments are specialised on, by way of a text. Here a tuple of
    the same facts (dtypes, alignment, whether a size is 1, a multiple of 16 or long) finds the machine code. The
    kernel's constexpr parameters must stand last; they and the compiler's options are given by name. No block has more
    warps than the GPU takes: AMD's are twice as wide.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any, **config: Any) -> None:
        device = args[0].get_device()
        if device < 0:  # interpreted
            self.kernel[grid](*args, **config)
        elif knobs.runtime.launch_enter_hook.calls:  # watched by a profiler
            self.kernel[grid](*args, **_within_a_block(config))
        elif device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(grid, *args, **config)
        else:
            values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
            self.compiled(device, grid, args, config)(device, _whole(grid), values)

    def compiled(self, device: int, grid: tuple[int, ...], args: tuple[Any, ...], config: dict[str, Any]) -> _Compiled:
        """The machine code for such arguments."""
        key = (device, *config.values(), *[_specialised_on(arg) for arg in args])
        if key not in self._compiled:
            made = self.kernel.warmup(*args, grid=grid, **_within_a_block(config))
            self._compiled[key] = _Compiled(made, self.kernel)
        return self._compiled[key]

    def prepare(self, grid: tuple[int, ...], *sizes: Any, **config: Any) -> Prepared:
        """A launch that lacks nothing but its tensors, which must be the kernel's first parameters, always of the same
        dtypes and on the same GPU; None, always, for one that the kernel does without."""
        return Prepared(self, _whole(grid), sizes, config)


class Prepared:
    """A launch that lacks nothing but its tensors."""

    def __init__(self, launcher: Launcher, grid: tuple[int, int, int], sizes: tuple[Any, ...], config: dict[str, Any]):
        self._launcher, self._grid, self._sizes, self._config = launcher, grid, sizes, config
        self._run: Callable[..., None] | None = None  # for tensors on 16-byte boundaries
        self._before: tuple[Any, ...] = ()
        self._after: tuple[Any, ...] = ()

    def __call__(self, first: Tensor, *others: Tensor | None) -> None:
        together = first.data_ptr()
        values: list[Any] = [together]
        for other in others:
            address = 0 if other is None else other.data_ptr()
            values.append(address)
            together |= address
        device = first.get_device()
        if (
            self._run is None
            or together % 16
            or knobs.runtime.launch_enter_hook.calls
            or device != torch._C._cuda_getDevice()
        ):
            self._carefully(together % 16 == 0, first, *others)
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            self._run(*self._grid, stream, *self._before, *values, *self._after)

    def _carefully(self, is_aligned: bool, first: Tensor, *others: Tensor | None) -> None:
        """The launcher's own way; once it has been gone on the GPU, it need not be again."""
        args = (first, *others, *self._sizes)
        self._launcher(self._grid, *args, **self._config)
        device = first.get_device()
        if is_aligned and device >= 0 and not knobs.runtime.launch_enter_hook.calls:
            made = self._launcher.compiled(device, self._grid, args, self._config)
            self._run, self._before, self._after = made.run, made.before, (*self._sizes, *made.constants)


class _Compiled:
    """Machine code with what its launcher wants to be told besides."""

    def __init__(self, made: Any, kernel: Any):
        run, told = made.run, (made.packed_metadata, *NOBODY_LISTENS)
        if isinstance(run, CudaLauncher) and not (run.global_scratch_size or run.profile_scratch_size):
            # Past what would look for scratch memory at every launch.
            run, told = run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None, *told)
        self.run, self.before = run, (made.function, *told)
        self.constants = [None] * sum(parameter.is_constexpr for parameter in kernel.params)

    def __call__(self, device: int, grid: tuple[int, int, int], values: list[Any]) -> None:
        self.run(*grid, torch._C._cuda_getCurrentRawStream(device), *self.before, *values, *self.constants)


def _whole(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


@functools.cache
def shared_memory(device: int) -> int:
    """Bytes that a program may use on the GPU of this number; interpreted, without end."""
    if device < 0:
        return LARGEST_INT32
    active: Any = driver.active
    return active.utils.get_device_properties(device)["max_shared_mem"]


def _within_a_block(config: dict[str, Any]) -> dict[str, Any]:
    target: Any = driver.active.get_current_target()
    most = MOST_THREADS // target.warp_size
    return {**config, "num_warps": most} if config.get("num_warps", 0) > most else config


def _specialised_on(arg: Any) -> Any:
    if type(arg) is int:
        return arg == 1, arg % 16 == 0, arg > LARGEST_INT32
    return (arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, Tensor) else type(arg)

"""Triton launches that cost the host little."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver

MAX_THREADS_PER_BLOCK = 1024
MAX_INT32 = 2**31 - 1
NO_HOOKS = (None, None, None)  # launch metadata, enter hook, exit hook


class Launcher:
    """A Triton kernel with a cheap cache of its specializations.

    `kernel[grid](…)` builds a string from the arguments on every call to find the compiled kernel. Here a tuple of the
    same facts (dtypes, alignment, whether a size is 1, a multiple of 16 or int64) is the key. The kernel's constexpr
    parameters must come last; they and the compiler's options are keyword arguments. `num_warps` is clamped to what a
    block of the GPU holds, since AMD's warps are twice as wide.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any, **config: Any) -> None:
        device = args[0].get_device()
        if device < 0:  # interpreted
            self.kernel[grid](*args, **config)
        elif knobs.runtime.launch_enter_hook.calls:  # a profiler observes launches
            self.kernel[grid](*args, **_clamp_warps(config))
        elif device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(grid, *args, **config)
        else:
            values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
            self.compiled(device, grid, args, config)(device, _grid3(grid), values)

    def compiled(self, device: int, grid: tuple[int, ...], args: tuple[Any, ...], config: dict[str, Any]) -> _Compiled:
        """Return the compiled kernel for such arguments."""
        key = (device, *config.values(), *[_specialization(arg) for arg in args])
        if key not in self._compiled:
            made = self.kernel.warmup(*args, grid=grid, **_clamp_warps(config))
            self._compiled[key] = _Compiled(made, self.kernel)
        return self._compiled[key]

    def prepare(self, grid: tuple[int, ...], *sizes: Any, **config: Any) -> PreparedLaunch:
        """Return a launch that needs only its tensors, the kernel's first parameters.

        They always have the same dtypes and are on the same GPU. An optional tensor is always a tensor or always None.
        """
        return PreparedLaunch(self, _grid3(grid), sizes, config)


class PreparedLaunch:
    """A launch that needs only its tensors."""

    def __init__(self, launcher: Launcher, grid: tuple[int, int, int], sizes: tuple[Any, ...], config: dict[str, Any]):
        self._launcher, self._grid, self._sizes, self._config = launcher, grid, sizes, config
        self._run: Callable[..., None] | None = None  # for tensors aligned to 16 bytes
        self._before: tuple[Any, ...] = ()
        self._after: tuple[Any, ...] = ()

    def __call__(self, first: Tensor, *others: Tensor | None) -> None:
        addresses = first.data_ptr()
        values: list[Any] = [addresses]
        for other in others:
            address = 0 if other is None else other.data_ptr()
            values.append(address)
            addresses |= address
        device = first.get_device()
        if (
            self._run is None
            or addresses % 16
            or knobs.runtime.launch_enter_hook.calls
            or device != torch._C._cuda_getDevice()
        ):
            self._first_launch(addresses % 16 == 0, first, *others)
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            self._run(*self._grid, stream, *self._before, *values, *self._after)

    def _first_launch(self, is_aligned: bool, first: Tensor, *others: Tensor | None) -> None:
        """Launch through the Launcher, and remember the compiled kernel for the next call."""
        args = (first, *others, *self._sizes)
        self._launcher(self._grid, *args, **self._config)
        device = first.get_device()
        if is_aligned and device >= 0 and not knobs.runtime.launch_enter_hook.calls:
            made = self._launcher.compiled(device, self._grid, args, self._config)
            self._run, self._before, self._after = made.run, made.before, (*self._sizes, *made.constants)


class _Compiled:
    """A compiled kernel and the arguments that Triton's launcher takes around those of the kernel."""

    def __init__(self, made: Any, kernel: Any):
        run, fixed = made.run, (made.packed_metadata, *NO_HOOKS)
        if isinstance(run, CudaLauncher) and not (run.global_scratch_size or run.profile_scratch_size):
            # Skips Triton's check for scratch memory at every launch.
            run, fixed = run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None, *fixed)
        self.run, self.before = run, (made.function, *fixed)
        self.constants = [None] * sum(parameter.is_constexpr for parameter in kernel.params)

    def __call__(self, device: int, grid: tuple[int, int, int], values: list[Any]) -> None:
        self.run(*grid, torch._C._cuda_getCurrentRawStream(device), *self.before, *values, *self.constants)


def _grid3(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


@functools.cache
def shared_memory(device: int) -> int:
    """Return the shared memory in bytes that a program may use on the GPU of this number."""
    if device < 0:
        return MAX_INT32
    active: Any = driver.active
    return active.utils.get_device_properties(device)["max_shared_mem"]


def _clamp_warps(config: dict[str, Any]) -> dict[str, Any]:
    target: Any = driver.active.get_current_target()
    maximum = MAX_THREADS_PER_BLOCK // target.warp_size
    return {**config, "num_warps": maximum} if config.get("num_warps", 0) > maximum else config


def _specialization(arg: Any) -> Any:
    if type(arg) is int:
        return arg == 1, arg % 16 == 0, arg > MAX_INT32
    return (arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, Tensor) else type(arg)

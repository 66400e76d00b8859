"""Triton launches that cost the host little."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_THREADS_PER_BLOCK = 1024
MAX_INT32 = 2**31 - 1
TMA_ALIGNMENT = 16  # bytes: of the address and of every row
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
        self._kinds: list[torch.dtype | None] = []  # dtypes of the tensors of every call
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
        self._kinds = _require_kinds(self._kinds, (first, *others), self._launcher.kernel)
        args = (first, *others, *self._sizes)
        self._launcher(self._grid, *args, **self._config)
        device = first.get_device()
        if is_aligned and device >= 0 and not knobs.runtime.launch_enter_hook.calls:
            made = self._launcher.compiled(device, self._grid, args, self._config)
            self._run, self._before, self._after = made.run, made.before, (*self._sizes, *made.constants)


class Matrix(NamedTuple):
    """A matrix in memory and the block of it that one copy moves. The last dimension is contiguous."""

    shape: tuple[int, int]
    stride: int  # elements from row to row
    block: tuple[int, int]
    layout: Any = None  # in shared memory; Gluon only

    def describe(self, tensor: Tensor) -> TensorDescriptor | GluonDescriptor:
        strides = [self.stride, 1]
        if self.layout is None:
            return TensorDescriptor(tensor, [*self.shape], strides, [*self.block])
        return GluonDescriptor(tensor, [*self.shape], strides, [*self.block], self.layout)


def stored(shape: tuple[int, int], step: int, block: tuple[int, int], transposed: bool) -> Matrix:
    """Return how a matrix lies in memory, of which the columns are contiguous if it is transposed."""
    if not transposed:
        return Matrix(shape, step, block)
    return Matrix((shape[1], shape[0]), step, (block[1], block[0]))


def rows_are_aligned(tensor: Tensor) -> bool:
    """Return whether TMA can read this matrix, or its transpose if its columns are contiguous."""
    step = max(tensor.stride())
    aligned = step * tensor.element_size() % TMA_ALIGNMENT == 0 and tensor.data_ptr() % TMA_ALIGNMENT == 0
    return 1 in tensor.stride() and min(tensor.shape) > 0 and aligned


def aligned(tensor: Tensor) -> Tensor:
    """Return a matrix that satisfies `rows_are_aligned`, if a contiguous copy of this one does."""
    return tensor if rows_are_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


class DescribedLaunch:
    """A launch that needs only its tensors, the kernel's first parameters.

    Those with a `Matrix` are passed as descriptors of it, and satisfy `rows_are_aligned`; the others are pointers. In
    every call, tensors have the same dtypes and are on the same GPU, and an optional one is always a tensor or always
    None. The kernel's constexpr parameters come last; they and the compiler's options are `config`.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], matrices: tuple[Matrix | None, ...], *sizes: int, **config: Any
    ):
        self._kernel, self._grid, self._matrices = kernel, _grid3(grid), matrices
        self._sizes, self._config = sizes, config
        self._kinds: list[torch.dtype | None] = []
        self._compiled: _Compiled | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        device = tensors[0].get_device()  # pyright: ignore[reportOptionalMemberAccess]
        if device < 0 or self._compiled is None:
            self._kinds = _require_kinds(self._kinds, tensors, self._kernel)
        if device < 0:  # interpreted
            self._kernel[self._grid](*self._arguments(tensors), *self._sizes, **self._config)
        elif knobs.runtime.launch_enter_hook.calls:  # a profiler observes launches
            self._kernel[self._grid](*self._arguments(tensors), *self._sizes, **_clamp_warps(self._config))
        elif device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(*tensors)
        elif any(t is not None and t.data_ptr() % TMA_ALIGNMENT for t in tensors):
            self._kernel[self._grid](*self._arguments(tensors), *self._sizes, **_clamp_warps(self._config))
        else:
            if self._compiled is None:
                args, config = self._arguments(tensors), _clamp_warps(self._config)
                made = self._kernel.warmup(*args, *self._sizes, grid=self._grid, **config)
                self._compiled = _Compiled(made, self._kernel)
            pairs = zip(self._matrices, tensors, strict=True)
            args = [t if matrix is None or t is None else _Described(t, matrix) for matrix, t in pairs]
            self._compiled(device, self._grid, [*args, *self._sizes])

    def _arguments(self, tensors: tuple[Tensor | None, ...]) -> list[Any]:
        pairs = zip(self._matrices, tensors, strict=True)
        return [t if matrix is None or t is None else matrix.describe(t) for matrix, t in pairs]


class _Described:
    """The attributes of a descriptor that Triton's launcher reads. Creating a `TensorDescriptor` takes microseconds."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"

    def __init__(self, base: Tensor, matrix: Matrix):
        self.base, self.shape, self.strides = base, matrix.shape, (matrix.stride, 1)


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


def _require_kinds(
    known: list[torch.dtype | None], tensors: tuple[Tensor | None, ...], kernel: Any
) -> list[torch.dtype | None]:
    """Raise if tensors differ from those of the first call: the compiled kernel would take them for what those were."""
    kinds = [None if t is None else t.dtype for t in tensors]
    if known and kinds != known:
        raise AssertionError(f"a launch of {kernel.__name__} was prepared for {known} and called with {kinds}")
    return kinds


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

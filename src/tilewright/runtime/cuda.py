"""CUDA C++ kernels: compiled at run time through NVRTC, cached on disk, launched on torch's stream."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import files, settings
from tilewright.errors import MissingPackage

FOLDER = Path(__file__).parent.parent / "ops"  # `.cu` files stand beside their operations
INCLUDE = FOLDER / "include"
CPP_NAMES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}  # as in include/dtypes.cuh
OPTIONS: dict[str, Any] = {"std": "c++17", "include_path": str(INCLUDE), "lineinfo": True}
MAX_PORTABLE_CLUSTER = 8  # blocks
MAX_DEFAULT_SHARED = 32 * 1024  # bytes of dynamic shared memory per block that need no opt-in, with room for static


class CudaSource:
    """A `.cu` file whose kernels are templates over a dtype T: `add_fwd` (short for `add_fwd<T>`) or `row<T, 4>`.

    The file is relative to `ops/`. The kernels named are compiled in the tests; others are compiled on first use.
    """

    def __init__(self, file: str, *kernels: str):
        self.file = file
        self.kernels = kernels

    def names(self) -> tuple[str, ...]:
        """Return every kernel for every dtype, as C++ writes it."""
        return tuple(cpp_name(kernel, dtype) for kernel in self.kernels for dtype in CPP_NAMES)

    def cubin(self, arch: str, names: tuple[str, ...]) -> tuple[bytes, dict[str, str]]:
        """Return the machine code of these instances and the symbol of each. Needs no GPU."""
        text = (FOLDER / self.file).read_text()
        folder = settings.cache_dir() / "cuda"
        code = folder / f"{self._key(text, arch, names)}.cubin"
        symbols = code.with_suffix(".json")
        if not symbols.exists():
            options = _core().ProgramOptions(name=str(FOLDER / self.file), arch=arch, **OPTIONS)
            compiled = _core().Program(text, "c++", options).compile("cubin", name_expressions=names)
            files.replace(code, bytes(compiled.code))
            files.replace(symbols, json.dumps({k: _text(v) for k, v in compiled.symbol_mapping.items()}).encode())
        return code.read_bytes(), json.loads(symbols.read_text())

    @functools.lru_cache(4096, typed=True)  # noqa: B019  sources are module-level constants
    def prepare(
        self,
        kernel: str,
        dtype: torch.dtype,
        device: int,
        grid: tuple[int, ...],
        block: int,
        *numbers: int | float,
        shared: int = 0,
        cluster: int = 1,
    ) -> CudaLaunch:
        """Return a launch that needs only its tensors, the kernel's first parameters.

        Ints among the numbers are passed as int64, floats as float. The grid of a cluster launch counts clusters.
        """
        return CudaLaunch(self, kernel, dtype, device, grid, block, numbers, shared, cluster)

    @functools.cache  # noqa: B019  sources are module-level constants
    def resident(
        self, kernel: str, dtype: torch.dtype, device: int, block: int, *, shared: int = 0, cluster: int = 1
    ) -> int:
        """Return how many clusters of such blocks are resident on the GPU at once."""
        with torch.cuda.device(device):
            here = _core().Device(device)
            here.set_current()
            stream = here.create_stream(torch.cuda.current_stream())
            found = self._kernel(kernel, dtype, device, shared, cluster).occupancy
            if cluster > 1:
                return found.max_active_clusters(_config((1,), block, shared, cluster), stream=stream)
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            return multiprocessors * found.max_active_blocks_per_multiprocessor(block, shared)

    @functools.cache  # noqa: B019  sources are module-level constants
    def _kernel(self, kernel: str, dtype: torch.dtype, device: int, shared: int, cluster: int) -> Any:
        major, minor = torch.cuda.get_device_capability(device)
        name = cpp_name(kernel, dtype)
        code, symbols = self.cubin(f"sm_{major}{minor}", (name,))
        module = _core().ObjectCode.from_cubin(code, symbol_mapping={k: v.encode() for k, v in symbols.items()})
        found = module.get_kernel(name)
        if cluster > MAX_PORTABLE_CLUSTER:
            _set_attribute(found, device, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        if shared > MAX_DEFAULT_SHARED:
            _set_attribute(found, device, "MAX_DYNAMIC_SHARED_SIZE_BYTES", shared)
        return found

    def _key(self, text: str, arch: str, names: tuple[str, ...]) -> str:
        headers = "".join(path.read_text() for path in sorted(INCLUDE.glob("*.cuh")))
        identity = repr((text, headers, arch, names, OPTIONS, compiler_version())).encode()
        return f"{Path(self.file).stem}-{hashlib.sha256(identity).hexdigest()[:24]}"


@dataclass
class CudaLaunch:
    """A launch that needs only its tensors; None is a null pointer."""

    source: CudaSource
    kernel: str
    dtype: torch.dtype
    device: int
    grid: tuple[int, ...]
    block: int
    numbers: tuple[int | float, ...]
    shared: int
    cluster: int
    _per_thread: threading.local = field(default_factory=threading.local, init=False, repr=False, compare=False)

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on torch's current stream of the GPU."""
        device = self.device
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(*tensors)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        try:
            launch = self._per_thread.launches[stream]
        except (AttributeError, KeyError):
            launch = self._bind(stream, len(tensors))
        launch(tensors)

    def _bind(self, stream: int, tensors: int) -> _BoundLaunch:
        """Return this thread's launch on a stream. Autograd's threads may have no CUDA context yet: it is set here."""
        _core().Device(self.device).set_current()
        kernel = self.source._kernel(self.kernel, self.dtype, self.device, self.shared, self.cluster)
        made = _BoundLaunch(self, int(kernel.handle), stream, tensors)
        self._per_thread.__dict__.setdefault("launches", {})[stream] = made
        return made


class _BoundLaunch:
    """A launch of one thread on one stream, with an argument buffer of its own for the driver to read.

    It costs a third of `cuda.core.launch`, which builds the configuration and the arguments each time.
    """

    def __init__(self, of: CudaLaunch, kernel: int, stream: int, tensors: int):
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        config = driver.CUlaunchConfig()
        x, y, z = (*of.grid, 1, 1)[:3]
        config.gridDimX, config.gridDimY, config.gridDimZ = x * of.cluster, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ = of.block, 1, 1
        config.sharedMemBytes, config.hStream = of.shared, driver.CUstream(stream)
        if of.cluster > 1:
            clusters = driver.CUlaunchAttribute()
            clusters.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = clusters.value.clusterDim
            size.x, size.y, size.z = of.cluster, 1, 1
            config.attrs, config.numAttrs = [clusters], 1
        self._values = (ctypes.c_uint64 * (tensors + len(of.numbers)))()
        slots = [ctypes.addressof(self._values) + 8 * n for n in range(len(self._values))]
        for slot, number in zip(slots[tensors:], of.numbers, strict=True):
            kind = ctypes.c_float if isinstance(number, float) else ctypes.c_int64
            kind.from_address(slot).value = number  # pyright: ignore[reportAttributeAccessIssue]
        self._slots = (ctypes.c_void_p * len(slots))(*slots)
        self._args = config, driver.CUfunction(kernel), ctypes.addressof(self._slots), 0
        self._run = driver.cuLaunchKernelEx

    def __call__(self, tensors: tuple[Tensor | None, ...]) -> None:
        values = self._values
        for n, tensor in enumerate(tensors):
            values[n] = 0 if tensor is None else tensor.data_ptr()
        (status,) = self._run(*self._args)
        if status:
            raise RuntimeError(f"the kernel launch failed: {status.name}")


def cpp_name(kernel: str, dtype: torch.dtype) -> str:
    return re.sub(r"\bT\b", CPP_NAMES[dtype], kernel if "<" in kernel else f"{kernel}<T>")


def is_installed() -> bool:
    try:
        _core()
    except MissingPackage:
        return False
    return True


@functools.cache
def _core() -> Any:
    try:
        import cuda.core
    except ImportError:
        raise MissingPackage("a CUDA C++ kernel", "cuda-core nvidia-cuda-nvrtc") from None
    return cuda.core


@functools.cache
def compiler_version() -> tuple[int, ...]:
    from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]

    return tuple(nvrtc.nvrtcVersion()[1:])


def _set_attribute(kernel: Any, device: int, what: str, value: int) -> None:
    """Opt in to more than every GPU guarantees."""
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{what}")
    (status,) = driver.cuKernelSetAttribute(
        attribute, value, driver.CUkernel(int(kernel.handle)), driver.CUdevice(device)
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"this GPU does not support {what} = {value}: {status.name}")


def _config(grid: tuple[int, ...], block: int, shared: int, cluster: int) -> Any:
    return _core().LaunchConfig(grid=grid, block=block, shmem_size=shared, cluster=cluster if cluster > 1 else None)


def _text(symbol: str | bytes) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else symbol

"""Interpreter that runs Triton kernels on the CPU, reproduces hardware arithmetic and checks every memory access."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tilewright.driver import stand_in
from tilewright.errors import KernelAborted, KernelFault
from tilewright.interpreter import executor
from tilewright.interpreter.exceptions import (
    IntegerRejected,
    KernelRejected,
    LaunchError,
    OptionsRejected,
    OversizedInteger,
    RejectedKernel,
    RejectedOptions,
    StaticAssertionError,
    StaticAssertRejected,
)
from tilewright.interpreter.results import NEVER_WRITTEN, Finding, Launch, Traffic, tensors

__all__ = ["Finding", "Launch", "Run", "Traffic", "interpret"]

STEPS = 1_000_000  # operations per batch of programs
MAX_TRACKED_BYTES = 2**29  # larger tensors from torch.empty are not tracked: most of their pages are never touched
POISON = np.array([0xB7, 0xFF], np.uint8)
_ALLOCATORS = ("empty", "empty_like", "empty_strided", "empty_permuted")
_INHERITED = object()
_COMPILE = JITFunction.run
_LOCK = threading.RLock()  # the builder is a global


class Run:
    """The launches made while the context was open."""

    def __init__(self, faults: str, steps: int, maps: bool, lanes: int | None):
        self.launches: list[Launch] = []
        self.allocated: set[int] = set()  # addresses of the memory that torch.empty returned
        self._raises = faults == "raise"
        self._steps = steps
        self._maps = maps
        self._lanes = lanes
        self._uninitialized: dict[int, _Uninitialized] = {}  # by address

    @property
    def findings(self) -> list[Finding]:
        return [finding for launch in self.launches for finding in launch.findings]

    def unwritten(self, outputs: Any) -> list[Finding]:
        """Return findings for elements that no kernel wrote, in tensors from torch.empty that were passed to one."""
        found = []
        initialized = self._initialized()
        for tensor in tensors(outputs):
            written = initialized.get(tensor.untyped_storage().data_ptr())
            last_use = self._last_use(tensor)
            if written is None or last_use is None or not tensor.numel():
                continue
            size = tensor.element_size()
            strides = [s * size for s in tensor.stride()]
            start = written[tensor.storage_offset() * size :]
            missing = ~np.lib.stride_tricks.as_strided(start, tensor.shape, strides)
            if missing.any():
                index = tuple(int(i) for i in np.argwhere(missing)[0])
                kernel, name = last_use
                count = int(missing.sum())
                detail = f"{count} of {missing.size} elements of `{name}` are never written; the first is {index}"
                found.append(Finding(NEVER_WRITTEN, kernel, name, "", 0, None, index, count, detail))
        return found

    def _last_use(self, tensor: Tensor) -> tuple[str, str] | None:
        """Return the last kernel that received this memory, and the name of its argument."""
        address = tensor.untyped_storage().data_ptr()
        for launch in reversed(self.launches):
            for traffic in launch.arguments.values():
                if traffic.tensor.untyped_storage().data_ptr() == address:
                    return launch.kernel, traffic.name
        return None

    def _launch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> None:
        with _LOCK:
            try:
                options = {"steps": self._steps, "maps": self._maps, "lanes": self._lanes}
                launch = executor.run(function, args, kwargs, grid, initialized=self._initialized(), **options)
            except RejectedKernel as error:
                is_asserted = isinstance(error.__cause__, StaticAssertionError | CompileTimeAssertionFailure)
                raise (StaticAssertRejected if is_asserted else KernelRejected)(str(error)) from error.__cause__
            except RejectedOptions as error:
                raise OptionsRejected(str(error)) from error.__cause__
            except OversizedInteger as error:
                raise IntegerRejected(str(error)) from error.__cause__
            except LaunchError as error:
                raise KernelAborted(str(error), error.kind) from error.__cause__
            self.launches.append(launch)
        if self._raises and launch.findings:
            raise KernelFault([str(finding) for finding in launch.findings])

    def _track(self, tensor: Tensor) -> Tensor:
        """Poison the new tensor and track which of its bytes kernels write."""
        plain = type(tensor) is Tensor and not torch._C._are_functorch_transforms_active()  # they wrap tensors
        storage = tensor.untyped_storage() if plain and tensor.device.type == "cpu" else None
        if storage is not None and storage.nbytes():
            self.allocated.add(storage.data_ptr())
            if storage.nbytes() <= MAX_TRACKED_BYTES and self._lanes is None:  # a sample leaves most bytes unwritten
                fill_with_poison(tensor)
                with _LOCK:
                    self._uninitialized[storage.data_ptr()] = _Uninitialized(tensor)
        return tensor

    def _initialized(self) -> dict[int, np.ndarray]:
        """Return masks of the bytes written, by address, of the memory that only kernels have written so far."""
        self._uninitialized = {a: memory for a, memory in self._uninitialized.items() if memory.is_tracked()}
        return {address: memory.written for address, memory in self._uninitialized.items()}


class _CompiledOnDemand:
    """The compiled kernel that a launch returns; most callers ignore it, so it is compiled when one looks at it."""

    def __init__(self, compile_kernel: Callable[[], Any]):
        self._compile = compile_kernel

    @functools.cached_property
    def _kernel(self) -> Any:
        return self._compile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: Any) -> Any:
        return self._kernel[grid]


class _Uninitialized:
    """Memory from torch.empty, tracked until torch writes to it or the tensor is freed."""

    def __init__(self, tensor: Tensor):
        self._tensor = weakref.ref(tensor)
        self._version = None if tensor.is_inference() else tensor._version
        self._size = tensor.element_size()
        self.written = np.zeros(tensor.untyped_storage().nbytes(), bool)  # by kernels

    def is_tracked(self) -> bool:
        tensor = self._tensor()
        if tensor is None or self._version is None or tensor._version != self._version:
            return False
        if self._size > 1:  # writes through .data or numpy do not change the version, but they overwrite the poison
            kind = f"u{min(self._size, 8)}"
            raw = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
            now = raw[: len(raw) // self._size * self._size].view(kind)
            changed = now != np.resize(POISON, min(self._size, 8)).view(kind)[0]
            self.written[: len(changed) * now.itemsize].reshape(len(changed), -1)[changed] = True
        return True


def fill_with_poison(tensor: Tensor) -> None:
    """Fill memory with a pattern that is NaN in every float type and large in every integer type."""
    storage = tensor.untyped_storage()
    pattern = torch.tensor(POISON, device=storage.device).repeat(-(-storage.nbytes() // len(POISON)))
    raw = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
    raw.copy_(pattern[: storage.nbytes()])


@contextlib.contextmanager
def interpret(
    *, faults: str = "raise", steps: int = STEPS, maps: bool = False, memory: bool = True, lanes: int | None = None
) -> Iterator[Run]:
    """Run every Triton launch in this context on the CPU, with bounds, race and initialization checks.

    `faults="raise"` raises KernelFault after a launch with a fault; "collect" only adds it to `run.findings`. A program
    that executes more than `steps` operations raises KernelAborted. `maps` keeps the number of reads and the writer of
    each element, which takes memory. `memory` fills tensors from torch.empty with NaN, and reports elements that are
    read before they are written. With `lanes`, only a sample of the programs runs in a launch that accesses more lanes.
    """
    if faults not in ("raise", "collect"):
        raise ValueError(f'faults must be "raise" or "collect", not {faults!r}')
    run = Run(faults, steps, maps, lanes)

    def interpreted(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        def compiled() -> Any:
            return _COMPILE(self, *args, grid=grid, warmup=True, **kwargs)

        is_compilable = isinstance(self, JITFunction)
        if warmup:
            return compiled() if is_compilable else None
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        run._launch(self, args, kwargs, grid)
        return _CompiledOnDemand(compiled) if is_compilable else None

    def compiled_launcher(self: Any, grid: Any) -> Any:
        if not isinstance(self.src, ASTSource):
            raise KernelAborted(f"{self.name} was compiled from IR, which the interpreter cannot run", "unsupported")
        names = {"num_warps", "num_stages", "num_ctas"} - set(self.src.fn.arg_names)
        options = {name: getattr(self.metadata, name) for name in names}
        return lambda *args, stream=None: self.src.fn.run(*args, grid=grid, **options)

    launcher: Any = _not_compiled(interpreted)
    launcher.takes_cpu_tensors = True  # ops check for it

    def untuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs, result = self.prune_configs(kwargs), None
        for config in configs:
            if config.pre_hook is not None:
                config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
            try:
                result = self.fn.run(*args, **kwargs, **config.all_kwargs())
            except StaticAssertRejected:  # Triton does not choose such a configuration either
                if config is configs[-1]:
                    raise
            else:
                self.best_config, self.nargs = config, None
                break
        return result

    allocators = [*((torch, name) for name in _ALLOCATORS), (Tensor, "new_empty")] if memory else []
    with stand_in(), contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (JITFunction, "run", launcher),
            (InterpretedFunction, "run", launcher),
            (Autotuner, "run", untuned),
            (
                Autotuner,
                "_bench",
                lambda *_, **__: [0.0] * 3,
            ),  # for a subclass with its own `run`: the first wins
            (CompiledKernel, "__getitem__", compiled_launcher),
            *((owner, name, _tracking(getattr(owner, name), run)) for owner, name in allocators),
        ):
            stack.enter_context(patched(owner, name, replacement))
        yield run


# torch remembers, at the first use of `with torch.device(...)`, to which functions it applies: to the real ones.
_device_constructors()


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for the duration of the context; an inherited one is inherited again afterwards."""
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is _INHERITED else setattr(owner, name, own)


def _tracking(allocate: Any, run: Run) -> Any:
    def allocate_tracked(*args: Any, **kwargs: Any) -> Tensor:
        return run._track(allocate(*args, **kwargs))

    return _not_compiled(allocate_tracked)


def _not_compiled(fn: Any) -> Any:
    """Exclude a function from torch.compile, without loading torch._dynamo, which takes seconds."""
    return torch.compiler.disable(fn) if "torch._dynamo" in sys.modules else fn

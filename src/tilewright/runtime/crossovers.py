"""Crossovers: the sizes from which on our kernel, or one of its forms, is faster.

Those that were measured on a GPU are in `runtime/tuned/crossovers.json`, written by `tilewright tune`. On other GPUs
they are computed from the datasheet.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tilewright.runtime import configs
from tilewright.runtime.gpus import GPUFacts, gpu_facts
from tilewright.runtime.operator import constant_when_compiled

FILE = "crossovers.json"
NEVER = "never"  # written for a size that is never reached
CAPTURED = " captured"  # ends the name of a crossover on device time alone: captured in a CUDA graph or compiled
HAS_CUDA = torch.backends.cuda.is_built()  # without it, torch cannot be asked whether it captures
Computed = Callable[[GPUFacts], float]

CROSSOVERS: dict[str, Crossover] = {}  # those of the public functions of all operations imported so far, by name


def faster_after(us: float, bytes_per_element: float) -> Computed:
    """Return a crossover against one kernel of torch: the size at which it takes `us` at the bandwidth of the GPU.

    `us` is the host time by which our call exceeds torch's, which depends little on the GPU.
    """
    return lambda gpu: 2.0 ** max(0, round(math.log2(us * 1e-6 * gpu.bandwidth / bytes_per_element)))


def always(gpu: GPUFacts) -> float:
    """Return the crossover of a call that torch never wins.

    One launch costs the host less than torch's several; or host time does not count, and our kernel is as fast.
    """
    return 0


def never(gpu: GPUFacts) -> float:
    """Return the crossover of a call where torch's kernel reaches the ceiling, or a vendor library is called."""
    return math.inf


def first_size(*args: Any) -> int:
    """Return the number of elements of the first tensor."""
    return next(arg.numel() for arg in args if isinstance(arg, Tensor))


class PerGPU(dict[int, float]):
    """A size by the number of a GPU: measured on this model, else `computed` from its facts. Filled on demand."""

    def __init__(self, name: str, computed: Computed):
        super().__init__()
        self.name, self.computed = name, computed
        self._override: float | None = None

    def __missing__(self, device: int) -> float:
        self[device] = self.on(gpu_facts(device))
        return self[device]

    def on(self, gpu: GPUFacts) -> float:
        """Return the size on a GPU."""
        found = measured(gpu.name).get(self.name) if self._override is None else self._override
        return self.computed(gpu) if found is None else found


class Crossover(PerGPU):
    """The size of a call from which on a public function runs our kernel; torch takes smaller ones.

    In eager mode a call takes the host or the device time, whichever is longer. Under CUDA graph capture and inside
    torch.compile host time does not count, and `captured` decides, which weighs device time alone: measured, else
    computed by the function given, else the size of eager mode. `size` returns the size of a call from its arguments,
    counted in `unit`.
    """

    def __init__(
        self,
        name: str,
        computed: Computed,
        *,
        captured: Computed | None = None,
        unit: str = "elements",
        size: Callable[..., int] = first_size,
    ):
        super().__init__(name, computed)
        self.unit, self.size = unit, size
        self.captured = PerGPU(name + CAPTURED, captured or self.on)
        CROSSOVERS[name] = self

    def limit(self, device: int) -> float:
        """Return the size from which on this call is ours, which depends on how it is called."""
        if torch.compiler.is_compiling():
            return compiled_size(self.name, device)
        return self.captured[device] if is_captured() else self[device]

    def reached(self, size: int, device: int) -> bool:
        """Return whether a call of this size is ours.

        A call above both sizes, as most are, does not ask whether it is captured.
        """
        if not torch.compiler.is_compiling() and size >= self[device] and size >= self.captured[device]:
            return True
        return size >= self.limit(device)

    @contextmanager
    def override(self, size: float) -> Iterator[None]:
        """Use this size on every GPU while the context is open."""
        self._set_override(size)
        try:
            yield
        finally:
            self._set_override(None)

    def _set_override(self, size: float | None) -> None:
        self._override = self.captured._override = size
        self._forget()

    def _forget(self) -> None:
        self.clear()
        self.captured.clear()


def is_captured() -> bool:
    """Return whether this call is captured in a CUDA graph, so that its host time does not count."""
    return HAS_CUDA and torch.cuda.is_current_stream_capturing()


@constant_when_compiled  # it cannot trace how a size is found, and need not
def compiled_size(name: str, device: int) -> float:
    """Return the size of a public function's crossover inside torch.compile, on device time alone."""
    return CROSSOVERS[name].captured[device]


@functools.cache
def measured(gpu: str) -> dict[str, float]:
    """Return the sizes that were measured on a GPU, by name."""
    return {name: math.inf if size == NEVER else size for name, size in _read().get(gpu, {}).items()}


def save(gpu: str, sizes: dict[str, float]) -> None:
    """Write measured sizes to the file, beside those already there."""
    found = _read()
    found[gpu] = found.get(gpu, {}) | {name: NEVER if n == math.inf else int(n) for name, n in sizes.items()}
    configs.FOLDER.mkdir(exist_ok=True)
    (configs.FOLDER / FILE).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    measured.cache_clear()
    for crossover in CROSSOVERS.values():
        crossover._forget()


def _read() -> dict[str, dict[str, Any]]:
    path = configs.FOLDER / FILE
    return json.loads(path.read_text()) if path.exists() else {}

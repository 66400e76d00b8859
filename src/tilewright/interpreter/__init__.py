"""Triton kernels on the CPU, with the values that hardware gives and with every access to memory watched."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tilewright.errors import KernelFault, KernelStopped
from tilewright.interpreter import executor
from tilewright.interpreter.results import NEVER_WRITTEN, Finding, Launch, Traffic, tensors
from tilewright.interpreter.exceptions import Stopped

__all__ = ["Finding", "Launch", "Run", "Traffic", "interpret"]

STEPS = 1_000_000  # operations of one batch of programs
LARGEST_FRESH = 2**29  # bytes of torch.empty's memory that is watched; more is mostly virtual
POISON = np.array([0xB7, 0xFF], np.uint8)
_MAKERS = ("empty", "empty_like", "empty_strided", "empty_permuted")
_INHERITED = object()
_ONE_AT_A_TIME = threading.RLock()  # the builder is one


class Run:
    """What was launched while the context was open."""

    def __init__(self, faults: str, steps: int, maps: bool, lanes: int | None):
        self.launches: list[Launch] = []
        self.made: set[int] = set()  # addresses of the memory that torch.empty gave out
        self._raises = faults == "raise"
        self._steps = steps
        self._maps = maps
        self._lanes = lanes
        self._fresh: dict[int, _Fresh] = {}  # by address

    @property
    def findings(self) -> list[Finding]:
        return [finding for done in self.launches for finding in done.findings]

    def unwritten(self, outputs: Any) -> list[Finding]:
        """Elements of these tensors, made by torch.empty and given to a kernel in the context, that none stored to."""
        found = []
        fresh = self._written()
        for tensor in tensors(outputs):
            written = fresh.get(tensor.untyped_storage().data_ptr())
            taker = self._taker_of(tensor)
            if written is None or taker is None or not tensor.numel():
                continue
            size = tensor.element_size()
            strides = [s * size for s in tensor.stride()]
            start = written[tensor.storage_offset() * size :]
            left = ~np.lib.stride_tricks.as_strided(start, tensor.shape, strides)
            if left.any():
                index = tuple(int(i) for i in np.argwhere(left)[0])
                kernel, name = taker
                detail = (
                    f"{int(left.sum())} of {left.size} elements of `{name}` are never written, the first is {index}"
                )
                found.append(Finding(NEVER_WRITTEN, kernel, name, "", 0, None, index, int(left.sum()), detail))
        return found

    def _taker_of(self, tensor: Tensor) -> tuple[str, str] | None:
        """The last kernel that was given this memory, and the name of the argument there."""
        address = tensor.untyped_storage().data_ptr()
        for done in reversed(self.launches):
            for traffic in done.arguments.values():
                if traffic.tensor.untyped_storage().data_ptr() == address:
                    return done.kernel, traffic.name
        return None

    def _launch(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grid: Any) -> None:
        with _ONE_AT_A_TIME:
            try:
                how = {"steps": self._steps, "maps": self._maps, "lanes": self._lanes}
                done = executor.run(function, args, kwargs, grid, fresh=self._written(), **how)
            except Stopped as stopped:
                raise KernelStopped(str(stopped), stopped.kind) from stopped.__cause__
            self.launches.append(done)
        if self._raises and done.findings:
            raise KernelFault([str(finding) for finding in done.findings])

    def _made(self, tensor: Tensor) -> Tensor:
        plain = type(tensor) is Tensor and not torch._C._are_functorch_transforms_active()  # which wrap unseen
        storage = tensor.untyped_storage() if plain and tensor.device.type == "cpu" else None
        if storage is not None and storage.nbytes():
            self.made.add(storage.data_ptr())
            if storage.nbytes() <= LARGEST_FRESH and self._lanes is None:  # else much stays unwritten anyway
                poison(tensor)
                with _ONE_AT_A_TIME:
                    self._fresh[storage.data_ptr()] = _Fresh(tensor)
        return tensor

    def _written(self) -> dict[int, np.ndarray]:
        """By address of memory that only kernels have written so far: which bytes."""
        self._fresh = {address: fresh for address, fresh in self._fresh.items() if not fresh.is_touched_by_others()}
        return {address: fresh.written for address, fresh in self._fresh.items()}


class _Fresh:
    """Memory of torch.empty. It ends when torch writes there, which torch counts, or when nothing holds it."""

    def __init__(self, tensor: Tensor):
        self._tensor = weakref.ref(tensor)
        self._version = None if tensor.is_inference() else tensor._version
        self._size = tensor.element_size()
        self.written = np.zeros(tensor.untyped_storage().nbytes(), bool)  # by kernels

    def is_touched_by_others(self) -> bool:
        tensor = self._tensor()
        if tensor is None or self._version is None or tensor._version != self._version:
            return True
        if self._size > 1:  # writes behind torch's back, through .data or numpy, leave no poison
            kind = f"u{min(self._size, 8)}"
            raw = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
            now = raw[: len(raw) // self._size * self._size].view(kind)
            gone = now != np.resize(POISON, min(self._size, 8)).view(kind)[0]
            self.written[: len(gone) * now.itemsize].reshape(len(gone), -1)[gone] = True
        return False


def poison(tensor: Tensor) -> None:
    """Fill memory with what no kernel would write: NaN in every float, and large in every integer."""
    storage = tensor.untyped_storage()
    filled = torch.tensor(POISON, device=storage.device).repeat(-(-storage.nbytes() // len(POISON)))
    raw = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
    raw.copy_(filled[: storage.nbytes()])


@contextlib.contextmanager
def interpret(
    *, faults: str = "raise", steps: int = STEPS, maps: bool = False, memory: bool = True, lanes: int | None = None
) -> Iterator[Run]:
    """Launches of Triton kernels in this context run here, on the CPU, whatever they were decorated for.

    `faults="raise"` raises KernelFault after a launch in which something is wrong; `"collect"` leaves it in
    `run.findings`. `steps` is how many operations a program may take before it counts as endless. `maps` keeps who
    read and wrote each element, which takes memory. What torch.empty gives out in the context is NaN until written, and
    known if it stays so; not with `memory=False`, which leaves torch as it is. `lanes`: of a launch whose accesses have
    more lanes than this, only so many programs run.
    """
    if faults not in ("raise", "collect"):
        raise ValueError(f'faults is "raise" or "collect", not {faults!r}')
    run = Run(faults, steps, maps, lanes)

    def interpreted(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        if not warmup:
            for hook in self.pre_run_hooks:
                hook(*args, **kwargs)
            run._launch(self, args, kwargs, grid)

    launched: Any = _opaque(interpreted)
    launched.takes_cpu_tensors = True  # so that ops know

    def untuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = self.prune_configs(kwargs)[0]
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result

    makers = [*((torch, name) for name in _MAKERS), (Tensor, "new_empty")] if memory else []
    with contextlib.ExitStack() as undo:
        for owner, name, replacement in (
            (JITFunction, "run", launched),
            (InterpretedFunction, "run", launched),
            (Autotuner, "run", untuned),
            *((owner, name, _watched(getattr(owner, name), run)) for owner, name in makers),
        ):
            undo.enter_context(replaced(owner, name, replacement))
        yield run


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for an attribute; afterwards the owner is as it was, which may have inherited it."""
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is _INHERITED else setattr(owner, name, own)


def _watched(make: Any, run: Run) -> Any:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        return run._made(make(*args, **kwargs))

    return _opaque(made)


def _opaque(fn: Any) -> Any:
    """Not to be traced by torch.compile; asked only where it is loaded, for loading it takes seconds."""
    return torch.compiler.disable(fn) if "torch._dynamo" in sys.modules else fn

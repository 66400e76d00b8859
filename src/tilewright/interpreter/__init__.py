"""Triton kernels on the CPU, with the values that hardware gives and with every access to memory watched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tilewright.errors import KernelFault, KernelStopped
from tilewright.interpreter import launch
from tilewright.interpreter.observed import NEVER_WRITTEN, Finding, Launch, Traffic
from tilewright.interpreter.stops import Stopped

__all__ = ["Finding", "Launch", "Run", "Traffic", "interpret"]

STEPS = 1_000_000  # operations of one batch of programs
_MAKERS = ("empty", "empty_like", "empty_strided")


class Run:
    """What was launched while the context was open."""

    def __init__(self, faults: str, steps: int):
        self.launches: list[Launch] = []
        self._raises = faults == "raise"
        self._steps = steps
        # By address: memory of torch.empty, torch's count of its own writes there, and the bytes a kernel wrote. The
        # tensor is kept alive, so that the address stays its own.
        self._fresh: dict[int, tuple[Tensor, int, np.ndarray]] = {}

    @property
    def findings(self) -> list[Finding]:
        return [finding for done in self.launches for finding in done.findings]

    @property
    def made(self) -> set[int]:
        """Addresses of the memory that torch.empty gave out in the context."""
        return set(self._fresh)

    def unwritten(self, outputs: Any) -> list[Finding]:
        """Elements of these tensors, made by torch.empty and given to a kernel in the context, that none stored to."""
        found = []
        for tensor in _tensors(outputs):
            written = self._written().get(tensor.untyped_storage().data_ptr())
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
        try:
            done = launch.run(function, args, kwargs, grid, fresh=self._written(), steps=self._steps)
        except Stopped as stopped:
            raise KernelStopped(str(stopped), stopped.kind) from stopped.__cause__
        self.launches.append(done)
        if self._raises and done.findings:
            raise KernelFault([str(finding) for finding in done.findings])

    def _made(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if type(tensor) is Tensor and not tensor.is_meta and not tensor.is_inference() and storage.nbytes():
            self._fresh[storage.data_ptr()] = tensor.detach(), tensor._version, np.zeros(storage.nbytes(), bool)
        return tensor

    def _written(self) -> dict[int, np.ndarray]:
        """Of memory that torch has not written itself in the meantime."""
        return {
            address: written
            for address, (tensor, version, written) in self._fresh.items()
            if tensor._version == version
        }


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


@contextlib.contextmanager
def interpret(*, faults: str = "raise", steps: int = STEPS) -> Iterator[Run]:
    """Launches of Triton kernels in this context run here, on the CPU, whatever they were decorated for.

    `faults="raise"` raises KernelFault after a launch in which something is wrong; `"collect"` leaves it in
    `run.findings`. `steps` is how many operations a program may take before it counts as endless.
    """
    if faults not in ("raise", "collect"):
        raise ValueError(f'faults is "raise" or "collect", not {faults!r}')
    run = Run(faults, steps)

    def interpreted(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        if not warmup:
            for hook in self.pre_run_hooks:
                hook(*args, **kwargs)
            run._launch(self, args, kwargs, grid)

    interpreted.takes_cpu_tensors = True  # type: ignore[attr-defined]  so that ops know

    def untuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = self.prune_configs(kwargs)[0]
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return result

    with contextlib.ExitStack() as undo:
        for owner, name, replacement in (
            (JITFunction, "run", interpreted),
            (InterpretedFunction, "run", interpreted),
            (Autotuner, "run", untuned),
            *((torch, name, _watched(getattr(torch, name), run)) for name in _MAKERS),
            (Tensor, "new_empty", _watched(Tensor.new_empty, run)),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield run


def _watched(make: Any, run: Run) -> Any:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        return run._made(make(*args, **kwargs))

    return made

"""List which kernel each public call ran, or why torch was called.

Nothing on the call path asks whether calls are listed. While the context is open, Python's profiling hook watches the
functions that decide.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tilewright.runtime.crossovers import Crossover
from tilewright.runtime.cuda import CudaLaunch
from tilewright.runtime.eligibility import Dispatch, eligible, is_interpreting, why_not_eligible
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.launch import DescribedLaunch, Launcher, PreparedLaunch

OPS = "tilewright.ops."
NO_KERNEL = "our kernels do not take these arguments"


@dataclass
class Call:
    """One call of a public function."""

    name: str
    tensors: tuple[str, ...]  # dtype and shape of each tensor argument
    kernels: list[str] = field(default_factory=list)  # ours, in the order of their launches
    reason: str | None = None  # why torch was called instead

    def __str__(self) -> str:
        ran = ", ".join(self.kernels) if self.kernels else f"torch: {self.reason}"
        return f"{self.name}({', '.join(self.tensors)}): {ran}"


@contextmanager
def trace() -> Iterator[list[Call]]:
    """List the calls of Tilewright's functions in this thread: `with tilewright.trace() as calls:`.

    A call inside another one, or inside compiled code, is not listed, nor is the backward pass. Contexts may be nested.
    """
    calls: list[Call] = []
    previous = sys.getprofile()
    enable = getattr(previous, "enable", None)  # cProfile's hook can only be set by itself
    sys.setprofile(_Observer(calls, previous))
    try:
        yield calls
    finally:
        sys.setprofile(None if enable else previous)
        if enable:
            enable()


class _Observer:
    """A profiling hook that follows one public call at a time."""

    def __init__(self, calls: list[Call], outer: Any):
        self._calls = calls
        self._outer = outer if callable(outer) else None  # the hook that was there before, unless it is cProfile's
        self._public: types.FrameType | None = None  # the frame of the call that is being followed
        self._launch: types.FrameType | None = None
        self._call: Call | None = None

    def __call__(self, frame: types.FrameType, event: str, returned: Any) -> None:
        if self._outer is not None:
            self._outer(frame, event, returned)
        if event == "call":
            self._enter(frame)
        elif event == "return":
            self._leave(frame, returned)

    def _enter(self, frame: types.FrameType) -> None:
        if self._call is None:
            if _is_public(frame):
                tensors = tuple(_described(value) for value in frame.f_locals.values() if isinstance(value, Tensor))
                self._call, self._public = Call(frame.f_code.co_name, tensors), frame
        elif self._launch is None and (name_of := LAUNCHES.get(frame.f_code)):
            self._launch = frame
            self._call.kernels.append(name_of(frame.f_locals["self"]))

    def _leave(self, frame: types.FrameType, returned: Any) -> None:
        if self._call is None:
            return
        if frame is self._launch:
            self._launch = None
        elif frame is self._public:
            if not self._call.kernels and self._call.reason is None:
                self._call.reason = NO_KERNEL
            self._calls.append(self._call)
            self._call = self._public = None
        elif (returned is None or returned is False) and self._call.reason is None:
            reason_of = DECISIONS.get(frame.f_code)
            self._call.reason = reason_of and reason_of(frame.f_locals)


def _is_public(frame: types.FrameType) -> bool:
    """Return whether this is a call of a function in the `__all__` of an operation's file."""
    module, name = frame.f_globals, frame.f_code.co_name
    if not module.get("__name__", "").startswith(OPS) or name not in module.get("__all__", ()):
        return False
    return getattr(module.get(name), "__code__", None) is frame.f_code


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"


def _dispatch_reason(names: dict[str, Any]) -> str:
    first, others = names["first"], names["others"]
    if reason := why_not_eligible(first, *(other for other in others if isinstance(other, Tensor))):
        return reason
    if not names["crossover"].reached(names["size"], names["device"]):
        return _below(names["crossover"], names["size"], names["device"])
    return NO_KERNEL if names["size"] else "the tensor is empty"


def _crossover_reason(names: dict[str, Any]) -> str:
    return _below(names["self"], names["size"], names["device"])


def _below(crossover: Crossover, size: int, device: int) -> str:
    if device < 0 and not is_interpreting():
        return "the tensor is on cpu"
    limit, gpu = crossover.limit(device), gpu_facts(device).name
    if limit == float("inf"):
        return f"torch is as fast on {gpu} at every size"
    return f"{size} {crossover.unit}, and our kernel is faster from {limit:.0f} on {gpu}"


def _eligible_reason(names: dict[str, Any]) -> str:
    return why_not_eligible(names["first"], *names["others"]) or NO_KERNEL


LAUNCHES: dict[types.CodeType, Callable[[Any], str]] = {
    PreparedLaunch.__call__.__code__: lambda launch: launch._launcher.kernel.__name__,
    Launcher.__call__.__code__: lambda launcher: launcher.kernel.__name__,
    DescribedLaunch.__call__.__code__: lambda launch: launch._kernel.__name__,
    CudaLaunch.__call__.__code__: lambda launch: launch.kernel,
}
DECISIONS: dict[types.CodeType, Callable[[dict[str, Any]], str]] = {
    Dispatch.__call__.__code__: _dispatch_reason,
    Crossover.reached.__code__: _crossover_reason,
    eligible.__code__: _eligible_reason,
}

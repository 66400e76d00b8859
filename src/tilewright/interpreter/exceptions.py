"""Exceptions raised while a kernel is interpreted, and the source line at which they were raised."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure

from tilewright.errors import KernelAborted

Location = tuple[str, int]  # file and line
IS_KERNEL = "__tilewright_kernel__"  # in the globals of interpreted code: True in the user's, False in Triton's own


class LaunchError(Exception):
    """The launch cannot finish; the message is one line that says where and why."""

    kind = "crashed"  # the verdict it leads to


class StepLimitExceeded(LaunchError):
    kind = "timeout"


class UnsupportedKernel(LaunchError):
    kind = "unsupported"


class RejectedKernel(LaunchError):
    """Triton's compiler rejects the kernel too."""


class RejectedOptions(LaunchError):
    """Triton's compiler rejects the launch options too."""


class OversizedInteger(LaunchError):
    """An argument does not fit into 64 bits."""


class KernelRejected(KernelAborted, CompilationError):
    """A kernel that Triton's compiler rejects; tests written for the compiler catch it."""

    def __init__(self, message: str):
        Exception.__init__(self, message)  # neither parent takes what the other needs
        self.kind = LaunchError.kind
        self.src, self.node, self.error_message, self.message = None, None, message, message

    def __reduce__(self) -> Any:
        return type(self), (self.message,)


class StaticAssertRejected(KernelRejected, CompileTimeAssertionFailure):
    """A kernel with a false `tl.static_assert`; an autotuner tries its next configuration."""


class StaticAssertionError(AssertionError):
    """A false `tl.static_assert`, before the kernel and the line are known."""


class OptionsRejected(KernelAborted, AssertionError):
    """Launch options that Triton's compiler rejects, with the type of its exception."""


class IntegerRejected(KernelAborted, OverflowError):
    """An integer of more than 64 bits, with the type of Triton's exception."""


class DeviceError(Exception):
    """A fault at run time, in a kernel that compiles."""


class UnsupportedFeature(Exception):
    """The kernel uses a Triton feature that the interpreter does not implement; the message is its name."""


class Diverged(Exception):
    """The programs of a batch take different branches; `keys` has one value per program."""

    def __init__(self, keys: np.ndarray):
        super().__init__("programs diverge")
        self.keys = keys


class SpinWait(Exception):
    """The programs of a batch poll memory that only another program can change: these offsets in a buffer."""

    def __init__(self, buffer: Any, offsets: np.ndarray):
        super().__init__("programs wait")
        self.buffer, self.offsets = buffer, offsets


def kernel_frames() -> Iterator[types.FrameType]:
    """Iterate over the frames of the user's kernel that is being interpreted, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get(IS_KERNEL):
            yield frame
        frame = frame.f_back


def current_line() -> Location:
    """Return the file and line of the user's kernel that is being interpreted."""
    frame = next(kernel_frames(), None)
    return (relative_path(frame.f_code.co_filename), frame.f_lineno) if frame is not None else ("", 0)


def line_of(error: BaseException) -> Location:
    """Return the file and line of the innermost frame of the user's kernel in the traceback."""
    found = ("", 0)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get(IS_KERNEL):
            found = (relative_path(trace.tb_frame.f_code.co_filename), trace.tb_lineno)
        trace = trace.tb_next
    return found


def relative_path(path: str) -> str:
    """Return the path relative to the working directory if it lies inside it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path

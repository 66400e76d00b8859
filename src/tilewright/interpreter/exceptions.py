"""Why a kernel stops before its end, and where in its source it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

IS_KERNEL = "__tilewright_kernel__"  # in the globals of interpreted code: True in the user's, False in Triton's own


class Stopped(Exception):
    """The kernel cannot go on; the message is one line that says where and why."""

    kind = "crashed"  # the verdict it leads to


class Endless(Stopped):
    kind = "timeout"


class NotInterpreted(Stopped):
    kind = "unsupported"


class Unsupported(Exception):
    """The kernel uses something that the interpreter cannot run: its name in the language."""


class Diverged(Exception):
    """The programs of a batch go different ways: `keys` has one value a program."""

    def __init__(self, keys: np.ndarray):
        super().__init__("programs diverge")
        self.keys = keys


class Waiting(Exception):
    """The programs of a batch do nothing but look at memory that only another program can change."""


def here() -> tuple[str, int]:
    """File and line of the innermost line of the user's that is being interpreted."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get(IS_KERNEL):
            return short(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back
    return "", 0


def line_of(error: BaseException) -> tuple[str, int]:
    """The innermost line of the user's kernel that an exception passed through."""
    found = ("", 0)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get(IS_KERNEL):
            found = (short(trace.tb_frame.f_code.co_filename), trace.tb_lineno)
        trace = trace.tb_next
    return found


def short(path: str) -> str:
    """Relative to the working folder where that is shorter."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path

"""Trace a call whose host code reads tensor values, for example with `item()`, by replaying the values of a CPU run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from tilewright.errors import LauncherFailed
from tilewright.hardware import GPU
from tilewright.workbench.inspect.fake_gpu import READS, exit_raises
from tilewright.workbench.inspect.launches import Launch, call_launches


class HostReads(TorchFunctionMode):
    """Record the values that the host reads, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in READS:
            self.values.append(result)
        return result


def trace(
    load: Callable[[], tuple[Callable[..., Any], list[Any]]], run: Callable[[], object], gpu: GPU
) -> tuple[list[Launch], bool]:
    """Return the launches of a call, and whether they depend on values that the host reads.

    `load` returns the function and its arguments on the fake GPU; `run` makes the same call on the CPU, which provides
    the values.
    """
    failure, found = None, []
    try:
        found = call_launches(load, gpu)
        if all(launch.is_complete for launch in found):
            return found, False
    except LauncherFailed as error:
        failure = error
    with HostReads() as reads, exit_raises(), contextlib.suppress(Exception, SystemExit):  # a user's function may raise
        run()
    if reads.values:
        values = iter(reads.values)
        return call_launches(load, gpu, lambda func, args: next(values, None)), True
    if failure:
        raise failure
    return found, False

"""The role of each tensor in a call: input, output, in place, returned unchanged or scratch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from tilewright.interpreter.results import Launch, tensors

INPUT, RETURNED, IN_PLACE, OUTPUT, SCRATCH = "input", "returned unchanged", "in place", "output", "scratch"
READ_ONLY = (INPUT, RETURNED)


class Allocations(TorchFunctionMode):
    """Record the addresses of the memory that torch functions allocate, filled or not."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if new := addresses(result):
            self.found |= new - addresses((args, kwargs))
        return result


def addresses(value: Any) -> set[int]:
    """Return the addresses of the storages of all tensors in a value."""
    found = set()
    for tensor in tensors(value):
        with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse tensors and wrappers have no storage
            found.add(tensor.untyped_storage().data_ptr())
    return found


def find_roles(
    launches: Sequence[Launch], given: Collection[int], returned: Collection[int], allocated: Collection[int]
) -> dict[int, str]:
    """Return the role of each storage by address; those without one are inputs that kernels read at most."""
    used = [t for launch in launches for t in launch.arguments.values()]
    written = addresses([t.tensor for t in used if t.stored or t.atomic])
    read = addresses([t.tensor for t in used if t.loaded or t.atomic])
    roles = dict.fromkeys(allocated, SCRATCH) | dict.fromkeys(returned, OUTPUT)
    for address in given:
        if address in written:
            roles[address] = IN_PLACE if address in read else OUTPUT
        elif address in returned:
            roles[address] = RETURNED
        else:
            roles.pop(address, None)
    return roles

"""The calls that tools make, and their inputs.

In records and between processes, a call is a dict with either a kernel of an op on a case (op, kernel, case, dtype, and
file for a user's kernel, operation for a user's operation) or a function of a file with such inputs (file, function,
inputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tilewright import registry
from tilewright.errors import TooLarge
from tilewright.inputs import TensorInput, parse_input
from tilewright.own import load_operation
from tilewright.spec import Case, Op

ELEMENTS = 2**27  # sum over all tensors: more takes minutes and gigabytes to interpret
SLOW_TO_DRAW = 2**20  # elements


def load_call(call: Mapping[str, Any], device: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function of a call and its arguments."""
    if "op" not in call:
        return registry.launcher(Path(call["file"]), call["function"]), tuple(
            make_input(t, device) for t in call["inputs"]
        )
    op = op_of(call)
    kernel = registry.load_file(Path(call["file"]), op) if "file" in call else registry.pick(op, [call["kernel"]])[0]
    return kernel.fn, op.make(case_of(call), device)


def op_of(call: Mapping[str, Any]) -> Op:
    """Return the operation of a call: Tilewright's, or the one that a user's file defines."""
    if own := call.get("operation"):
        return load_operation(Path(own["file"]), reference=own["reference"], inputs=own["inputs"])
    return registry.load(call["op"])


def case_of(call: Mapping[str, Any]) -> Case:
    return Case(tuple(call["case"].items()), call["dtype"])


def make_input(text: str, device: str = "cpu", *, zeros: bool = False) -> Any:
    """Return the input for a text. With `zeros`, large tensors are zeros, whose pages take no memory until touched."""
    given = parse_input(text)
    if not isinstance(given, TensorInput):
        return given
    count = math.prod(given.shape)
    if device == "meta":
        return torch.empty(given.shape, dtype=given.dtype, device=device)
    if zeros and count > SLOW_TO_DRAW:
        return torch.zeros(given.shape, dtype=given.dtype, device=device)
    if device == "cpu" and count > ELEMENTS:
        raise TooLarge(count, ELEMENTS)
    return given.draw(torch.Generator(device).manual_seed(0))

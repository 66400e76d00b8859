"""Parse command-line inputs: 64x1000:bfloat16 is a tensor of random values, 7 and 0.5 are numbers.

In records and between processes, a call is a dict with either a kernel of an op on a case (op, kernel, case, dtype, and
file for a user's kernel) or a function of a file with such inputs (file, function, inputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tilewright import registry
from tilewright.errors import BadInput, TooLarge
from tilewright.spec import Case

ELEMENTS = 2**27  # sum over all tensors: more takes minutes and gigabytes to interpret
SLOW_TO_DRAW = 2**20  # elements
_DTYPES = {"": "float32", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def load_call(call: Mapping[str, Any], device: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function of a call and its arguments."""
    if "op" not in call:
        return registry.launcher(Path(call["file"]), call["function"]), tuple(
            make_input(t, device) for t in call["inputs"]
        )
    op = registry.load(call["op"])
    kernel = registry.load_file(Path(call["file"]), op) if "file" in call else registry.pick(op, [call["kernel"]])[0]
    return kernel.fn, op.make(case_of(call), device)


def case_of(call: Mapping[str, Any]) -> Case:
    return Case(tuple(call["case"].items()), call["dtype"])


def make_input(text: str, device: str = "cpu", *, zeros: bool = False) -> Any:
    """Return the input for a text. With `zeros`, large tensors are zeros, whose pages take no memory until touched."""
    shape, _, kind = text.partition(":")
    if not kind and "x" not in shape:
        return _number(text)
    dtype: Any = getattr(torch, _DTYPES.get(kind, kind), None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(text, f"torch has no dtype '{kind}'")
    sizes = [int(n) if n.isdecimal() else -1 for n in shape.split("x")]
    if min(sizes) < 0:
        raise BadInput(text, f"'{shape}' is not a shape")
    if device == "meta":
        return torch.empty(sizes, dtype=dtype, device=device)
    if zeros and math.prod(sizes) > SLOW_TO_DRAW:
        return torch.zeros(sizes, dtype=dtype, device=device)
    if device == "cpu" and (count := math.prod(sizes)) > ELEMENTS:
        raise TooLarge(count, ELEMENTS)
    generator = torch.Generator(device).manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 10, sizes, generator=generator, device=device).to(dtype)


def _number(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    raise BadInput(text, "it is neither a number nor a shape")

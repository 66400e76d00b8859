"""Arguments in command-line syntax: 64x1000:bfloat16 is a tensor, everything else is a value as Python writes it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import BadInput

HIGH = 10  # integers are below
_DTYPES = {"": "float32", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
_WORDS = {"none": None, "true": True, "false": False}


@dataclass(frozen=True)
class TensorInput:
    """The shape and dtype of a tensor that is still to be drawn."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return normal values, or integers from 0 to 9, or booleans."""
        device = generator.device
        if self.dtype.is_floating_point:
            return torch.randn(self.shape, generator=generator, device=device).to(self.dtype)
        high = 2 if self.dtype == torch.bool else HIGH
        return torch.randint(0, high, self.shape, generator=generator, device=device).to(self.dtype)


def parse_input(text: str) -> Any:
    """Return a TensorInput, or the value itself: None, a boolean, a number, a string, or a tuple or list of these."""
    if text[:1] in ("(", "[", "'", '"'):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise BadInput(text, "it is not a Python value") from None
    shape, _, kind = text.partition(":")
    if kind or re.fullmatch(r"\d.*x.*", shape):
        return _tensor(text, shape, kind)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    if re.fullmatch(r"[A-Za-z_][\w-]*", text):
        return text
    raise BadInput(text, "it is neither a shape nor a value")


def _tensor(text: str, shape: str, kind: str) -> TensorInput:
    dtype: Any = getattr(torch, _DTYPES.get(kind, kind), None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(text, f"torch has no dtype '{kind}'")
    sizes = [int(n) if n.isdecimal() else -1 for n in shape.split("x")]
    if min(sizes) < 0:
        raise BadInput(text, f"'{shape}' is not a shape")
    return TensorInput(tuple(sizes), dtype)

"""Inputs as the command line writes them, made small enough to be interpreted soon."""

from __future__ import annotations

import math
from collections.abc import Sequence


def smaller(given: Sequence[str], elements: int) -> tuple[list[str], float]:
    """With the largest sizes halved, wherever they stand, as equal sizes may belong together; and how many times fewer
    elements that is."""
    shapes = [_sizes(text) for text in given]
    before = _elements(shapes)
    while _elements(shapes) > elements:
        largest = max(size for shape in shapes for size in shape)
        shapes = [[size // 2 if size == largest else size for size in shape] for shape in shapes]
    texts = [_text(text, shape) for text, shape in zip(given, shapes, strict=True)]
    return texts, before / max(1, _elements(shapes))


def _sizes(text: str) -> list[int]:
    """None for a number, and for what is no input at all, which is told where it is made."""
    shape, colon, _ = text.partition(":")
    sizes = shape.split("x")
    return [int(n) for n in sizes] if (colon or len(sizes) > 1) and all(n.isdecimal() for n in sizes) else []


def _elements(shapes: Sequence[Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes if shape)


def _text(text: str, shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) + "".join(text.partition(":")[1:]) if shape else text

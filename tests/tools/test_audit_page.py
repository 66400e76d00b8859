"""The page of `tilewright audit`, looked at in a real browser."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilewright.interpreter.observed import NEVER_WRITTEN, OUT_OF_BOUNDS, Finding, Launch, Traffic
from tilewright.tools.audit.page import render

HOSTILE = "<script>document.title='taken'</script>&\"'"


def traffic(name: str, tensor: torch.Tensor, reads: Any = 0, writer: Any = 0, *, masked: int = 0) -> Traffic:
    """As the interpreter would count it, with each access a lane and every sector full."""
    shape, size = tuple(tensor.shape), tensor.element_size()
    reads = np.broadcast_to(np.asarray(reads, np.uint32), shape).copy()
    writer = np.broadcast_to(np.asarray(writer, np.int32), shape).copy()
    lanes = int(reads.sum()) + int(np.count_nonzero(writer))
    return Traffic(
        name,
        tensor,
        loaded=int(reads.sum()) * size,
        stored=int(np.count_nonzero(writer)) * size,
        lanes=lanes + masked,
        masked=masked,
        sectors=-(-lanes * size // 32),
        reads=reads,
        writer=writer,
    )


def tiles(shape: tuple[int, int], tile: tuple[int, int]) -> np.ndarray:
    """The writer map of one program a tile, x across."""
    rows, columns = (np.arange(size) // step for size, step in zip(shape, tile, strict=True))
    return 1 + columns[None, :] + rows[:, None] * (-(-shape[1] // tile[1]))


def blur() -> Launch:
    """Tiles of 32 x 32 that read one more element on each side; program (2, 1, 0) leaves its last 8 rows out."""
    reads = np.zeros((96, 128))
    for row in range(0, 96, 32):
        for column in range(0, 128, 32):
            reads[max(row - 1, 0) : row + 33, max(column - 1, 0) : column + 33] += 1
    writer = tiles((96, 128), (32, 32))
    writer[56:64, 64:96] = 0
    gap = Finding(
        NEVER_WRITTEN, "_blur", "y", __file__, 12, (2, 1, 0), (56, 64), 256, "nobody wrote y[56, 64], a result"
    )
    return Launch(
        "_blur",
        __file__,
        40,
        (4, 3, 1),
        {
            "x": traffic("x", torch.empty(96, 128), reads, masked=448),
            "y": traffic("y", torch.empty(96, 128), 0, writer),
            "weight": traffic("weight", torch.empty(3, 3)),
        },
        [gap],
        99,
        {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4},
    )


def flat() -> Launch:
    """Blocks of 128 over 1000 elements, and a scalar that all read."""
    writer = 1 + np.arange(1000) // 128
    arguments = [
        traffic("x", torch.empty(1000, dtype=torch.bfloat16), 1, masked=24),
        traffic("scale", torch.empty(()), 8),
        traffic("y", torch.empty(1000), 0, writer, masked=24),
        traffic("long", torch.empty(100_000), 1 + np.arange(100_000) // 10_000),
    ]
    return Launch("_scale", __file__, 60, (8, 1, 1), {t.name: t for t in arguments}, [], 9)


def deep() -> Launch:
    """Three dimensions, one program a slice and half; a bias that a stride of 0 repeats."""
    half = 1 + np.arange(24)[:, None] // 12
    writer = np.broadcast_to(half, (4, 24, 40)) + 2 * np.arange(4)[:, None, None]
    arguments = [
        traffic("bias", torch.empty(1, 40).expand(24, 40), 96),
        traffic("y", torch.empty(4, 24, 40), 0, writer),
        traffic("tall", torch.empty(3, 200, 40), 1),
    ]
    return Launch("_deep", __file__, 70, (1, 2, 4), {t.name: t for t in arguments}, [], 9)


def large() -> Launch:
    """3000 x 5000 in tiles of 64 x 64 and of 24 x 24, with one element that nobody wrote."""
    writer = tiles((3000, 5000), (64, 64))
    writer[1234, 4321] = 0
    arguments = [
        traffic("x", torch.empty(3000, 5000), 3),
        traffic("y", torch.empty(3000, 5000), 0, writer),
        traffic("seams", torch.empty(3000, 5000), 0, tiles((3000, 5000), (72, 72))),
    ]
    return Launch("_large", __file__, 80, (79, 47, 1), {t.name: t for t in arguments}, [], 9)


def hostile() -> Launch:
    finding = Finding(OUT_OF_BOUNDS, HOSTILE, HOSTILE, HOSTILE, 3, None, (9,), 1, HOSTILE)
    touched = traffic(HOSTILE, torch.empty(4, 4), 1, 1)
    return Launch(HOSTILE, HOSTILE, 1, (1, 1, 1), {"a": touched}, [finding], 1, {HOSTILE: HOSTILE})

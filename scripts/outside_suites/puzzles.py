"""Triton-Puzzles: the notebook's specifications, each with a kernel that solves it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outside_suites.cases import Case, Missing, assert_close, interpreted

SUITE = "puzzles"
SAMPLE = {"add_spec", "conv2d_spec"}

SOLUTIONS: dict[str, tuple[list[tuple[int, ...]], Callable[..., None]]] = {}


def solves(spec: str, *shapes: tuple[int, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a launch that solves a specification: it takes the inputs, with these shapes, and the output."""

    def register(fn: Callable[..., None]) -> Callable[..., None]:
        SOLUTIONS[spec] = list(shapes), fn
        return fn

    return register


def cases(path: Path | None) -> Iterator[Case]:
    notebook = (path or Path()) / "Triton-Puzzles.ipynb"
    if path is None or not notebook.is_file():
        raise Missing("puzzles: git clone https://github.com/srush/Triton-Puzzles, and name it with --puzzles PATH")
    for spec in SOLUTIONS:
        yield Case(SUITE, spec, lambda s=spec: _check(notebook, s))


def _check(notebook: Path, name: str) -> None:
    spec = _specification(notebook, name)
    shapes, solution = SOLUTIONS[name]
    torch.manual_seed(0)
    inputs = [torch.rand(shape) - 0.5 for shape in shapes]
    expected = spec(*inputs)
    with interpreted() as run:
        out = torch.empty_like(expected)
        solution(*inputs, out)
        assert_close("z", out, expected, 1e-5)
    if not run.launches:
        raise RuntimeError("no kernel was launched")


class _AnyShape:
    """Stands for jaxtyping's annotations, which name the shapes."""

    def __class_getitem__(cls, _: Any) -> type:
        return cls


def _specification(notebook: Path, name: str) -> Callable[..., Tensor]:
    """Return a function of the notebook."""
    cells = [c["source"] for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    source = next((text for text in ("".join(c) for c in cells) if f"def {name}(" in text), None)
    if source is None:
        raise LookupError(f"the notebook has no specification named {name}")
    names: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "Float32": _AnyShape, "Int32": _AnyShape}
    exec(source[: source.index("@triton.jit")], names)
    return names[name]


@triton.jit
def _add_ten(x_ptr, z_ptr, N, B: tl.constexpr):
    offs = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + offs, tl.load(x_ptr + offs, mask=offs < N) + 10.0, mask=offs < N)


@solves("add_spec", (32,))
def add(x: Tensor, z: Tensor) -> None:
    _add_ten[(1,)](x, z, 32, B=32)


@solves("add2_spec", (200,))
def add_blocks(x: Tensor, z: Tensor) -> None:
    _add_ten[(triton.cdiv(200, 32),)](x, z, 200, B=32)


@triton.jit
def _outer(x_ptr, y_ptr, z_ptr, N0, N1, PRODUCT: tl.constexpr, B: tl.constexpr):
    offs_n = tl.program_id(0) * B + tl.arange(0, B)
    offs_m = tl.program_id(1) * B + tl.arange(0, B)
    x = tl.load(x_ptr + offs_n, mask=offs_n < N0)[None, :]
    y = tl.load(y_ptr + offs_m, mask=offs_m < N1)[:, None]
    z = tl.maximum(x * y, 0.0) if PRODUCT else x + y
    mask = (offs_m[:, None] < N1) & (offs_n[None, :] < N0)
    tl.store(z_ptr + offs_m[:, None] * N0 + offs_n[None, :], z, mask=mask)


@solves("add_vec_spec", (32,), (32,))
def outer_sum(x: Tensor, y: Tensor, z: Tensor) -> None:
    _outer[(1, 1)](x, y, z, 32, 32, PRODUCT=False, B=32)


@solves("add_vec_block_spec", (100,), (90,))
def outer_sum_blocks(x: Tensor, y: Tensor, z: Tensor) -> None:
    _outer[(4, 3)](x, y, z, 100, 90, PRODUCT=False, B=32)


@solves("mul_relu_block_spec", (100,), (90,))
def outer_product_relu(x: Tensor, y: Tensor, z: Tensor) -> None:
    _outer[(4, 3)](x, y, z, 100, 90, PRODUCT=True, B=32)


@triton.jit
def _product_relu_bwd(x_ptr, y_ptr, dz_ptr, dx_ptr, N0, N1, B: tl.constexpr):
    offs_n = tl.program_id(0) * B + tl.arange(0, B)[None, :]
    offs_m = tl.program_id(1) * B + tl.arange(0, B)[:, None]
    offs, mask = offs_m * N0 + offs_n, (offs_m < N1) & (offs_n < N0)
    y = tl.load(y_ptr + offs_m, mask=offs_m < N1)
    dz = tl.load(dz_ptr + offs, mask=mask)
    dx = tl.where(tl.load(x_ptr + offs, mask=mask) * y > 0, dz * y, 0.0)
    tl.store(dx_ptr + offs, dx, mask=mask)


@solves("mul_relu_block_back_spec", (90, 100), (90,), (90, 100))
def product_relu_backward(x: Tensor, y: Tensor, dz: Tensor, dx: Tensor) -> None:
    _product_relu_bwd[(4, 3)](x, y, dz, dx, 100, 90, B=32)


@triton.jit
def _row_sum(x_ptr, z_ptr, N, B: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([B], tl.float32)
    for start in range(0, N, B):
        offs = start + tl.arange(0, B)
        total += tl.load(x_ptr + row * N + offs, mask=offs < N, other=0.0)
    tl.store(z_ptr + row, tl.sum(total))


@solves("sum_spec", (4, 200))
def row_sum(x: Tensor, z: Tensor) -> None:
    _row_sum[(4,)](x, z, 200, B=32)


@triton.jit
def _softmax(x_ptr, z_ptr, N, B: tl.constexpr):
    row = tl.program_id(0)
    largest, total = float("-inf"), 0.0
    for start in range(0, N, B):
        offs = start + tl.arange(0, B)
        x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=float("-inf"))
        new = tl.maximum(largest, tl.max(x))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new))
        largest = new
    for start in range(0, N, B):
        offs = start + tl.arange(0, B)
        x = tl.load(x_ptr + row * N + offs, mask=offs < N)
        tl.store(z_ptr + row * N + offs, tl.exp(x - largest) / total, mask=offs < N)


@solves("softmax_spec", (4, 200))
def softmax(x: Tensor, z: Tensor) -> None:
    _softmax[(4,)](x, z, 200, B=32)


@triton.jit
def _scalar_attention(q_ptr, k_ptr, v_ptr, z_ptr, N, BQ: tl.constexpr, B: tl.constexpr):
    offs_q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    q = tl.load(q_ptr + offs_q, mask=offs_q < N)
    largest = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    out = tl.zeros([BQ], tl.float32)
    for start in range(0, N, B):
        offs = start + tl.arange(0, B)
        k = tl.load(k_ptr + offs, mask=offs < N)
        v = tl.load(v_ptr + offs, mask=offs < N, other=0.0)
        scores = tl.where(offs[None, :] < N, q[:, None] * k[None, :], float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        scale = tl.exp(largest - new)
        total = total * scale + tl.sum(weights, 1)
        out = out * scale + tl.sum(weights * v[None, :], 1)
        largest = new
    tl.store(z_ptr + offs_q, out / total, mask=offs_q < N)


@solves("flashatt_spec", (200,), (200,), (200,))
def attention(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> None:
    _scalar_attention[(math.ceil(200 / 64),)](q, k, v, z, 200, BQ=64, B=32)


@triton.jit
def _convolution(x_ptr, k_ptr, z_ptr, H: tl.constexpr, K: tl.constexpr):
    image = x_ptr + tl.program_id(0) * H * H
    row, column = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
    out = tl.zeros([H, H], tl.float32)
    for i in range(K):
        for j in range(K):
            inside = (row + i < H) & (column + j < H)
            x = tl.load(image + (row + i) * H + column + j, mask=inside, other=0.0)
            out += x * tl.load(k_ptr + i * K + j)
    tl.store(z_ptr + tl.program_id(0) * H * H + row * H + column, out)


@solves("conv2d_spec", (4, 8, 8), (4, 4))
def convolution(x: Tensor, k: Tensor, z: Tensor) -> None:
    _convolution[(4,)](x, k, z, H=8, K=4)


@triton.jit
def _batched_product(x_ptr, y_ptr, z_ptr, N: tl.constexpr, B: tl.constexpr):
    base = tl.program_id(2) * N * N
    row = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    column = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inner = tl.arange(0, B)
    acc = tl.zeros([B, B], tl.float32)
    for k in range(0, N, B):
        x = tl.load(x_ptr + base + row * N + k + inner[None, :])
        y = tl.load(y_ptr + base + (k + inner[:, None]) * N + column)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(z_ptr + base + row * N + column, acc)


@solves("dot_spec", (4, 32, 32), (4, 32, 32))
def batched_product(x: Tensor, y: Tensor, z: Tensor) -> None:
    _batched_product[(2, 2, 4)](x, y, z, N=32, B=16)

"""How far from the truth a kernel may be: derived from the case, not chosen.

The truth is the reference in float64. Two things set the scale of an honest error: what plain PyTorch gets wrong
beyond rounding its result, in the same dtype on the same inputs, and how much the truth itself moves when every input
moves by one fp32 rounding. Both are taken over elements of like size, in the same row and, relative to their rows, in
all others, so that a small element is never forgiven an error that only a large one may make. An element may differ by
one rounding of the output dtype plus SLACK times that scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.worker import run_with_gradients

SLACK = 8.0  # another order of summation is honest; another precision is a thousand times worse
FP32 = torch.finfo(torch.float32).eps  # what accumulating in fp32 rounds
OCTAVES = 64
CANCELLED = 2.0**-44  # of a row's largest: what cancellation leaves of float64, so the truth itself is no better
MANY = 2**20  # elements: from here on moving the inputs often costs more than it tells
POOL = 1024  # elements that make the largest error among them a fair estimate, even where errors have long tails


@dataclass(frozen=True)
class Expected:
    """The truth of one result and how far from it each element may be."""

    what: str
    truth: Tensor
    budget: Tensor
    dtype: torch.dtype
    is_gradient: bool


@dataclass(frozen=True)
class Mismatch:
    reason: str


@dataclass(frozen=True)
class Match:
    """The element that came nearest to its budget, or passed it by most."""

    error: float
    budget: float


def expect(
    reference: Callable[..., Any], args: tuple[Any, ...], grad: Tensor | None, leaves: list[str]
) -> list[Expected]:
    """What a right kernel returns for these inputs: outputs first, then the gradients of the named leaves."""
    exact_grad = None if grad is None else grad.double()
    truth, true_gradients = run_with_gradients(reference, [_double(a) for a in args], exact_grad)
    plain, plain_gradients = run_with_gradients(reference, args, grad)
    names = ["output"] if len(truth) == 1 else [f"output {i}" for i in range(len(truth))]
    names += [f"gradient of {leaf}" for leaf, _ in zip(leaves, true_gradients, strict=False)]
    exact = [*truth, *true_gradients]
    moves = [_moves(reference, args, exact_grad, exact, seed) for seed in range(_draws(exact))]
    largest = max((float(_finite(t).abs().max()) for t in exact if t.numel()), default=0.0)
    # A gradient's terms may cancel in a row down to nothing. They were of the size of the results, and computed from
    # results that were rounded to the dtype.
    floor = largest * max(FP32, torch.finfo(plain[0].dtype).eps / 32)
    floors = [0.0] * len(truth) + [floor] * len(true_gradients)
    return [
        Expected(
            name, t, _budget(t, p, functools.reduce(torch.maximum, m), floor), p.dtype, is_gradient=i >= len(truth)
        )
        for i, (name, t, m, p, floor) in enumerate(
            zip(names, exact, zip(*moves, strict=True), plain + plain_gradients, floors, strict=True)
        )
    ]


def compare(got: Tensor, expected: Expected) -> Match | Mismatch:
    """Shape, dtype, NaN and infinities first, then every element against its own budget."""
    truth, what = expected.truth, expected.what
    if tuple(got.shape) != tuple(truth.shape):
        return Mismatch(f"{what} has shape {tuple(got.shape)}, expected {tuple(truth.shape)}")
    if got.dtype != expected.dtype:
        return Mismatch(f"{what} has dtype {_name(got.dtype)}, expected {_name(expected.dtype)}")
    if truth.numel() == 0:
        return Match(0.0, 0.0)
    got = got.to(truth.device).double()
    finite = truth.isfinite()
    same = torch.where(finite, got.isfinite(), (got == truth) | (got.isnan() & truth.isnan()))
    error = torch.where(finite & same, (got - truth).abs(), 0.0)
    bad = ~same | (error > expected.budget)
    if bad.any():
        first = int(bad.reshape(-1).nonzero()[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), truth.shape))
        flat = [float(t.reshape(-1)[first]) for t in (got, truth, expected.budget)]
        return Mismatch(
            f"{what}{list(index)} is {flat[0]:.6g}, expected {flat[1]:.6g} ± {flat[2]:.2g} "
            f"({int(bad.sum())} of {truth.numel()} elements are off)"
        )
    worst = int((error / expected.budget.clamp_min(1e-300)).argmax())
    return Match(float(error.reshape(-1)[worst]), float(expected.budget.reshape(-1)[worst]))


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _draws(exact: list[Tensor]) -> int:
    """How often to move the inputs: a few elements may all be lucky, many are not."""
    return 6 if sum(t.numel() for t in exact) < MANY else 2


def _moves(
    reference: Callable[..., Any], args: tuple[Any, ...], grad: Tensor | None, exact: list[Tensor], seed: int
) -> list[Tensor]:
    """How far each result moves when every input moves by one rounding of fp32."""
    outputs, gradients = run_with_gradients(reference, [_moved(_double(a), seed) for a in args], grad)
    return [(moved - t).abs() for moved, t in zip(outputs + gradients, exact, strict=True)]


def _moved(value: Any, seed: int) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    generator = torch.Generator(value.device).manual_seed(seed)
    sign = torch.randint(0, 2, value.shape, generator=generator, device=value.device, dtype=torch.int8)
    return value * (1 + (2.0 * sign - 1) * FP32)


def _budget(truth: Tensor, plain: Tensor, moved_by: Tensor, floor: float) -> Tensor:
    if truth.numel() == 0:
        return truth.clone()
    columns = truth.shape[-1] if truth.dim() else 1
    truth_rows, plain_rows, moved_rows = (t.reshape(-1, columns) for t in (truth, plain, moved_by))
    magnitude = _finite(truth_rows).abs()
    rounding = _rounding(magnitude, plain.dtype)
    beyond = ((plain_rows.double() - truth_rows).abs() - rounding / 2).clamp_min(0)
    error = torch.maximum(_finite(torch.maximum(beyond, moved_rows)), magnitude * FP32).clamp_min(floor)
    row = magnitude.amax(dim=1, keepdim=True)
    row = torch.where(row > 0, row, 1.0)
    octave = (-torch.log2((magnitude / row).clamp_min(2.0**-OCTAVES))).floor().clamp(0, OCTAVES - 1).long()
    in_row = error.new_zeros(len(row), OCTAVES).scatter_reduce(1, octave, error, "amax")  # the largest of each octave
    scale = torch.maximum(_with_neighbours(in_row), row * _pooled((in_row / row).amax(dim=0), octave))
    return (rounding + SLACK * scale.gather(1, octave) + CANCELLED * row).reshape(truth.shape)


def _with_neighbours(by_octave: Tensor) -> Tensor:
    return torch.nn.functional.max_pool1d(by_octave, kernel_size=3, stride=1, padding=1)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def _pooled(largest: Tensor, octave: Tensor) -> Tensor:
    """The largest error of each octave and its neighbours, over at least POOL elements."""
    by_octave, count = largest.tolist(), torch.bincount(octave.reshape(-1), minlength=OCTAVES).tolist()
    pooled = []
    for centre in range(OCTAVES):
        reach = 1
        while sum(count[max(0, centre - reach) : centre + reach + 1]) < min(POOL, octave.numel()):
            reach += 1
        pooled.append(max(by_octave[max(0, centre - reach) : centre + reach + 1]))
    return largest.new_tensor(pooled)


def _rounding(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The gap between neighbouring values of the dtype at this magnitude."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(magnitude.clamp_min(info.tiny)))
    return torch.exp2(exponent) * info.eps


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

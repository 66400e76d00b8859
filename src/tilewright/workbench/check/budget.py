"""Derive the error budget of every output element from the case itself; there is no chosen tolerance.

The truth is the reference in float64. Two quantities set the scale of an acceptable error: PyTorch's own error beyond
the rounding of its result, in the same dtype on the same inputs, and the change of the truth when every input changes
by one fp32 rounding. Both are taken over elements of similar magnitude, in the same row and, relative to their rows, in
all other rows, so that a small element is never allowed an error that only a large one may have. An element may be off
by one rounding of the output dtype plus the larger of SLACK times that scale and the error of a sequential fp32 sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tilewright.worker.execute import backward, flatten, forward

SLACK = 8.0  # allows another order of summation; a lower precision is off by a thousand times more
SIGMAS = 5.0  # standard deviations of a sequential sum's error: one sum in two million exceeds them
FP32_EPS = torch.finfo(torch.float32).eps
OCTAVES = 64
FLOAT64_CANCELLATION = 2.0**-44  # the truth's own error after cancellation, relative to its row's maximum
FEW_ELEMENTS = 4096  # in all outputs: so few that PyTorch may be exact on all of them by chance
MANY_ELEMENTS = 2**20  # large enough that two perturbations of the inputs suffice
PICTURE_SIZE = (16, 64)  # lines and characters at most
CHUNK = 2**26  # elements compared at a time, to bound the memory of large outputs
MIN_POOLED = 1024  # elements whose largest error is a fair estimate, even if errors have a long tail


@dataclass(frozen=True)
class ExpectedTensor:
    """The true value of one output or gradient, and the error budget of each element."""

    name: str
    truth: Tensor
    budget: Tensor
    dtype: torch.dtype
    is_gradient: bool
    torch_error: float = 0.0  # PyTorch's root mean square error, at least that of rounding


@dataclass(frozen=True)
class Mismatch:
    reason: str
    picture: tuple[str, ...] = ()  # a map of the wrong elements of a 2-D output


@dataclass(frozen=True)
class Match:
    """The error and budget of the element with the largest ratio of the two."""

    error: float
    budget: float
    relative_to_torch: float = 0.0  # root mean square error over that of PyTorch


def expect(
    reference: Callable[..., Any],
    args: Sequence[Any],
    grads: Sequence[Tensor | None] = (),
    needs_grad: Mapping[int, str] = MappingProxyType({}),
    zeros_scale: float = 0.0,
) -> list[ExpectedTensor]:
    """Return the expected outputs for these inputs, followed by the expected gradients.

    `needs_grad` maps the numbers of the arguments that need a gradient to their names, and `grads` holds the incoming
    gradients of the floating-point outputs. `zeros_scale` is the magnitude that zero inputs stand for when they are
    perturbed.
    """
    exact_grads = [None if g is None else g.double() for g in grads]
    truth, true_gradients = _run(reference, [_double(a) for a in args], exact_grads, needs_grad)
    plain, plain_gradients = _run(reference, args, grads, needs_grad)
    names = ["output"] if len(truth) == 1 else [f"output {i}" for i in range(len(truth))]
    names += [f"gradient of {needs_grad[number]}" for number in needs_grad] if true_gradients else []
    exact = [*truth, *true_gradients]
    errors = [_abs_difference(p, t) for p, t in zip(plain + plain_gradients, exact, strict=True)]
    if sum(t.numel() for t in exact) < FEW_ELEMENTS:
        for seed in range(6):
            near = _perturb_all(args, seed, None, zeros_scale)
            wide = _run(reference, [_double(a) for a in near], exact_grads, needs_grad)
            here = _run(reference, near, grads, needs_grad)
            other = [_abs_difference(p, t) for p, t in zip(chain(*here), chain(*wide), strict=True)]
            errors = [torch.fmax(a, b) for a, b in zip(errors, other, strict=True)]
    sensitivities = [torch.zeros_like(e) for e in errors]
    for seed in range(_perturbation_count(exact)):
        near = _perturb_all([_double(a) for a in args], seed, FP32_EPS, zeros_scale)
        perturbed = chain(*_run(reference, near, exact_grads, needs_grad))
        changes = [_abs_difference(p, t) for p, t in zip(perturbed, exact, strict=True)]
        for largest_change, change in zip(sensitivities, changes, strict=True):
            torch.maximum(largest_change, change, out=largest_change)
    largest = max((_max_abs(t) for t in exact if t.numel()), default=0.0)
    # The terms of a gradient may cancel to zero in a row. They are as large as the outputs, and computed from outputs
    # rounded to the dtype.
    output_eps = max((torch.finfo(p.dtype).eps for p in plain if p.is_floating_point()), default=FP32_EPS)
    floor = largest * max(FP32_EPS, output_eps / 32)
    floors = [0.0] * len(truth) + [floor] * len(true_gradients)
    inputs = sum(t.numel() for t in [*args, *grads] if isinstance(t, Tensor) and t.is_floating_point())
    return [
        ExpectedTensor(
            name,
            t,
            _budget(t, e, p.dtype, s, floor, terms=inputs / max(1, t.numel())),
            p.dtype,
            is_gradient=i >= len(truth),
            torch_error=_rms(p, t, floor),
        )
        for i, (name, t, e, s, p, floor) in enumerate(
            zip(names, exact, errors, sensitivities, plain + plain_gradients, floors, strict=True)
        )
    ]


def tighten_for_integers(expected: ExpectedTensor) -> ExpectedTensor:
    """Allow only the rounding to the output dtype if every true value is an integer that fp32 represents.

    Sums of such integers are exact in any order.
    """
    truth = expected.truth
    if expected.is_gradient or not expected.dtype.is_floating_point or not truth.numel():
        return expected
    if not bool(((truth == truth.round()) & (truth.abs() < 2**24)).all()):
        return expected
    return replace(expected, budget=_ulp(truth.abs(), expected.dtype) / 2)


def compare(got: Tensor, expected: ExpectedTensor) -> Match | Mismatch:
    """Compare shape, dtype, NaN and infinities, then every element against its budget."""
    truth, name = expected.truth.double(), expected.name
    if tuple(got.shape) != tuple(truth.shape):
        return Mismatch(f"{name} has shape {tuple(got.shape)}, expected {tuple(truth.shape)}")
    if got.dtype != expected.dtype:
        return Mismatch(f"{name} has dtype {_dtype_name(got.dtype)}, expected {_dtype_name(expected.dtype)}")
    if truth.numel() == 0:
        return Match(0.0, 0.0)
    got = got.to(truth.device)
    off, squared, worst = [], 0.0, Match(0.0, 1.0)
    for g, t, budget in zip(*map(_chunks, (got, truth, expected.budget)), strict=True):
        error, bad = _errors(g.double(), t, budget, expected)
        off.append(bad)
        squared += float(error.square().sum())
        most = int((error / budget.clamp_min(1e-300)).argmax())
        if float(error[most]) * worst.budget >= worst.error * float(budget[most]):
            worst = Match(float(error[most]), float(budget[most]))
    bad = torch.cat(off)
    if bad.any():
        first = int(bad.nonzero()[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), truth.shape))
        values = [float(t.reshape(-1)[first]) for t in (got, truth, expected.budget)]
        return Mismatch(
            f"{name}{list(index)} is {values[0]:.6g}, expected {values[1]:.6g} ± {values[2]:.2g} "
            f"({int(bad.sum())} of {truth.numel()} elements are off)",
            _picture(bad.view(truth.shape)) if truth.dim() == 2 else (),
        )
    ratio = (squared / truth.numel()) ** 0.5 / expected.torch_error if expected.torch_error else 0.0
    return replace(worst, relative_to_torch=ratio)


def _errors(got: Tensor, truth: Tensor, budget: Tensor, expected: ExpectedTensor) -> tuple[Tensor, Tensor]:
    """Return the error of each element, and whether the element is wrong."""
    if expected.dtype.is_floating_point:  # a value beyond the dtype's range may become infinite
        largest = torch.finfo(expected.dtype).max
        overflows = truth.isfinite() & (truth.abs() > largest)
        truth = torch.where(overflows & (got.abs() >= largest) & (got.sign() == truth.sign()), got, truth)
    finite = truth.isfinite()
    same = torch.where(finite, got.isfinite(), (got == truth) | (got.isnan() & truth.isnan()))
    if expected.is_gradient:  # a non-finite gradient depends on how the reference is written
        same |= ~finite
    error = torch.where(finite & same, (got - truth).abs(), 0.0)
    return error, ~same | (error > budget)


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.reshape(-1).split(CHUNK)


def _abs_difference(a: Tensor, b: Tensor) -> Tensor:
    return torch.sub(a.double(), b.double()).abs_()


def _max_abs(x: Tensor) -> float:
    return max(float(_finite(piece.double()).abs().max()) for piece in _chunks(x))


def _picture(bad: Tensor) -> tuple[str, ...]:
    """Draw one character per block of elements: none wrong, some, most, all."""
    blocks = torch.nn.functional.adaptive_avg_pool2d(
        bad[None, None].double(), (min(PICTURE_SIZE[0], bad.shape[0]), min(PICTURE_SIZE[1], bad.shape[1]))
    )[0, 0]
    shades = (blocks > 0).long() + (blocks >= 0.5) + (blocks >= 1)
    return tuple("".join("·░▒█"[shade] for shade in row) for row in shades.tolist())


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _perturbation_count(exact: list[Tensor]) -> int:
    return 6 if sum(t.numel() for t in exact) < MANY_ELEMENTS else 2


def _run(
    reference: Callable[..., Any], args: Sequence[Any], grads: Sequence[Tensor | None], needs_grad: Mapping[int, str]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs and the gradients, which are zero where no output depends on the argument."""
    leaves, returned = forward(reference, args, [*needs_grad] if grads else [])
    outputs, inputs = flatten(returned), [leaves[number] for number in needs_grad]
    gradients = backward(outputs, inputs, grads)
    filled = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, inputs, strict=False)]
    return [output.detach() for output in outputs], filled


def _perturb_all(args: Sequence[Any], seed: int, by: float | None, zeros_scale: float) -> list[Any]:
    """Perturb each argument with a seed of its own: equal perturbations would cancel in a difference of two inputs."""
    return [_perturb(arg, seed * len(args) + number, by, zeros_scale) for number, arg in enumerate(args)]


def _perturb(value: Any, seed: int, by: float | None, zeros_scale: float) -> Any:
    """Increase or decrease every number at random by the fraction `by` or, if None, by one rounding of its dtype."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if by is None:
        return _perturb(value.double(), seed, torch.finfo(value.dtype).eps, zeros_scale).to(value.dtype)
    generator = torch.Generator(value.device).manual_seed(seed)
    sign = torch.randint(0, 2, value.shape, generator=generator, device=value.device, dtype=torch.int8)
    step = (2.0 * sign - 1) * by
    return value * (1 + step) + step * zeros_scale if zeros_scale else value * (1 + step)


def _budget(
    truth: Tensor, torch_error: Tensor, dtype: torch.dtype, sensitivity: Tensor, floor: float, terms: float
) -> Tensor:
    if truth.numel() == 0 or not dtype.is_floating_point:
        return torch.zeros_like(truth, dtype=torch.float64)
    columns = truth.shape[-1] if truth.dim() else 1
    truth_rows, error_rows, sensitivity_rows = (t.reshape(-1, columns) for t in (truth, torch_error, sensitivity))
    tiles = _tiles(*truth_rows.shape)
    row = truth_rows.new_zeros(len(truth_rows), 1, dtype=torch.float64)
    for at in tiles:
        row[at[0]] = torch.maximum(row[at[0]], _finite(truth_rows[at]).abs().amax(dim=1, keepdim=True))
    row = torch.where(row > 0, row, 1.0)
    in_row = row.new_zeros(len(row), OCTAVES)  # the largest error per octave
    count = torch.zeros(OCTAVES, dtype=torch.int64, device=row.device)
    for at in tiles:
        magnitude = _finite(truth_rows[at]).abs()
        beyond = (error_rows[at] - _ulp(magnitude, dtype) / 2).clamp_min(0)
        error = torch.maximum(_finite(torch.maximum(beyond, sensitivity_rows[at])), magnitude * FP32_EPS)
        error = error.clamp_min(floor)
        octave = _octave(magnitude, row[at[0]])
        in_row[at[0]] = in_row[at[0]].scatter_reduce(1, octave, error, "amax")
        count += torch.bincount(octave.reshape(-1), minlength=OCTAVES)
    scale = torch.maximum(_max_with_neighbours(in_row), row * _pooled((in_row / row).amax(dim=0), count.tolist()))
    budget = torch.empty_like(truth_rows, dtype=torch.float64)
    for at in tiles:
        magnitude = _finite(truth_rows[at]).abs()
        # A kernel may also add `terms` numbers one after the other in fp32: allow SIGMAS of that sum's rounding error.
        sequential_sum = SIGMAS * magnitude * (FP32_EPS / 2) * terms**0.5 / 3
        allowed = torch.maximum(SLACK * scale[at[0]].gather(1, _octave(magnitude, row[at[0]])), sequential_sum)
        budget[at] = _ulp(magnitude, dtype) + allowed + FLOAT64_CANCELLATION * row[at[0]]
    return budget.reshape(truth.shape)


def _tiles(rows: int, columns: int) -> list[tuple[slice, slice]]:
    """Split [rows, columns] into tiles of at most CHUNK elements."""
    width = min(columns, CHUNK)
    height = max(1, CHUNK // width)
    return [
        (slice(i, i + height), slice(j, j + width)) for i in range(0, rows, height) for j in range(0, columns, width)
    ]


def _octave(magnitude: Tensor, row: Tensor) -> Tensor:
    """Return floor(log2(row maximum / magnitude)) of each element."""
    return (-torch.log2((magnitude / row).clamp_min(2.0**-OCTAVES))).floor().clamp(0, OCTAVES - 1).long()


def _max_with_neighbours(by_octave: Tensor) -> Tensor:
    return torch.nn.functional.max_pool1d(by_octave, kernel_size=3, stride=1, padding=1)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def _pooled(largest: Tensor, count: list[int]) -> Tensor:
    """Return the largest error of each octave and its neighbours, pooled over at least MIN_POOLED elements."""
    by_octave, total = largest.tolist(), sum(count)
    pooled = []
    for centre in range(OCTAVES):
        reach = 1
        while sum(count[max(0, centre - reach) : centre + reach + 1]) < min(MIN_POOLED, total):
            reach += 1
        pooled.append(max(by_octave[max(0, centre - reach) : centre + reach + 1]))
    return largest.new_tensor(pooled)


def _rms(plain: Tensor, truth: Tensor, floor: float) -> float:
    if not truth.numel() or not plain.is_floating_point():
        return 0.0
    squared = [0.0, 0.0]
    for p, t in zip(_chunks(plain), _chunks(truth), strict=True):
        rounding = _ulp(_finite(t).abs(), plain.dtype) / 12**0.5
        for number, error in enumerate((_finite(p.double() - t), rounding)):
            squared[number] += float(error.square().sum())
    return max(floor, *((s / truth.numel()) ** 0.5 for s in squared))


def _ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gap between neighbouring values of the dtype at this magnitude."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(magnitude.clamp_min(info.tiny)))
    return torch.exp2(exponent) * info.eps


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""How far from the truth a kernel may be: derived from the case, not chosen.

The truth is the reference in float64. Two things set the scale of an honest error: what plain PyTorch gets wrong
beyond rounding its result, in the same dtype on the same inputs, and how much the truth itself moves when every input
moves by one fp32 rounding. Both are taken over elements of like size, in the same row and, relative to their rows, in
all others, so that a small element is never forgiven an error that only a large one may make. An element may differ by
one rounding of the output dtype plus SLACK times that scale, or plus what adding up its inputs one after the other in
fp32 may cost, if that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tilewright.worker.execute import backward, flat, forward

SLACK = 8.0  # another order of summation is honest; another precision is a thousand times worse
SIGMAS = 5.0  # of the error of sums in turn: one honest sum in two million is farther off
FP32 = torch.finfo(torch.float32).eps  # what accumulating in fp32 rounds
OCTAVES = 64
CANCELLED = 2.0**-44  # of a row's largest: what cancellation leaves of float64, so the truth itself is no better
FEW = 4096  # elements of all results, of which torch may be lucky with all
MANY = 2**20  # elements: from here on moving the inputs often costs more than it tells
PICTURE = (16, 64)  # lines and characters at most
PIECE = 2**26  # elements whose budgets are made, or held against results, at a time: large results need their memory
POOL = 1024  # elements that make the largest error among them a fair estimate, even where errors have long tails


@dataclass(frozen=True)
class Expected:
    """The truth of one result and how far from it each element may be."""

    what: str
    truth: Tensor
    budget: Tensor
    dtype: torch.dtype
    is_gradient: bool
    torchs_error: float = 0.0  # root mean square of what plain PyTorch gets wrong, and at least that of rounding


@dataclass(frozen=True)
class Mismatch:
    reason: str
    picture: tuple[str, ...] = ()  # where, for a result of two dimensions


@dataclass(frozen=True)
class Match:
    """The element that came nearest to its budget, or passed it by most."""

    error: float
    budget: float
    against_torch: float = 0.0  # its root mean square error as a multiple of torch's own


def expect(
    reference: Callable[..., Any],
    args: Sequence[Any],
    grads: Sequence[Tensor | None] = (),
    needs: Mapping[int, str] = MappingProxyType({}),
) -> list[Expected]:
    """What a right kernel returns for these inputs: results first, then the gradients of the arguments that `needs`
    names by number, for the incoming gradients of the floating-point results."""
    exact_grads = [None if g is None else g.double() for g in grads]
    truth, true_gradients = _run(reference, [_double(a) for a in args], exact_grads, needs)
    plain, plain_gradients = _run(reference, args, grads, needs)
    names = ["output"] if len(truth) == 1 else [f"output {i}" for i in range(len(truth))]
    names += [f"gradient of {needs[number]}" for number in needs] if true_gradients else []
    exact = [*truth, *true_gradients]
    errors = [_apart(p, t) for p, t in zip(plain + plain_gradients, exact, strict=True)]
    if sum(t.numel() for t in exact) < FEW:  # torch may be lucky with all of them: see how it fares with others
        for seed in range(6):
            near = _all_moved(args, seed, None)
            wide = _run(reference, [_double(a) for a in near], exact_grads, needs)
            here = _run(reference, near, grads, needs)
            other = [_apart(p, t) for p, t in zip(chain(*here), chain(*wide), strict=True)]
            errors = [torch.fmax(a, b) for a, b in zip(errors, other, strict=True)]
    moves = [torch.zeros_like(e) for e in errors]
    for seed in range(_draws(exact)):
        for most, now in zip(moves, _moves(reference, args, exact_grads, needs, exact, seed), strict=True):
            torch.maximum(most, now, out=most)
    largest = max((_largest(t) for t in exact if t.numel()), default=0.0)
    # A gradient's terms may cancel in a row down to nothing. They were of the size of the results, and computed from
    # results that were rounded to the dtype.
    coarsest = max((torch.finfo(p.dtype).eps for p in plain if p.is_floating_point()), default=FP32)
    floor = largest * max(FP32, coarsest / 32)
    floors = [0.0] * len(truth) + [floor] * len(true_gradients)
    inputs = sum(t.numel() for t in [*args, *grads] if isinstance(t, Tensor) and t.is_floating_point())
    return [
        Expected(
            name,
            t,
            _budget(t, e, p.dtype, m, floor, terms=inputs / max(1, t.numel())),
            p.dtype,
            is_gradient=i >= len(truth),
            torchs_error=_rms(p, t, floor),
        )
        for i, (name, t, e, m, p, floor) in enumerate(
            zip(names, exact, errors, moves, plain + plain_gradients, floors, strict=True)
        )
    ]


def exact_where_whole(expected: Expected) -> Expected:
    """For whole numbers: where all the truth is whole and fp32 holds it, sums in any order are exact, so that nothing
    but the rounding to the dtype may be off."""
    truth = expected.truth
    whole = truth.numel() and bool(((truth == truth.round()) & (truth.abs() < 2**24)).all())
    if expected.is_gradient or not whole or not expected.dtype.is_floating_point:
        return expected
    return replace(expected, budget=_rounding(truth.abs(), expected.dtype) / 2)


def compare(got: Tensor, expected: Expected) -> Match | Mismatch:
    """Shape, dtype, NaN and infinities first, then every element against its own budget."""
    truth, what = expected.truth.double(), expected.what
    if tuple(got.shape) != tuple(truth.shape):
        return Mismatch(f"{what} has shape {tuple(got.shape)}, expected {tuple(truth.shape)}")
    if got.dtype != expected.dtype:
        return Mismatch(f"{what} has dtype {_name(got.dtype)}, expected {_name(expected.dtype)}")
    if truth.numel() == 0:
        return Match(0.0, 0.0)
    got = got.to(truth.device)
    off, squares, worst = [], 0.0, Match(0.0, 1.0)
    for g, t, budget in zip(*(_in_pieces(whole) for whole in (got, truth, expected.budget)), strict=True):
        error, bad = _held_against(g.double(), t, budget, expected)
        off.append(bad)
        squares += float(error.square().sum())
        most = int((error / budget.clamp_min(1e-300)).argmax())
        if float(error[most]) * worst.budget >= worst.error * float(budget[most]):
            worst = Match(float(error[most]), float(budget[most]))
    bad = torch.cat(off)
    if bad.any():
        first = int(bad.nonzero()[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), truth.shape))
        flat = [float(t.reshape(-1)[first]) for t in (got, truth, expected.budget)]
        return Mismatch(
            f"{what}{list(index)} is {flat[0]:.6g}, expected {flat[1]:.6g} ± {flat[2]:.2g} "
            f"({int(bad.sum())} of {truth.numel()} elements are off)",
            _picture(bad.view(truth.shape)) if truth.dim() == 2 else (),
        )
    ratio = (squares / truth.numel()) ** 0.5 / expected.torchs_error if expected.torchs_error else 0.0
    return replace(worst, against_torch=ratio)


def _held_against(got: Tensor, truth: Tensor, budget: Tensor, expected: Expected) -> tuple[Tensor, Tensor]:
    """How far each element is from the truth, and whether that is too far."""
    if expected.dtype.is_floating_point:  # what the dtype cannot hold becomes infinite
        largest = torch.finfo(expected.dtype).max
        overflows = truth.isfinite() & (truth.abs() > largest)
        truth = torch.where(overflows & (got.abs() >= largest) & (got.sign() == truth.sign()), got, truth)
    finite = truth.isfinite()
    same = torch.where(finite, got.isfinite(), (got == truth) | (got.isnan() & truth.isnan()))
    if expected.is_gradient:  # what comes of infinities says how the reference is written, not what is right
        same |= ~finite
    error = torch.where(finite & same, (got - truth).abs(), 0.0)
    return error, ~same | (error > budget)


def _in_pieces(whole: Tensor) -> Sequence[Tensor]:
    return whole.reshape(-1).split(PIECE)


def _apart(a: Tensor, b: Tensor) -> Tensor:
    return torch.sub(a.double(), b.double()).abs_()


def _largest(x: Tensor) -> float:
    return max(float(_finite(piece).abs().max()) for piece in _in_pieces(x))


def _picture(bad: Tensor) -> tuple[str, ...]:
    """A character for each block of elements: none off, some, most, all."""
    blocks = torch.nn.functional.adaptive_avg_pool2d(
        bad[None, None].double(), (min(PICTURE[0], bad.shape[0]), min(PICTURE[1], bad.shape[1]))
    )[0, 0]
    shades = (blocks > 0).long() + (blocks >= 0.5) + (blocks >= 1)
    return tuple("".join("·░▒█"[shade] for shade in row) for row in shades.tolist())


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _draws(exact: list[Tensor]) -> int:
    """How often to move the inputs: a few elements may all be lucky, many are not."""
    return 6 if sum(t.numel() for t in exact) < MANY else 2


def _run(
    reference: Callable[..., Any], args: Sequence[Any], grads: Sequence[Tensor | None], needs: Mapping[int, str]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and gradients with zeros where a result does not depend on an argument."""
    leaves, returned = forward(reference, args, [*needs] if grads else [])
    outputs, inputs = flat(returned), [leaves[number] for number in needs]
    gradients = backward(outputs, inputs, grads)
    filled = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, inputs, strict=False)]
    return [output.detach() for output in outputs], filled


def _moves(
    reference: Callable[..., Any],
    args: Sequence[Any],
    grads: Sequence[Tensor | None],
    needs: Mapping[int, str],
    exact: list[Tensor],
    seed: int,
) -> list[Tensor]:
    """How far each result moves when every input moves by one rounding of fp32."""
    outputs, gradients = _run(reference, _all_moved([_double(a) for a in args], seed, FP32), grads, needs)
    return [_apart(moved, t) for moved, t in zip(outputs + gradients, exact, strict=True)]


def _all_moved(args: Sequence[Any], seed: int, by: float | None) -> list[Any]:
    """Each by itself: what moved all alike would hide how far a difference of two moves."""
    return [_moved(arg, seed * len(args) + number, by) for number, arg in enumerate(args)]


def _moved(value: Any, seed: int, by: float | None) -> Any:
    """Every number a little larger or smaller, relative to itself: by so much, or by one rounding of its dtype."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if by is None:
        return _moved(value.double(), seed, torch.finfo(value.dtype).eps).to(value.dtype)
    generator = torch.Generator(value.device).manual_seed(seed)
    sign = torch.randint(0, 2, value.shape, generator=generator, device=value.device, dtype=torch.int8)
    return value * (1 + (2.0 * sign - 1) * by)


def _budget(
    truth: Tensor, torchs_error: Tensor, dtype: torch.dtype, moved_by: Tensor, floor: float, terms: float
) -> Tensor:
    if truth.numel() == 0 or not dtype.is_floating_point:
        return torch.zeros_like(truth, dtype=torch.float64)
    columns = truth.shape[-1] if truth.dim() else 1
    truth_rows, error_rows, moved_rows = (t.reshape(-1, columns) for t in (truth, torchs_error, moved_by))
    tiles = _tiles(*truth_rows.shape)
    row = truth_rows.new_zeros(len(truth_rows), 1, dtype=torch.float64)
    for at in tiles:
        row[at[0]] = torch.maximum(row[at[0]], _finite(truth_rows[at]).abs().amax(dim=1, keepdim=True))
    row = torch.where(row > 0, row, 1.0)
    in_row = row.new_zeros(len(row), OCTAVES)  # the largest error of each octave
    count = torch.zeros(OCTAVES, dtype=torch.int64, device=row.device)
    for at in tiles:
        magnitude = _finite(truth_rows[at]).abs()
        beyond = (error_rows[at] - _rounding(magnitude, dtype) / 2).clamp_min(0)
        error = torch.maximum(_finite(torch.maximum(beyond, moved_rows[at])), magnitude * FP32).clamp_min(floor)
        octave = _octave(magnitude, row[at[0]])
        in_row[at[0]] = in_row[at[0]].scatter_reduce(1, octave, error, "amax")
        count += torch.bincount(octave.reshape(-1), minlength=OCTAVES)
    scale = torch.maximum(_with_neighbours(in_row), row * _pooled((in_row / row).amax(dim=0), count.tolist()))
    budget = torch.empty_like(truth_rows, dtype=torch.float64)
    for at in tiles:
        magnitude = _finite(truth_rows[at]).abs()
        # Adding `terms` numbers one after the other in fp32 is honest too: so far off is SIGMAS of the sum's rounding.
        in_turn = SIGMAS * magnitude * (FP32 / 2) * terms**0.5 / 3
        honest = torch.maximum(SLACK * scale[at[0]].gather(1, _octave(magnitude, row[at[0]])), in_turn)
        budget[at] = _rounding(magnitude, dtype) + honest + CANCELLED * row[at[0]]
    return budget.reshape(truth.shape)


def _tiles(rows: int, columns: int) -> list[tuple[slice, slice]]:
    """[rows, columns] in parts of at most PIECE elements."""
    width = min(columns, PIECE)
    height = max(1, PIECE // width)
    return [
        (slice(i, i + height), slice(j, j + width)) for i in range(0, rows, height) for j in range(0, columns, width)
    ]


def _octave(magnitude: Tensor, row: Tensor) -> Tensor:
    """How often each is to be doubled, about, to be as large as the largest of its row."""
    return (-torch.log2((magnitude / row).clamp_min(2.0**-OCTAVES))).floor().clamp(0, OCTAVES - 1).long()


def _with_neighbours(by_octave: Tensor) -> Tensor:
    return torch.nn.functional.max_pool1d(by_octave, kernel_size=3, stride=1, padding=1)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def _pooled(largest: Tensor, count: list[int]) -> Tensor:
    """The largest error of each octave and its neighbours, over at least POOL of so many elements."""
    by_octave, all_of_them = largest.tolist(), sum(count)
    pooled = []
    for centre in range(OCTAVES):
        reach = 1
        while sum(count[max(0, centre - reach) : centre + reach + 1]) < min(POOL, all_of_them):
            reach += 1
        pooled.append(max(by_octave[max(0, centre - reach) : centre + reach + 1]))
    return largest.new_tensor(pooled)


def _rms(plain: Tensor, truth: Tensor, floor: float) -> float:
    if not truth.numel() or not plain.is_floating_point():
        return 0.0
    squares = [0.0, 0.0]
    for p, t in zip(_in_pieces(plain), _in_pieces(truth), strict=True):
        rounding = _rounding(_finite(t).abs(), plain.dtype) / 12**0.5
        for number, error in enumerate((_finite(p.double() - t), rounding)):
            squares[number] += float(error.square().sum())
    return max(floor, *((s / truth.numel()) ** 0.5 for s in squares))


def _rounding(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The gap between neighbouring values of the dtype at this magnitude."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(magnitude.clamp_min(info.tiny)))
    return torch.exp2(exponent) * info.eps


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

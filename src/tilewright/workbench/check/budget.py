"""Derive the error budget of every output element from the case itself; there is no chosen tolerance.

The truth is the reference in float64. Two quantities set the scale of an acceptable error: PyTorch's own error beyond
the rounding of its result, in the same dtype on the same inputs, and the change of the truth when every input changes
by one fp32 rounding. For a gradient, the change when the result of every operator is rounded counts too. They are taken
over elements of similar magnitude, in the same row and, relative to their rows, in all other rows, so that a small
element is never allowed an error that only a large one may have. An element may be off by one rounding of the output
dtype plus the larger of SLACK times that scale and the error of a sequential fp32 sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tilewright.workbench.check.elements import as_rows, chunks, finite, row_maximum, tiles, ulp
from tilewright.workbench.check.operators import RoundedResults, signs
from tilewright.workbench.check.steps import WIDE, Steps
from tilewright.worker.execute import backward, flatten, forward

SLACK = 8.0  # allows another order of summation; a lower precision is off by a thousand times more
SIGMAS = 5.0  # standard deviations of a sequential sum's error: one sum in two million exceeds them
FP32_EPS = torch.finfo(torch.float32).eps  # the least relative error that every budget allows, times SLACK
FP64_UNIT = 2.0**-45  # the same where inputs and outputs are float64: far more than a sum of a million terms is off by
OCTAVES = 64
FLOAT64_CANCELLATION = 2.0**-44  # the truth's own error after cancellation, relative to its row's maximum
FEW_ELEMENTS = 4096  # in all outputs: so few that PyTorch may be exact on all of them by chance
FEW_IN_A_GRADIENT = 64  # as above, in one gradient: sums over whole inputs, of which other outputs say little
MANY_ELEMENTS = 2**20  # large enough that two perturbations of the inputs suffice
ROUGH = 2.0**-5  # relative to the largest gradient
RESIDUE = 2.0**-4  # relative to the largest term
STEP_PERTURBATIONS = 24  # two inputs that move alike leave a tie in place, in one of two pairs
PICTURE_SIZE = (16, 64)  # lines and characters at most
VARIED = 2.0**-10  # relative: outputs that differ by less may be a constant with rounding errors
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
    others: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()  # shapes and dtypes that are right as well
    overflowed: Tensor | None = None  # where PyTorch itself returns infinity or NaN in the dtype, if anywhere
    torch_is_exact: bool = True  # PyTorch's outputs are the truth, rounded
    terms: Callable[[], Tensor] | None = None  # how large the numbers are that add up to a gradient

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.truth.shape)

    @property
    def non_finite(self) -> int:
        """The number of infinities and NaN of the reference, in float64 or in the dtype."""
        overflows = 0 if self.overflowed is None else int(self.overflowed.sum())
        return max(overflows, int((~self.truth.isfinite()).sum()))


@dataclass(frozen=True)
class SlicedTensor:
    """One output whose true value in float64 does not fit into memory: `pieces` computes it by rows."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    non_finite: int
    pieces: Callable[[], Iterator[tuple[slice, ExpectedTensor]]]
    others: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    is_gradient = False


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
    destinations: Sequence[Tensor] = (),
    has_steps: bool = False,
    precision: float = 0.0,
    multiplies: bool = False,
) -> list[ExpectedTensor]:
    """Return the expected outputs for these inputs, followed by the expected gradients.

    `needs_grad` maps the numbers of the arguments that need a gradient to their names, and `grads` holds the incoming
    gradients of the floating-point outputs. `zeros_scale` is the magnitude that zero inputs stand for when they are
    perturbed. `destinations` are arguments that a kernel may fill and return in place of an output. `has_steps` says
    that the reference rounds or compares, so that small errors may become large ones. `precision` is that of sums,
    relative to their largest term, if it is less than fp32's. `multiplies` says that the reference multiplies matrices.
    """
    exact_grads = [None if g is None else g.double() for g in grads]
    truth, true_gradients = _run(reference, [_double(a) for a in args], exact_grads, needs_grad)
    plain, plain_gradients = _run(reference, args, grads, needs_grad)
    widths = [p.dtype for p in plain]
    plain = [_narrowed(p, args) for p in plain]
    unit = max(_unit(plain), precision)
    names = ["output"] if len(truth) == 1 else [f"output {i}" for i in range(len(truth))]
    names += [f"gradient of {needs_grad[number]}" for number in needs_grad] if true_gradients else []
    truth = [_double(t) if t.dtype.itemsize == 1 else t for t in truth]  # fp8 has few operators
    exact = [*truth, *true_gradients]
    errors = [_abs_difference(p, t) for p, t in zip(plain + plain_gradients, exact, strict=True)]
    torch_is_exact = [_is_rounded(e, t, p.dtype) for e, t, p in zip(errors, truth, plain, strict=False)]
    is_small = any(t.numel() < FEW_IN_A_GRADIENT for t in true_gradients)
    if is_small or sum(t.numel() for t in exact) < FEW_ELEMENTS:
        for seed in range(6):
            near = _perturb_all(args, seed, None, zeros_scale)
            wide = _run(reference, [_double(a) for a in near], exact_grads, needs_grad)
            here, here_gradients = _run(reference, near, grads, needs_grad)
            narrow = [_narrowed(p, args) for p in here]
            other = [_abs_difference(p, t) for p, t in zip(narrow + here_gradients, chain(*wide), strict=True)]
            errors = [torch.fmax(a, b) for a, b in zip(errors, other, strict=True)]
    sensitivities = [torch.zeros_like(e) for e in errors]
    for seed in range(_perturbation_count(exact)):
        near = _perturb_all([_double(a) for a in args], seed, unit, zeros_scale)
        perturbed = chain(*_run(reference, near, exact_grads, needs_grad))
        changes = [_abs_difference(p, t) for p, t in zip(perturbed, exact, strict=True)]
        for largest_change, change in zip(sensitivities, changes, strict=True):
            torch.maximum(largest_change, change, out=largest_change)
    in_fp32 = _run(reference, [_single(a) for a in args], (), {})[0] if has_steps else plain
    steps = [
        Steps(t, p.dtype, is_exact=has_steps and _is_integer(t, p) and _is_integer(t, wide))
        for t, p, wide in zip(truth, plain, in_fp32, strict=True)
    ]
    for step, error, sensitivity in zip(steps, errors, sensitivities, strict=False):
        step.take(error, sensitivity)
    if has_steps or any(step.allowed is not None for step in steps):
        eps = max((torch.finfo(p.dtype).eps for p in plain if p.is_floating_point()), default=0.0)
        by = max(WIDE * unit, 2 * eps)
        for number in range(STEP_PERTURBATIONS):  # in pairs of opposite sign: one of the two crosses a near step
            near = _perturb_all([_double(a) for a in args], number // 2, -by if number % 2 else by, zeros_scale)
            for step, perturbed, t in zip(steps, _run(reference, near, (), {})[0], truth, strict=True):
                step.widen(_abs_difference(perturbed, t), by / unit)
    output_eps = max((torch.finfo(p.dtype).eps for p in plain if p.is_floating_point()), default=unit)
    rounded_runs = 6 if sum(t.numel() for t in exact) < FEW_ELEMENTS else 2
    for seed in range(rounded_runs) if true_gradients else ():  # a backward pass reads results rounded to the dtype
        with RoundedResults(max(unit, output_eps / 8), 1000 * seed):
            rounded = _run(reference, [_double(a) for a in args], exact_grads, needs_grad)[1]
        for error, r, t in zip(errors[len(truth) :], rounded, true_gradients, strict=True):
            torch.maximum(error, _abs_difference(r, t), out=error)

    def signed_gradients() -> list[Tensor]:
        """Return gradients for incoming gradients with random signs, so that their terms do not cancel by design."""
        signed = [None if g is None else g * signs(g, seed) for seed, g in enumerate(exact_grads)]
        return _run(reference, [_double(a) for a in args], signed, needs_grad)[1]

    def gradient_terms(number: int) -> Tensor:
        return signed_gradients()[number].abs()

    # The terms of a gradient may cancel to zero in a row. They are as large as those of other rows, and computed from
    # outputs rounded to the dtype.
    pairs = zip(true_gradients, signed_gradients() if true_gradients else (), strict=True)
    floors = [0.0] * len(truth) + [max(unit, output_eps / 32) * max(map(_max_abs, pair)) for pair in pairs]
    inputs = [t.numel() for t in [*args, *grads] if isinstance(t, Tensor) and t.is_floating_point()]
    budgets = [
        _budget(t, e, p.dtype, s, floor, unit, sum(inputs) / max(1, t.numel()), _products(t, inputs, multiplies))
        for t, e, s, p, floor in zip(exact, errors, sensitivities, plain + plain_gradients, floors, strict=True)
    ]
    budgets[: len(steps)] = [step.add_to(budget) for step, budget in zip(steps, budgets, strict=False)]

    return [
        ExpectedTensor(
            name,
            t,
            budget,
            p.dtype,
            is_gradient=i >= len(truth),
            torch_error=_rms(p, t, floor),
            others=_others(p, widths[i], destinations) if i < len(truth) else (),
            overflowed=_overflowed(p),
            torch_is_exact=i >= len(truth) or torch_is_exact[i],
            terms=partial(gradient_terms, i - len(truth)) if i >= len(truth) else None,
        )
        for i, (name, t, budget, p, floor) in enumerate(
            zip(names, exact, budgets, plain + plain_gradients, floors, strict=True)
        )
    ]


def _overflowed(plain: Tensor) -> Tensor | None:
    if not plain.is_floating_point():
        return None
    overflowed = ~(plain.float() if plain.dtype.itemsize == 1 else plain).isfinite()
    return overflowed if bool(overflowed.any()) else None


def _unit(outputs: Sequence[Tensor]) -> float:
    """Return the relative precision in which a kernel may compute: fp32's, unless all its outputs are float64."""
    floats = [output.dtype for output in outputs if output.is_floating_point()]
    return FP64_UNIT if floats and all(dtype == torch.float64 for dtype in floats) else FP32_EPS


def _narrowed(output: Tensor, args: Sequence[Any]) -> Tensor:
    """Return an output in fp32 if the reference computes it in float64 from narrower inputs."""
    floats = [a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    return output.float() if output.dtype == torch.float64 and floats and torch.float64 not in floats else output


def _others(
    output: Tensor, dtype: torch.dtype, destinations: Sequence[Tensor]
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return the reference's own dtype, and the shapes and dtypes of destinations that can hold the output."""
    found = [(tuple(output.shape), dtype)]
    for buffer in destinations:
        is_wide_enough = buffer.dtype == output.dtype or (
            buffer.is_floating_point() and output.is_floating_point() and buffer.dtype.itemsize >= output.dtype.itemsize
        )
        if buffer.numel() == output.numel() and is_wide_enough:
            found.append((tuple(buffer.shape), buffer.dtype))
    return tuple(dict.fromkeys(found))


def tighten_for_moves(expected: ExpectedTensor) -> ExpectedTensor:
    """Allow only the rounding to the output dtype, for an operation that moves or selects values."""
    if expected.is_gradient or not expected.truth.numel():
        return expected
    if not expected.dtype.is_floating_point:
        return replace(expected, budget=torch.zeros_like(expected.budget))
    rounded = expected.truth.to(expected.dtype).double()
    return replace(expected, budget=finite((rounded - expected.truth).abs()))


def tighten_for_integers(expected: ExpectedTensor) -> ExpectedTensor:
    """Allow two fp32 roundings and that to the output dtype if every true value is an integer that fp32 represents.

    Sums of such integers are exact in any order. PyTorch's own may not be: it rounds what it stores between operators.
    """
    truth = expected.truth
    if expected.is_gradient or not expected.dtype.is_floating_point or not truth.numel():
        return expected
    if not expected.torch_is_exact or not bool(((truth == truth.round()) & (truth.abs() < 2**24)).all()):
        return expected
    return replace(expected, budget=_roundings(truth, expected.dtype))


def loosen_gradients(expected: Sequence[ExpectedTensor]) -> list[ExpectedTensor]:
    """Allow gradients an error of a fraction of the largest of them, for inputs where they are lost in cancellation."""
    largest = max((_max_abs(e.truth) for e in expected if e.is_gradient), default=0.0)
    return [replace(e, budget=e.budget.clamp_min(ROUGH * largest)) if e.is_gradient else e for e in expected]


def _roundings(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of values computed with two fp32 roundings and rounded to the dtype."""
    return ulp(truth.abs(), dtype) / 2 + ulp(truth.abs(), torch.float32)


def _is_rounded(error: Tensor, truth: Tensor, dtype: torch.dtype) -> bool:
    pairs = zip(chunks(error), chunks(truth.double()), strict=True)
    return not dtype.is_floating_point or all(bool((e <= _roundings(t, dtype)).all()) for e, t in pairs)


def shows_nothing(expected: Sequence[ExpectedTensor | SlicedTensor]) -> str | None:
    """Return why outputs within these budgets prove nothing, or None if at least one of them has to be computed."""
    outputs = [one for one in expected if not one.is_gradient]
    if any(isinstance(one, SlicedTensor) for one in outputs):
        return None
    tensors = [one for one in outputs if isinstance(one, ExpectedTensor) and one.truth.numel()]
    if not tensors:
        return "returns no elements"
    finite = [one for one in tensors if bool(_judged(one).any())]
    if not finite:
        return "returns only NaN and infinities"
    return "has rounding errors as large as its outputs" if all(map(_admits_a_constant, finite)) else None


def _judged(expected: ExpectedTensor) -> Tensor:
    """Return where a wrong value would be called wrong: where the truth is finite and PyTorch does not overflow."""
    finite = expected.truth.isfinite()
    return finite if expected.overflowed is None else finite & ~expected.overflowed


def _admits_a_constant(expected: ExpectedTensor) -> bool:
    """Return whether one constant is within the budget of every element although the elements differ."""
    if not expected.dtype.is_floating_point:
        return False
    judged = _judged(expected)
    truth, budget = expected.truth[judged].double(), expected.budget[judged]
    low, high = truth.min(), truth.max()
    is_varied = bool(high - low > VARIED * truth.abs().max())
    return is_varied and bool((truth - budget).max() <= (truth + budget).min())


def compare(got: Tensor, expected: ExpectedTensor | SlicedTensor) -> Match | Mismatch:
    """Compare shape, dtype, NaN and infinities, then every element against its budget."""
    name = expected.name
    if (tuple(got.shape), got.dtype) in expected.others:
        got = got.reshape(expected.shape)
    elif tuple(got.shape) != expected.shape:
        return Mismatch(f"{name} has shape {tuple(got.shape)}, expected {expected.shape}")
    elif got.dtype != expected.dtype:
        return Mismatch(f"{name} has dtype {_dtype_name(got.dtype)}, expected {_dtype_name(expected.dtype)}")
    if isinstance(expected, SlicedTensor):
        return _compare_slices(got, expected)
    truth = expected.truth.double()
    if truth.numel() == 0:
        return Match(0.0, 0.0)
    got = got.to(truth.device)
    overflowed = torch.zeros_like(truth, dtype=torch.bool) if expected.overflowed is None else expected.overflowed
    off, squared, worst = [], 0.0, Match(0.0, 1.0)
    for g, t, budget, lost in zip(*map(chunks, (got, truth, expected.budget, overflowed)), strict=True):
        error, bad = _errors(g.double(), t, budget, lost, expected)
        off.append(bad)
        squared += float(error.square().sum())
        error = torch.where(bad, 0.0, error)
        most = int((error / budget.clamp_min(1e-300)).argmax())
        if float(error[most]) * worst.budget >= worst.error * float(budget[most]):
            worst = Match(float(error[most]), float(budget[most]))
    bad = torch.cat(off)
    if bad.any() and not (expected.terms and _are_residues(got, truth, bad.view(truth.shape), expected.terms())):
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


def _compare_slices(got: Tensor, expected: SlicedTensor) -> Match | Mismatch:
    worst = Match(0.0, 1.0)
    for rows, piece in expected.pieces():
        match = compare(got[rows], piece)
        if isinstance(match, Mismatch):
            return replace(match, reason=f"from row {rows.start}: {match.reason}")
        relative = max(worst.relative_to_torch, match.relative_to_torch)
        if match.error * worst.budget >= worst.error * match.budget:
            worst = match
        worst = replace(worst, relative_to_torch=relative)
    return worst


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference, NaN aside."""
    pairs = zip(chunks(one), chunks(other), strict=True)
    return max((float((a.double() - b.double()).nan_to_num().abs().max()) for a, b in pairs if a.numel()), default=0.0)


def _are_residues(got: Tensor, truth: Tensor, bad: Tensor, terms: Tensor) -> bool:
    """Return whether wrong gradients are the rounding errors of sums that are zero.

    A function that does not change when its inputs are shifted along a dimension has gradients whose sum along it is
    zero. Written with x - max x, PyTorch adds that sum, with the rounding error of every term, to the gradient of the
    maximum. The errors of a line may add up to one fp32 rounding of its terms, and each stays far smaller than a term.
    """
    error = torch.where(bad, (got.double() - truth).abs(), 0.0)
    terms = torch.maximum(finite(terms), finite(truth).abs())
    for dim in range(truth.dim()):
        total, sum_of_errors = terms.sum(dim), error.sum(dim)
        is_zero = truth.sum(dim).abs() <= FLOAT64_CANCELLATION * total
        is_small = (sum_of_errors <= FP32_EPS * total) & (error.amax(dim) <= RESIDUE * terms.amax(dim))
        if bool(((sum_of_errors == 0) | is_zero & is_small).all()):
            return True
    return False


def _errors(
    got: Tensor, truth: Tensor, budget: Tensor, overflowed: Tensor, expected: ExpectedTensor
) -> tuple[Tensor, Tensor]:
    """Return the error of each element, and whether the element is wrong."""
    if expected.dtype.is_floating_point:  # a value beyond the dtype's range may become infinite
        largest = torch.finfo(expected.dtype).max
        is_beyond = (truth.abs() + budget > largest) & (got.abs() >= largest) & (got.sign() == truth.sign())
        may_differ = truth.isfinite() & (is_beyond | (overflowed & ~got.isfinite()))
        truth = torch.where(may_differ, got, truth)
    finite = truth.isfinite()
    same = torch.where(finite, got.isfinite(), (got == truth) | (got.isnan() & truth.isnan()))
    if expected.is_gradient:  # a non-finite gradient depends on how the reference is written
        same |= ~finite
    error = torch.where(finite & same, (got - truth).abs(), 0.0)
    return error, ~same | (error > budget)


def _abs_difference(a: Tensor, b: Tensor) -> Tensor:
    return torch.sub(a.double(), b.double()).abs_()


def _max_abs(x: Tensor) -> float:
    return max((float(finite(piece.double()).abs().max()) for piece in chunks(x) if piece.numel()), default=0.0)


def _picture(bad: Tensor) -> tuple[str, ...]:
    """Draw one character per block of elements: none wrong, some, most, all."""
    blocks = torch.nn.functional.adaptive_avg_pool2d(
        bad[None, None].double(), (min(PICTURE_SIZE[0], bad.shape[0]), min(PICTURE_SIZE[1], bad.shape[1]))
    )[0, 0]
    shades = (blocks > 0).long() + (blocks >= 0.5) + (blocks >= 1)
    return tuple("".join("·░▒█"[shade] for shade in row) for row in shades.tolist())


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_integer(truth: Tensor, result: Tensor) -> bool:
    """Return whether a floating-point result is the truth, and all integers."""
    if not result.is_floating_point():
        return False
    pairs = zip(chunks(truth), chunks(result), strict=True)
    return all(torch.equal(t, r.to(t.dtype)) and torch.equal(t, t.round()) for t, r in pairs)


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
    step = signs(value, seed) * by
    return value * (1 + step) + step * zeros_scale if zeros_scale else value * (1 + step)


def _products(result: Tensor, inputs: Sequence[int], multiplies: bool) -> float:
    """Return how many products each element of a product of two of these inputs is the sum of: K for [M, K] [K, N]."""
    largest = sorted(inputs)[-2:]
    return (math.prod(largest) / max(1, result.numel())) ** 0.5 if multiplies and len(largest) == 2 else 0.0


def _budget(
    truth: Tensor,
    torch_error: Tensor,
    dtype: torch.dtype,
    sensitivity: Tensor,
    floor: float,
    unit: float,
    terms: float,
    products: float,
) -> Tensor:
    if truth.numel() == 0 or not dtype.is_floating_point:
        return torch.zeros_like(truth, dtype=torch.float64)
    truth_rows, error_rows, sensitivity_rows = map(as_rows, (truth, torch_error, sensitivity))
    row, parts = row_maximum(truth_rows), tiles(*truth_rows.shape)
    in_row = row.new_zeros(len(row), OCTAVES)  # the largest error per octave
    count = torch.zeros(OCTAVES, dtype=torch.int64, device=row.device)
    for at in parts:
        magnitude = finite(truth_rows[at]).abs()
        beyond = (error_rows[at] - ulp(magnitude, dtype) / 2).clamp_min(0)
        error = torch.maximum(finite(torch.maximum(beyond, sensitivity_rows[at])), magnitude * unit)
        error = error.clamp_min(floor)
        octave = _octave(magnitude, row[at[0]])
        found = torch.bincount(octave.reshape(-1), minlength=OCTAVES)
        in_row[at[0]] = torch.maximum(in_row[at[0]], _largest_by_octave(error, octave, found))
        count += found
    scale = torch.maximum(_max_with_neighbours(in_row), row * _pooled((in_row / row).amax(dim=0), count.tolist()))
    budget = torch.empty_like(truth_rows, dtype=torch.float64)
    for at in parts:
        magnitude = finite(truth_rows[at]).abs()
        # A kernel may also add `terms` numbers one after the other in fp32: allow SIGMAS of that sum's rounding error.
        sequential_sum = SIGMAS * magnitude * (unit / 2) * terms**0.5 / 3
        allowed = torch.maximum(SLACK * scale[at[0]].gather(1, _octave(magnitude, row[at[0]])), sequential_sum)
        # Where products of both signs cancel, partial sums are larger than the result. SIGMAS standard deviations of
        # their rounding are about sqrt(products) / 2 changes of the sum when each product changes by one rounding.
        allowed = torch.maximum(allowed, products**0.5 * finite(sensitivity_rows[at]))
        budget[at] = ulp(magnitude, dtype) + allowed + FLOAT64_CANCELLATION * row[at[0]]
    return budget.reshape(truth.shape)


def _octave(magnitude: Tensor, row: Tensor) -> Tensor:
    """Return floor(log2(row maximum / magnitude)) of each element."""
    return (-torch.log2((magnitude / row).clamp_min(2.0**-OCTAVES))).floor().clamp(0, OCTAVES - 1).long()


def _largest_by_octave(error: Tensor, octave: Tensor, count: Tensor) -> Tensor:
    """Return the largest error of each octave in each row."""
    largest = error.new_zeros(len(error), OCTAVES)
    if not error.is_cuda:
        return largest.scatter_reduce(1, octave, error, "amax")
    for number in count.nonzero()[:, 0].tolist():  # the atomics of scatter_reduce would wait for each other
        largest[:, number] = torch.where(octave == number, error, 0.0).amax(1)
    return largest


def _max_with_neighbours(by_octave: Tensor) -> Tensor:
    return torch.nn.functional.max_pool1d(by_octave, kernel_size=3, stride=1, padding=1)


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
    if not truth.numel() or not plain.is_floating_point() or plain.dtype == torch.float64:  # the truth is no better
        return 0.0
    squared = [0.0, 0.0]
    for p, t in zip(chunks(plain), chunks(truth), strict=True):
        rounding = ulp(finite(t).abs(), plain.dtype) / 12**0.5
        for number, error in enumerate((finite(p.double() - t), rounding)):
            squared[number] += float(error.square().sum())
    return max(floor, *((s / truth.numel()) ** 0.5 for s in squared))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Find references that return different outputs for the same inputs: no kernel can be compared with those."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.workbench.check.elements import chunks
from tilewright.worker.execute import flatten, forward
from tilewright.worker.memory import same_bits

# The least number of runs, and more within some seconds: a reference may count its calls, and one that draws random
# numbers may differ rarely, or in a few elements only.
RUNS, MOST_RUNS, SECONDS = 2, 16, 0.1
RANDOM_RUNS, MOST_RANDOM_RUNS, RANDOM_SECONDS = 16, 256, 0.5
# Atomics and the order of a sum change results by rounding, relative to the largest element. Less than one fp32
# rounding of a float64 result cannot change a verdict.
TOLERANCE = {torch.float64: 2.0**-23, torch.float32: 2.0**-13}


def unrepeatable(reference: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Return why a reference does not repeat itself on these arguments, or None. It runs in float64 if it can."""

    def prepare(values: Sequence[Any]) -> Callable[[], Any]:
        copies = [v.detach().clone() if isinstance(v, Tensor) else v for v in values]
        return lambda: forward(reference, copies, [])[1]

    try:
        return unrepeatable_calls(lambda: prepare([_double(a) for a in args]))
    except Exception:  # written for one dtype
        return unrepeatable_calls(lambda: prepare(args))


def unsound(reference: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Return why no kernel can be compared with a reference: it does not repeat itself, or it writes to its inputs."""
    return unrepeatable(reference, args) or _written(reference, args)


def _written(reference: Callable[..., Any], args: Sequence[Any]) -> str | None:
    copies = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
    forward(reference, copies, [])
    for number, (before, after) in enumerate(zip(args, copies, strict=True)):
        if isinstance(before, Tensor) and not same_bits(before, after):
            return f"writes to its argument {number + 1}"
    return None


def unrepeatable_calls(prepare: Callable[[], Callable[[], Any]]) -> str | None:
    """Return why the calls that `prepare` makes do not return the same outputs, or None."""
    start = time.monotonic()
    first, is_random = _seeded(prepare(), 0)
    least, most = (RANDOM_RUNS, MOST_RANDOM_RUNS) if is_random else (RUNS, MOST_RUNS)
    deadline = start + (RANDOM_SECONDS if is_random else SECONDS)
    for seed in range(1, most):
        if seed >= least and time.monotonic() > deadline:
            break
        if not same_outputs(first, _seeded(prepare(), seed)[0]):
            return "draws random numbers" if is_random else "returns different outputs for the same inputs"
    return None


def same_outputs(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two runs returned the same outputs up to the rounding errors of a nondeterministic sum."""
    return len(first) == len(second) and all(map(_same, first, second))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return not isinstance(a, Tensor) and not isinstance(b, Tensor)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = TOLERANCE.get(a.dtype, 8 * torch.finfo(a.dtype).eps)
    difference, largest = 0.0, 0.0
    for one, other in zip(chunks(a), chunks(b), strict=True):
        one, other = one.double(), other.double()  # fp8 has few operators
        if not torch.equal(one.isfinite(), other.isfinite()):
            return False
        one, other = (x.nan_to_num(0.0, 0.0, 0.0) for x in (one, other))
        if one.numel():
            difference = max(difference, float((one - other).abs().max()))
            largest = max(largest, float(one.abs().max()))
    return difference <= tolerance * largest


def _seeded(call: Callable[[], Any], seed: int) -> tuple[list[Any], bool]:
    """Return the outputs of a call after seeding torch, and whether the call drew random numbers.

    The generators of Python and NumPy go on, since a reference may depend on their state.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        before = _generator_states(devices)
        outputs = flatten(call())
        after = _generator_states(devices)
    return outputs, before != after


def _generator_states(devices: Sequence[int]) -> list[Any]:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    found = [bytes(state.tolist()) for state in states]
    if numpy := sys.modules.get("numpy"):  # a reference that draws from it has imported it
        _, keys, position, *_ = numpy.random.get_state()
        found += [keys.tobytes(), position]
    return [*found, random.getstate()]


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

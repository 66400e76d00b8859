"""Find references that return different outputs for the same inputs: no kernel can be compared with those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.worker.execute import flatten, forward

RUNS, RANDOM_RUNS = 2, 16  # a reference that draws random numbers may differ in a few elements only
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


def unrepeatable_calls(prepare: Callable[[], Callable[[], Any]]) -> str | None:
    """Return why the calls that `prepare` makes do not return the same outputs, or None."""
    first, is_random = _seeded(prepare(), 0)
    for seed in range(1, RANDOM_RUNS if is_random else RUNS):
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
    one, other = a.double(), b.double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    one, other = one.nan_to_num(0.0, 0.0, 0.0), other.nan_to_num(0.0, 0.0, 0.0)
    return not one.numel() or bool((one - other).abs().max() <= tolerance * one.abs().max())


def _seeded(call: Callable[[], Any], seed: int) -> tuple[list[Any], bool]:
    """Return the outputs of a call after seeding torch, and whether the call drew random numbers."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        before = _generator_states(devices)
        outputs = flatten(call())
        after = _generator_states(devices)
    return outputs, not all(map(torch.equal, before, after))


def _generator_states(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

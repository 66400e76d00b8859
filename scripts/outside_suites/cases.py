"""A case of a suite, and the outcome of running it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tilewright
from tilewright.errors import KernelAborted, KernelFault
from tilewright.fake_cuda import redirect_cuda
from tilewright.interpreter import Run

RIGHT, WRONG, REFUSED, ERROR = "right", "wrong", "refused", "error"


@dataclass(frozen=True)
class Case:
    """One call of foreign code; `run` raises unless its result is right, or returns outcomes of several cases."""

    suite: str
    name: str
    run: Callable[[], list[Outcome] | None]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case, with the reason if it is not right."""

    suite: str
    name: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Missing(Exception):
    """A package or a checkout that a suite needs is missing; the message says how to get it."""


class Mismatch(Exception):
    """The result is not the expected one."""


def judge(case: Case) -> list[Outcome]:
    """Run a case and return the outcome, or the outcomes of the cases in it."""
    start = time.monotonic()
    outcome, reason = RIGHT, ""
    try:
        if (several := case.run()) is not None:
            return several
    except Exception as error:
        outcome, reason = outcome_of(error), describe(error)
    return [Outcome(case.suite, case.name, outcome, reason, round(time.monotonic() - start, 2))]


def outcome_of(error: BaseException) -> str:
    if isinstance(error, Mismatch | KernelFault):
        return WRONG
    return REFUSED if isinstance(error, KernelAborted) and error.kind == "unsupported" else ERROR


def describe(error: BaseException) -> str:
    """Return the first line of an error's message, with its type unless Tilewright raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = "" if isinstance(error, Mismatch | KernelFault | KernelAborted) else f"{type(error).__name__}: "
    return name + (lines[0][:300] if lines else "")


@contextlib.contextmanager
def interpreted(faults: str = "raise") -> Iterator[Run]:
    """Interpret launches, and answer what host code asks torch about the GPU: tensors stay on the CPU."""
    properties = SimpleNamespace(multi_processor_count=4, major=9, minor=0, name="NVIDIA H200", total_memory=2**37)
    answers = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "synchronize": lambda *_: None,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
    }
    torch_cuda, is_cuda = mock.patch.multiple(torch.cuda, **answers), mock.patch.object(torch.Tensor, "is_cuda", True)
    with tilewright.interpret(faults=faults) as run, redirect_cuda("cpu"), torch_cuda, is_cuda:
        yield run


def compare(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: dict[str, Any],
    *,
    tolerance: float,
    backward: bool = True,
    exact: torch.dtype = torch.float32,
) -> None:
    """Fail unless outputs and gradients in the interpreter match the reference.

    The error of each tensor, as a root mean square, is at most `tolerance` times the root mean square of the expected
    values. The reference is called with the same inputs in the dtype `exact`.
    """
    wide = {k: v.to(exact) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    with interpreted():
        expected, wanted = _call(reference, wide, backward)
    with interpreted() as run:
        found, gradients = _call(fn, inputs, backward)
        if unwritten := run.unwritten(found):
            raise Mismatch(str(unwritten[0]))
    if not run.launches:
        raise RuntimeError("no kernel was launched")
    if len(found) != len(expected):
        raise Mismatch(f"{len(found)} outputs instead of {len(expected)}")
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert_close(f"output {i}", got, want, tolerance)
    for name, want in wanted.items():
        assert_close(f"gradient of {name}", gradients.get(name), want, tolerance)


def _call(
    fn: Callable[..., Any], inputs: dict[str, Any], backward: bool
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Return the outputs, and the gradients of all inputs for one gradient of the outputs."""
    leaves = {
        k: v.detach().clone().requires_grad_(backward) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    result = fn(**leaves)
    outputs = [o for o in (result if isinstance(result, tuple | list) else (result,)) if isinstance(o, Tensor)]
    if not backward:
        return outputs, {}
    torch.manual_seed(1)
    some = [o for o in outputs if o.requires_grad]
    torch.autograd.backward(some, [torch.randn(o.shape).to(o.dtype) for o in some])
    gradients = {k: v.grad for k, v in leaves.items() if isinstance(v, Tensor) and v.requires_grad}
    return [o.detach() for o in outputs], gradients


def assert_close(what: str, found: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    if expected is None:
        return
    if found is None:
        raise Mismatch(f"{what} is missing")
    if found.shape != expected.shape:
        raise Mismatch(f"{what} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    difference = (found.double() - expected.double()).square().mean().sqrt().item()
    scale = expected.double().square().mean().sqrt().item()
    share = difference / max(scale, 1e-6)
    if not share <= tolerance:
        raise Mismatch(f"{what} differs by {share:.1e} of its root mean square, more than {tolerance:.0e}")

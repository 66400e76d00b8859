"""How long does a right kernel take, and how far is it from the ceiling? A Timing for each.

A kernel that `check` has not found right, on its cases and on the very inputs to be timed, has no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from tilewright import registry
from tilewright.spec import Case, Cost, Kernel, Op
from tilewright.tools.bench.ceilings import measure
from tilewright.tools.bench.timer import Timer
from tilewright.tools.check import FORWARD_ONLY, Verdict, check

SAMPLES = 50


@dataclass
class Timing:
    op: str
    kernel: str
    case: dict[str, Any]
    dtype: str
    direction: str  # forward or backward
    cost: Cost
    verdict: str
    reason: str = ""
    samples_us: list[float] = field(default_factory=list)
    median_us: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def directions(op: Op, wanted: str) -> list[str]:
    return [d for d in ("forward", "backward") if wanted in (d, "both") and (d == "forward" or op.backward_cost)]


def units(op: Op, cases: Sequence[Case]) -> set[str]:
    """The units whose ceilings these cases are held against."""
    return {unit for case in cases for unit in op.cost(*op.make(case, device="meta")).flops}


def bench(
    op: Op,
    kernels: Sequence[Kernel],
    files: Sequence[Path],
    *,
    timer: Timer,
    cases: Sequence[Case],
    direction: str = "forward",
    samples: int = SAMPLES,
    device: str = "cuda",
    on_step: Callable[[str], None] = lambda _: None,
) -> Iterator[Timing]:
    """Timings of all kernels, case by case. `on_step` is told what is being done."""
    dtypes = sorted({case.dtype for case in cases})
    verdicts: dict[str, Verdict] = {}
    for kernel in kernels:
        if not kernel.builds_per_case:  # that one is checked on each timed case alone: each is another program
            on_step(f"checking {kernel.name}")
            verdicts |= _by_kernel(check(op, [kernel], device=device, dtypes=dtypes))
    everyone = [*kernels]
    for path in files:
        on_step(f"checking {path.name}")
        verdicts |= _by_kernel(check(op, files=[path], device=device, dtypes=dtypes))
        if verdicts[path.name].verdict == "right":
            has_gradient = op.backward_cost is not None and FORWARD_ONLY not in verdicts[path.name].labels
            everyone.append(registry.load_file(path, op, differentiable=has_gradient))
    sound = [k for k in everyone if k.name not in verdicts or verdicts[k.name].verdict == "right"]
    for case in cases:
        torch._dynamo.reset()  # else the ninth shape would silently run uncompiled
        with functorch_config.patch(donated_buffer=False):  # one compiled graph is run backward many times
            on_step(f"checking {case}")
            here = verdicts | _check_timed_case(op, sound, case, device)
            for toward in directions(op, direction):
                on_step(f"timing {case} {toward}")
                yield from _time_case(op, everyone, case, toward, here, timer, samples, device)


def _time_case(
    op: Op,
    kernels: Sequence[Kernel],
    case: Case,
    direction: str,
    verdicts: Mapping[str, Verdict],
    timer: Timer,
    samples: int,
    device: str,
) -> Iterator[Timing]:
    args = op.make(case, "meta")
    cost = op.cost(*args) if direction == "forward" or op.backward_cost is None else op.backward_cost(*args)
    if not cost.bytes:  # the gradient is the incoming one itself: there is nothing to time
        return
    about = (dict(case.point), case.dtype, direction, cost)
    without_gradient = {kernel.name for kernel in kernels if not kernel.differentiable}
    for name, verdict in verdicts.items():
        if verdict.verdict != "right" and (direction == "forward" or name not in without_gradient):
            yield Timing(op.name, name, *about, verdict.verdict, verdict.reason)
    able = []
    for kernel in kernels:
        if direction == "backward" and kernel.name in without_gradient:
            yield Timing(op.name, kernel.name, *about, "unsupported", "has no gradient")
        elif verdicts[kernel.name].verdict == "right":
            able.append(kernel)
    args = op.make(case, device, seed=1)
    calls = {kernel.name: _call(kernel, args, direction) for kernel in able}
    for name, taken in timer.interleave(calls, samples).items():
        us = [round(sample, 3) for sample in taken]
        yield Timing(op.name, name, *about, "right", "", us, median(us))


def _check_timed_case(op: Op, kernels: Sequence[Kernel], case: Case, device: str) -> dict[str, Verdict]:
    try:
        return _by_kernel(check(op, kernels, device=device, cases=[case], dtypes=[case.dtype], depth="once"))
    except torch.cuda.OutOfMemoryError:
        reason = "the case and its float64 truth do not fit in this GPU's memory"
        return {kernel.name: Verdict(op.name, kernel.name, "unsupported", reason) for kernel in kernels}
    finally:
        torch.cuda.empty_cache()


def _by_kernel(verdicts: Iterable[Verdict]) -> dict[str, Verdict]:
    return {verdict.kernel: verdict for verdict in verdicts}


def _call(kernel: Kernel, args: tuple[Any, ...], direction: str) -> Callable[[], Any]:
    if direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return kernel.fn(*args)

        return forward
    leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    wanted = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]
    output = kernel.fn(*leaves)
    grad = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, wanted, grad, retain_graph=True)


__all__ = ["SAMPLES", "Timer", "Timing", "bench", "directions", "measure", "units"]

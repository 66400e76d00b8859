"""Calls to profile: as a function to call repeatedly, with a title and a minimum cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.cost import Cost
from tilewright.workbench.audit.inputs import case_of, load_call, op_of
from tilewright.worker.execute import flatten, forward

Call = dict[str, Any]  # as in `audit.inputs`; with a `direction` for a kernel of an op


def prepare(call: Call, device: str) -> Callable[[], Any]:
    """Return a function that does the call. The forward pass of a backward call is done already."""
    fn, args = load_call(call, device)
    if call.get("direction", "forward") == "forward":
        return lambda: forward(fn, args, ())[1]
    constants = op_of(call).constants
    needs = [n for n, a in enumerate(args) if _is_float(a) and n not in constants]
    leaves, outputs = forward(fn, args, needs)
    results = [o for o in flatten(outputs) if _is_float(o) and o.requires_grad]
    grads = [torch.randn_like(o) for o in results]
    inputs = [leaves[n] for n in needs]
    return lambda: torch.autograd.grad(results, inputs, grads, retain_graph=True, allow_unused=True)


def title(call: Call) -> str:
    if "op" not in call:
        return f"{Path(call['file']).name}, {call['function']}({', '.join(call['inputs'])})"
    direction = "" if call["direction"] == "forward" else f", {call['direction']}"
    return f"{call['op']}, {call['kernel']}, {case_of(call)} {call['dtype']}{direction}"


def min_cost(call: Call) -> Cost | None:
    """Return the minimum cost of a call of an op; None for a function of a file."""
    if "op" not in call:
        return None
    op = op_of(call)
    cost = op.cost if call["direction"] == "forward" else op.backward_cost
    return (cost(*op.make(case_of(call), "meta")) or None) if cost else None


@contextmanager
def profiler_range(name: str) -> Iterator[None]:
    """Open a named range in torch traces and, with a GPU, in NVTX."""
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()

"""A call that is to be measured: ready to be made again and again, named, and with its least work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import registry
from tilewright.cost import Cost
from tilewright.workbench.audit.inputs import case_of, loaded
from tilewright.worker.execute import flatten, forward

Call = dict[str, Any]  # as in `audit.inputs`; of an op also with its direction


def prepared(call: Call, device: str) -> Callable[[], Any]:
    """What is to be measured: of a backward call all but the backward pass is done already."""
    fn, args = loaded(call, device)
    if call.get("direction", "forward") == "forward":
        return lambda: forward(fn, args, ())[1]
    constants = registry.load(call["op"]).constants
    needs = [n for n, a in enumerate(args) if _is_float(a) and n not in constants]
    leaves, outputs = forward(fn, args, needs)
    results = [o for o in flatten(outputs) if _is_float(o) and o.requires_grad]
    incoming = [torch.randn_like(o) for o in results]
    inputs = [leaves[n] for n in needs]
    return lambda: torch.autograd.grad(results, inputs, incoming, retain_graph=True, allow_unused=True)


def title(call: Call) -> str:
    if "op" not in call:
        return f"{Path(call['file']).name}, {call['function']}({', '.join(call['inputs'])})"
    turned = "" if call["direction"] == "forward" else f", {call['direction']}"
    return f"{call['op']}, {call['kernel']}, {case_of(call)} {call['dtype']}{turned}"


def cost(call: Call) -> Cost | None:
    """The least work of it, where that is known."""
    if "op" not in call:
        return None
    op = registry.load(call["op"])
    least = op.cost if call["direction"] == "forward" else op.backward_cost
    return least(*op.make(case_of(call), "meta")) if least else None


@contextmanager
def ranged(name: str) -> Iterator[None]:
    """A range of that name in traces, and for NVIDIA's tools by NVTX."""
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()

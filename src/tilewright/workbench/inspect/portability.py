"""Every Triton kernel for every architecture, as its launches on a GPU without tuned winners compile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tilewright.hardware import GPU, datasheet
from tilewright.spec import Op
from tilewright.workbench.inspect import Inspection, Refused, inspect_launch
from tilewright.workbench.inspect.code import TritonCode
from tilewright.workbench.inspect.launches import Launch, of_call, of_kernel
from tilewright.workbench.inspect.occupancy import MOST_REGISTERS

# One of each architecture; none has winners in ops/tuned.
TARGETS = ("a100-80gb", "rtx-4090", "h100-sxm", "b200", "rtx-5090", "mi300x", "mi355x")


def compiled_for(gpu: str, ops: Sequence[Op]) -> list[Inspection | Refused]:
    """Each kernel function once."""
    return [inspect_launch(launch, launch.name) for launch in hardest_launches(ops, datasheet(gpu))]


def figures(one: Inspection) -> dict[str, Any]:
    """What is recorded of a kernel for a GPU."""
    used, held = one.resources, one.occupancy
    return {
        "registers": used.registers,
        "shared": used.shared,
        "spills": used.spills,
        "blocks": held.blocks,
        "occupancy": round(held.share, 3),
        "limiter": held.limiter,
    }


def flaw(one: Inspection | Refused) -> str | None:
    """Why a GPU cannot have a kernel as it should be."""
    if isinstance(one, Refused):
        return str(one.error)
    return one.obstacle or (f"{one.resources.spills} B of registers spilled" if one.resources.spills else None)


def hardest_launches(ops: Sequence[Op], gpu: GPU) -> list[Launch]:
    """Of each kernel function the launch that wants the most registers, in both directions of the bench cases."""
    hardest: dict[tuple[str, str], tuple[tuple[float, int], Launch]] = {}
    for launch in (launch for op in ops for launch in _launches(op, gpu)):
        if isinstance(launch.code, TritonCode):
            wanted, function = _wanted(launch.code, gpu), (launch.code.file, launch.name)
            if function not in hardest or wanted > hardest[function][0]:
                hardest[function] = wanted, launch
    return [launch for _, launch in hardest.values()]


def _launches(op: Op, gpu: GPU) -> Iterator[Launch]:
    for kernel in op.kernels.values():
        for case in op.bench if kernel.language == "triton" else ():
            yield from of_kernel(op, kernel, case.with_dtype(op.bench_dtype), gpu, ("forward", "backward"), reads=0)
    for call in op.calls:
        yield from of_call(lambda call=call: (call, ("cuda",)), gpu)


def _wanted(code: TritonCode, gpu: GPU) -> tuple[float, int]:
    """The share of the registers that the elements of all tensors take; then, how much is done with them."""
    config = dict(code.config)
    threads = config.pop("num_warps") * gpu.warp
    sizes = [value for name, value in config.items() if type(value) is int and value > 1 and name != "num_stages"]
    tensors = sum(kind.startswith("*") for kind in code.signature.values())
    registers = min(threads * MOST_REGISTERS, gpu.registers_per_sm)
    return math.prod(sizes) * tensors / registers, sum(value is True for value in config.values())

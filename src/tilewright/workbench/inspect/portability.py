"""Compile every Triton kernel for every architecture, with the default configurations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tilewright.hardware import GPU, datasheet
from tilewright.spec import Op
from tilewright.workbench.inspect import CompileFailure, Inspection, inspect_launch
from tilewright.workbench.inspect.code import TritonCode
from tilewright.workbench.inspect.launches import Launch, call_launches, kernel_launches
from tilewright.workbench.inspect.occupancy import MAX_REGISTERS

# One GPU per architecture, none with tuned configurations.
TARGETS = ("a100-80gb", "rtx-4090", "h100-sxm", "b200", "rtx-5090", "mi300x", "mi355x")


def inspect_for(gpu: str, ops: Sequence[Op]) -> list[Inspection | CompileFailure]:
    """Compile each kernel function once."""
    return [inspect_launch(launch, launch.name) for launch in largest_launches(ops, datasheet(gpu))]


def figures(one: Inspection) -> dict[str, Any]:
    """Return the fields of a portability record."""
    used, held = one.resources, one.occupancy
    return {
        "registers": used.registers,
        "shared": used.shared,
        "spills": used.spills,
        "blocks": held.blocks,
        "occupancy": round(held.share, 3),
        "limiter": held.limiter,
    }


def problem(one: Inspection | CompileFailure) -> str | None:
    """Return why a kernel fails the portability check (not compiled, not launchable, spills), or None."""
    if isinstance(one, CompileFailure):
        return str(one.error)
    return one.launch_error or (f"{one.resources.spills} B of registers are spilled" if one.resources.spills else None)


def largest_launches(ops: Sequence[Op], gpu: GPU) -> list[Launch]:
    """Return the launch of each kernel function that needs the most registers, over bench cases and directions."""
    largest: dict[tuple[str, str], tuple[tuple[float, int], Launch]] = {}
    for launch in (launch for op in ops for launch in _launches(op, gpu)):
        if isinstance(launch.code, TritonCode):
            demand, function = _register_demand(launch.code, gpu), (launch.code.file, launch.name)
            if function not in largest or demand > largest[function][0]:
                largest[function] = demand, launch
    return [launch for _, launch in largest.values()]


def _launches(op: Op, gpu: GPU) -> Iterator[Launch]:
    for kernel in op.kernels.values():
        for case in op.bench if kernel.language == "triton" else ():
            yield from kernel_launches(
                op, kernel, case.with_dtype(op.bench_dtype), gpu, ("forward", "backward"), reads=0
            )
    for call in op.calls:
        yield from call_launches(lambda call=call: (call, ("cuda",)), gpu)


def _register_demand(code: TritonCode, gpu: GPU) -> tuple[float, int]:
    """Return the tile elements of all tensors per available register; then the number of enabled options."""
    config = dict(code.config)
    threads = config.pop("num_warps") * gpu.warp
    sizes = [value for name, value in config.items() if type(value) is int and value > 1 and name != "num_stages"]
    tensors = sum(kind.startswith("*") for kind in code.signature.values())
    registers = min(threads * MAX_REGISTERS, gpu.registers_per_sm)
    return math.prod(sizes) * tensors / registers, sum(value is True for value in config.values())

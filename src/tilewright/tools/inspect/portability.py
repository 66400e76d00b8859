"""Every Triton kernel for every architecture, as its launches on a GPU without tuned winners compile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from tilewright.hardware import GPU, datasheet
from tilewright.spec import Op
from tilewright.tools.inspect import Inspection, Refused, inspect_launch
from tilewright.tools.inspect.code import TritonCode
from tilewright.tools.inspect.launches import Launch, of_kernel

# One of each architecture; none has winners in ops/tuned.
TARGETS = ("a100-80gb", "rtx-4090", "h100-sxm", "b200", "rtx-5090", "mi300x", "mi355x")


def compiled_everywhere(ops: Sequence[Op], names: Iterable[str] = TARGETS) -> Iterator[Inspection | Refused]:
    """Each kernel function once for each GPU, though several Ops may share it; its title is the first of them."""
    for gpu in map(datasheet, names):
        seen: set[tuple[str, str]] = set()
        for op in ops:
            for launch in hardest_launches(op, gpu):
                function = launch.code.file, launch.name
                if function not in seen:
                    seen.add(function)
                    yield inspect_launch(launch, op.name)


def hardest_launches(op: Op, gpu: GPU) -> list[Launch]:
    """Of each kernel function the launch of the bench cases with the most elements a thread, where registers run out
    first."""
    hardest: dict[str, Launch] = {}
    for kernel in op.kernels.values():
        for case in op.bench if kernel.language == "triton" else ():
            for launch in of_kernel(op, kernel, case.with_dtype(op.bench_dtype), gpu, ("forward", "backward")):
                if isinstance(launch.code, TritonCode):
                    known = hardest.setdefault(launch.name, launch)
                    hardest[launch.name] = max(known, launch, key=_elements_each)
    return list(hardest.values())


def _elements_each(launch: Launch) -> float:
    config = dict(launch.code.config)
    warps = config.pop("num_warps")
    sizes = [value for name, value in config.items() if type(value) is int and value > 1 and name != "num_stages"]
    return math.prod(sizes) / warps

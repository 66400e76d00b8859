"""Compile the launches of a kernel for a GPU, without one, and report resources, occupancy and instruction mix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tilewright.errors import CompilationFailed, NoCudaKernel
from tilewright.hardware import GPU, MAX_GRID
from tilewright.spec import Case, Cost, Kernel, Op
from tilewright.workbench.inspect.bank_conflicts import SharedAccess, shared_memory_accesses
from tilewright.workbench.inspect.compiler import CompiledKernel, compile_cuda_file, compile_kernel, demangle
from tilewright.workbench.inspect.instructions import Mix, mix
from tilewright.workbench.inspect.launches import Launch, kernel_launches
from tilewright.workbench.inspect.occupancy import MAX_THREADS, Occupancy, occupancy
from tilewright.workbench.inspect.resources import Resources, resources

MAX_AMD_GRID_THREADS = 2**32 - 1  # HIP: per grid dimension


def unit_name(unit: str) -> str:
    """Return the display name of a compute unit of a Cost."""
    if unit.startswith("tensor."):
        return f"{unit.removeprefix('tensor.')} tensor cores"
    return {"fp32": "FP32", "fp64": "FP64", "special": "special functions"}.get(unit, unit)


@dataclass(frozen=True)
class Roofline:
    """The minimum work of a call, placed on the roofline of a GPU."""

    cost: Cost
    gpu: GPU
    programs: int | None  # None unless the call is a single launch, which does all of the work

    @property
    def flops(self) -> float:
        return sum(self.cost.flops.values())

    @property
    def bytes_per_program(self) -> float | None:
        return self.cost.bytes / self.programs if self.programs else None

    @property
    def flops_per_program(self) -> float | None:
        return self.flops / self.programs if self.programs else None

    @property
    def unit(self) -> str | None:
        """The compute unit that needs the most time."""
        rates = self.gpu.rates()
        seconds = {unit: flops / rates[unit] for unit, flops in self.cost.flops.items() if unit in rates}
        return max(seconds, key=seconds.__getitem__, default=None)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity on that unit, in FLOP/byte."""
        return self.cost.flops[self.unit] / self.cost.bytes if self.unit and self.cost.bytes else 0.0

    @property
    def ridge(self) -> float:
        """The intensity at which that unit and memory take the same time; below it, the call is memory-bound."""
        return self.gpu.rates()[self.unit] / self.gpu.bandwidth if self.unit else math.inf

    @property
    def intensity_summary(self) -> str:
        side = "below" if self.intensity < self.ridge else "above"
        unit = unit_name(self.unit) if self.unit else "no unit"
        return f"{self.intensity:.3g} FLOP/byte on {unit}, {side} the ridge point of {self.ridge:.3g}"

    def as_json(self) -> dict[str, Any]:
        names = ("flops", "bytes_per_program", "flops_per_program", "unit", "intensity", "ridge")
        return {"bytes": self.cost.bytes} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Inspection:
    """One kernel compiled for one GPU. A kernel of a `.cu` file has no launch, so its grid is unknown."""

    title: str
    name: str
    gpu: GPU
    compiled: CompiledKernel
    launch: Launch | None = None
    roofline: Roofline | None = None

    @cached_property
    def resources(self) -> Resources:
        return resources(self.compiled)

    @cached_property
    def occupancy(self) -> Occupancy:
        return occupancy(self.gpu, self.resources, self.compiled.threads)

    @cached_property
    def mix(self) -> Mix:
        return mix(self.compiled)

    @cached_property
    def shared_accesses(self) -> list[SharedAccess] | None:
        return shared_memory_accesses(self.compiled, self.launch.arguments if self.launch else ())

    @property
    def waves(self) -> float | None:
        """Blocks of the grid / blocks that the GPU holds at once."""
        if self.launch is None or not self.occupancy.blocks:
            return None
        return self.launch.blocks / (self.occupancy.blocks * self.gpu.sms)

    @property
    def idle(self) -> float | None:
        """The idle fraction of the last wave."""
        return math.ceil(self.waves) - self.waves if self.waves else None

    @property
    def launch_error(self) -> str | None:
        """Why the launch would fail on this GPU; None if it would not."""
        if self.occupancy.blocks:
            return self.launch and _grid_error(self.launch, self.compiled.threads)
        if self.compiled.threads > MAX_THREADS:
            return f"{self.compiled.threads} threads per block exceed the limit of {MAX_THREADS}"
        if self.resources.shared > self.gpu.shared_per_block:
            limit = f"the {self.gpu.shared_per_block} B of {self.gpu.name}"
            return f"{self.resources.shared} B of shared memory per block exceed {limit}"
        return f"{self.compiled.threads} threads x {self.resources.registers} registers exceed the register file"

    def as_json(self) -> dict[str, Any]:
        launch = self.launch
        return {
            "title": self.title,
            "kernel": self.name,
            "gpu": self.gpu.name,
            "arch": self.gpu.arch,
            **({"direction": launch.direction, "grid": list(launch.grid), "times": launch.times} if launch else {}),
            **({"config": {k: _plain(v) for k, v in launch.code.config.items()}} if launch else {}),
            "threads": self.compiled.threads,
            "cluster": self.compiled.cluster,
            **asdict(self.resources),
            "occupancy": {**asdict(self.occupancy), "limiter": self.occupancy.limiter},
            "waves": self.waves,
            "idle": self.idle,
            "launch_error": self.launch_error,
            "instructions": self.mix.as_json(),
            "bytes_per_load": self.mix.mean_width("global load", "async copy"),
            "bytes_per_store": self.mix.mean_width("global store"),
            "shared_accesses": self.shared_accesses and [asdict(one) for one in self.shared_accesses],
            "roofline": self.roofline.as_json() if self.roofline else None,
            "note": launch.note if launch else "",
        }


def _grid_error(launch: Launch, threads: int) -> str | None:
    """Return which grid dimension is over the limit of the GPU, or None."""
    x, y, z = launch.grid
    if launch.gpu.is_amd:
        if x * threads > MAX_AMD_GRID_THREADS:
            limit = f"the limit of {MAX_AMD_GRID_THREADS} threads"
            return f"{x} blocks of {threads} threads in grid dimension x exceed {limit}"
        return None
    sizes = {"x": x * launch.code.cluster, "y": y, "z": z}
    for dimension, blocks in sizes.items():
        if blocks > MAX_GRID[dimension]:
            return f"{blocks} blocks in grid dimension {dimension} exceed the limit of {MAX_GRID[dimension]}"
    return None


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else str(value)


@dataclass(frozen=True)
class CompileFailure:
    """A launch that does not compile for a GPU."""

    title: str
    name: str
    gpu: GPU
    error: CompilationFailed

    def as_json(self) -> dict[str, Any]:
        error = {"refused": str(self.error), "line": self.error.line}
        return {"title": self.title, "kernel": self.name, "gpu": self.gpu.name, **error}


def inspect_kernel(
    op: Op, kernel: Kernel, case: Case, gpu: GPU, directions: Sequence[str] = ("forward",)
) -> Iterator[Inspection | CompileFailure]:
    """Yield every launch of one call of a kernel on a case, compiled."""
    title = f"{op.name}, {kernel.name}, {case} {case.dtype}"
    launches = kernel_launches(op, kernel, case, gpu, directions)
    args = op.make(case, device="meta")
    for launch in launches:
        same = [one for one in launches if one.direction == launch.direction]
        alone = same == [launch] and launch.times == 1 and launch.is_complete
        cost = op.cost if launch.direction == "forward" else op.backward_cost
        least = cost(*args) if cost else None
        roofline = Roofline(least, gpu, launch.programs if alone else None) if least else None
        yield inspect_launch(launch, title, roofline)


def inspect_cases(
    op: Op, kernel: Kernel, cases: Sequence[Case], gpu: GPU, directions: Sequence[str], *, only_first: bool
) -> list[Inspection | CompileFailure]:
    """Return the compiled launches on every case, or on the first that the kernel supports."""
    found: list[Inspection | CompileFailure] = []
    for case in cases:
        found += inspect_kernel(op, kernel, case, gpu, directions)
        if found and only_first:
            break
    return found


def inspect_launch(launch: Launch, title: str, roofline: Roofline | None = None) -> Inspection | CompileFailure:
    try:
        return Inspection(title, launch.name, launch.gpu, compile_kernel(launch.code), launch, roofline)
    except CompilationFailed as error:
        return CompileFailure(title, launch.name, launch.gpu, error)


def inspect_cuda_file(path: Path, gpu: GPU, threads: int, shared: int) -> Iterator[Inspection | CompileFailure]:
    """Yield every kernel of a `.cu` file, compiled for blocks of `threads` with `shared` bytes of shared memory."""
    title = f"{path.name}, {threads} thread{'' if threads == 1 else 's'} per block"
    try:
        kernels = compile_cuda_file(path, gpu.arch, threads, shared)
        if not kernels:
            raise NoCudaKernel(path)
        for kernel in kernels:
            yield Inspection(title, demangle(kernel.symbol), gpu, kernel)
    except CompilationFailed as error:
        yield CompileFailure(title, path.name, gpu, error)

"""Kernels read without being run: what a launch compiles to for a GPU, and what it takes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tilewright.errors import CompilerRefused, NoCudaKernel
from tilewright.hardware import GPU, MOST_BLOCKS
from tilewright.spec import Case, Cost, Kernel, Op
from tilewright.workbench.inspect.banks import SharedAccess, shared_memory
from tilewright.workbench.inspect.compiling import NVIDIAS, Compiled, compiled, cuda_file, readable
from tilewright.workbench.inspect.instructions import Mix, mix
from tilewright.workbench.inspect.launches import Launch, of_kernel
from tilewright.workbench.inspect.occupancy import MOST_THREADS, Occupancy, occupancy
from tilewright.workbench.inspect.resources import Resources, resources

MOST_THREADS_OF_AMD_GRID = 2**32 - 1  # HIP: in each direction


@dataclass(frozen=True)
class Work:
    """The least work of a call, and what of a GPU it asks for."""

    cost: Cost
    gpu: GPU
    programs: int | None  # among which it is shared out, where the call is one launch and no more

    @property
    def flops(self) -> float:
        return sum(self.cost.flops.values())

    @property
    def bytes_each(self) -> float | None:
        return self.cost.bytes / self.programs if self.programs else None

    @property
    def flops_each(self) -> float | None:
        return self.flops / self.programs if self.programs else None

    @property
    def unit(self) -> str | None:
        """The unit that takes longest to compute it."""
        rates = self.gpu.rates()
        seconds = {unit: flops / rates[unit] for unit, flops in self.cost.flops.items() if unit in rates}
        return max(seconds, key=seconds.__getitem__, default=None)

    @property
    def intensity(self) -> float:
        """Operations of that unit for each byte."""
        return self.cost.flops[self.unit] / self.cost.bytes if self.unit and self.cost.bytes else 0.0

    @property
    def ridge(self) -> float:
        """The intensity at which that unit and memory take the same time: below it, memory binds."""
        return self.gpu.rates()[self.unit] / self.gpu.bandwidth if self.unit else math.inf

    @property
    def beside_the_ridge(self) -> str:
        """Its intensity, in words; of what has a unit."""
        side = "below" if self.intensity < self.ridge else "above"
        return f"{self.intensity:.3g} operations a byte on {self.unit}, {side} the ridge of {self.ridge:.3g}"

    def as_json(self) -> dict[str, Any]:
        names = ("flops", "bytes_each", "flops_each", "unit", "intensity", "ridge")
        return {"bytes": self.cost.bytes} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Inspection:
    """One kernel compiled for one GPU. Without a launch (a `.cu` file) nothing is known of a grid."""

    title: str
    name: str
    gpu: GPU
    made: Compiled
    launch: Launch | None = None
    work: Work | None = None

    @cached_property
    def resources(self) -> Resources:
        return resources(self.made)

    @cached_property
    def occupancy(self) -> Occupancy:
        return occupancy(self.gpu, self.resources, self.made.threads)

    @cached_property
    def mix(self) -> Mix:
        return mix(self.made)

    @cached_property
    def shared_accesses(self) -> list[SharedAccess] | None:
        return shared_memory(self.made, self.launch.arguments if self.launch else ())

    @property
    def waves(self) -> float | None:
        """How often the GPU is filled, if all blocks take equally long."""
        if self.launch is None or not self.occupancy.blocks:
            return None
        return self.launch.blocks / (self.occupancy.blocks * self.gpu.sms)

    @property
    def idle(self) -> float | None:
        """The share of the last wave's places that stay empty."""
        return math.ceil(self.waves) - self.waves if self.waves else None

    @property
    def obstacle(self) -> str | None:
        """Why the GPU would refuse the launch."""
        if self.occupancy.blocks:
            return self.launch and _too_large(self.launch, self.made.threads)
        if self.made.threads > MOST_THREADS:
            return f"{self.made.threads} threads a block, the most are {MOST_THREADS}"
        if self.resources.shared > self.gpu.shared_per_block:
            return (
                f"{self.resources.shared} B of shared memory a block, {self.gpu.name} has {self.gpu.shared_per_block}"
            )
        return f"{self.resources.registers} registers for each of {self.made.threads} threads, more than there are"

    def as_json(self) -> dict[str, Any]:
        launch = self.launch
        return {
            "title": self.title,
            "kernel": self.name,
            "gpu": self.gpu.name,
            "arch": self.gpu.arch,
            **({"direction": launch.direction, "grid": list(launch.grid), "times": launch.times} if launch else {}),
            **({"config": {k: _plain(v) for k, v in launch.code.config.items()}} if launch else {}),
            "threads": self.made.threads,
            "cluster": self.made.cluster,
            **asdict(self.resources),
            "occupancy": {**asdict(self.occupancy), "limiter": self.occupancy.limiter},
            "waves": self.waves,
            "idle": self.idle,
            "obstacle": self.obstacle,
            "instructions": self.mix.as_json(),
            "bytes_per_load": self.mix.bytes_each("global load", "async copy"),
            "bytes_per_store": self.mix.bytes_each("global store"),
            "shared_accesses": self.shared_accesses and [asdict(one) for one in self.shared_accesses],
            "work": self.work.as_json() if self.work else None,
            "note": launch.note if launch else "",
        }


def _too_large(launch: Launch, threads: int) -> str | None:
    """How a grid goes beyond what a GPU counts in one direction."""
    x, y, z = launch.grid
    if launch.gpu.is_amd:
        if x * threads > MOST_THREADS_OF_AMD_GRID:
            return f"a grid with {x} blocks of {threads} threads in x, the most threads are {MOST_THREADS_OF_AMD_GRID}"
        return None
    sizes = {"x": x * launch.code.cluster, "y": y, "z": z}
    for direction, blocks in sizes.items():
        most = MOST_BLOCKS[direction]
        if blocks > most:
            return f"a grid with {blocks} blocks in {direction}, the most are {most}"
    return None


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else str(value)


@dataclass(frozen=True)
class Refused:
    """A launch that has no machine code for a GPU."""

    title: str
    name: str
    gpu: GPU
    error: CompilerRefused

    def as_json(self) -> dict[str, Any]:
        said = {"refused": str(self.error), "line": self.error.line}
        return {"title": self.title, "kernel": self.name, "gpu": self.gpu.name, **said}


def inspect_kernel(
    op: Op, kernel: Kernel, case: Case, gpu: GPU, directions: Sequence[str] = ("forward",)
) -> Iterator[Inspection | Refused]:
    """Every launch of one call of a kernel on a case."""
    title = f"{op.name}, {kernel.name}, {case} {case.dtype}"
    launches = of_kernel(op, kernel, case, gpu, directions)
    args = op.make(case, device="meta")
    for launch in launches:
        same = [one for one in launches if one.direction == launch.direction]
        alone = same == [launch] and launch.times == 1 and launch.is_all
        cost = op.cost if launch.direction == "forward" else op.backward_cost
        work = Work(cost(*args), gpu, launch.programs if alone else None) if cost else None
        yield inspect_launch(launch, title, work)


def inspect_launch(launch: Launch, title: str, work: Work | None = None) -> Inspection | Refused:
    try:
        return Inspection(title, launch.name, launch.gpu, compiled(launch.code), launch, work)
    except CompilerRefused as error:
        return Refused(title, launch.name, launch.gpu, error)


def inspect_cuda_file(path: Path, gpu: GPU, threads: int, shared: int) -> Iterator[Inspection | Refused]:
    """Every kernel of a `.cu` file, as if launched with so many threads and bytes of shared memory."""
    title = f"{path.name}, {threads} thread{'' if threads == 1 else 's'} a block"
    try:
        if gpu.is_amd:
            raise CompilerRefused(path, None, NVIDIAS, gpu.arch)
        made = cuda_file(path, gpu.arch, threads, shared)
        if not made:
            raise NoCudaKernel(path)
        for one in made:
            yield Inspection(title, readable(one.symbol), gpu, one)
    except CompilerRefused as error:
        yield Refused(title, path.name, gpu, error)

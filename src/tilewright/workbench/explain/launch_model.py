"""A model of one launch: how often each instruction of its code runs, and how long each unit of the GPU needs.

The trip count of loops follows from the bytes, or the MMAs, that the launch must do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tilewright.workbench.explain.divergence import DivergentBranch, divergent_branches
from tilewright.workbench.explain.loops import instructions_with_loops
from tilewright.workbench.explain.traffic import BytesMoved
from tilewright.workbench.inspect import Inspection
from tilewright.workbench.inspect.instructions import Instruction

ISSUE_RATE = 4  # instructions per clock and SM: one per partition
MEMORY = ("global load", "global store", "async copy", "atomic")
LOADS = ("global load", "async copy")
_MMA = re.compile(r"[A-Z]GMMA\.(\d+)x(\d+)x(\d+)|[A-Z]MMA\.(\d\d)(\d)(\d+)")
MMA_UNITS = {"BF16": "bfloat16", "TF32": "tf32", "E4M3": "float8_e4m3fn", "E5M2": "float8_e4m3fn"}
REGISTER = 4  # bytes
_LANES = 32
_WARPGROUP = 4  # warps that share one *GMMA instruction


@dataclass(frozen=True)
class LaunchModel:
    """One launch with its traffic. `mma_flops` are the FLOPs of its matrix multiplications by unit, where known."""

    kernel: Inspection
    moved: BytesMoved | None
    mma_flops: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def instructions(self) -> list[Instruction]:
        return instructions_with_loops(self.kernel.compiled)

    @cached_property
    def divergent_branches(self) -> list[DivergentBranch] | None:
        return divergent_branches(self.kernel.compiled, self.kernel.launch.arguments if self.kernel.launch else ())

    @property
    def programs(self) -> int:
        return self.kernel.launch.programs * self.kernel.launch.times if self.kernel.launch else 1

    @property
    def warps(self) -> float:
        """Warps per program."""
        return self.kernel.compiled.threads * self.kernel.compiled.cluster / self.kernel.gpu.warp

    @property
    def bytes_per_thread(self) -> float | None:
        """Bytes that a thread requests in total; None if the traffic of the launch is unknown."""
        return self.moved.requested / (self.programs * self.warps * self.kernel.gpu.warp) if self.moved else None

    @cached_property
    def trips(self) -> tuple[float, float]:
        """How often code outside and inside of loops runs per program, to move the bytes or do the MMAs of the launch.

        At least 0.5: the code may have a second path for boundary tiles, but masked lanes cost as much as others.
        """
        outside, inside = self._amounts(False), self._amounts(True)
        for amount, total in (("flops", sum(self.mma_flops.values())), ("bytes", self.moved and self.moved.requested)):
            if total and (outside[amount] or inside[amount]):
                each = total / self.programs
                if inside[amount]:
                    return 1.0, max(0.5, (each - outside[amount]) / inside[amount])
                return min(1.0, max(0.5, each / outside[amount])), 1.0
        return 1.0, 1.0

    def _trips(self, instruction: Instruction) -> float:
        return self.trips[instruction.in_loop]

    def _amounts(self, in_loop: bool) -> dict[str, float]:
        """Return the bytes and MMA FLOPs of the code inside or outside of loops, per trip and program."""
        chosen = [i for i in self.instructions if i.in_loop == in_loop]
        lanes = self.warps * self.kernel.gpu.warp
        moved = sum(lanes * i.width for i in chosen if i.kind in MEMORY)
        count = _mma_flops if self.uses_tensor_cores else _fma_flops
        return {"bytes": moved, "flops": sum(self.warps * count(i) for i in chosen)}

    @property
    def uses_tensor_cores(self) -> bool:
        return "tensor core" in self.kernel.mix.kinds

    def executed_instructions(self) -> Iterator[tuple[Instruction, float]]:
        """Yield each instruction, and how many warps of the whole launch execute it."""
        for i in self.instructions:
            yield i, self._trips(i) * self.warps * self.programs

    @cached_property
    def executed(self) -> Mapping[str, float]:
        """Warp instructions executed by the whole launch, by kind."""
        counts: Counter[str] = Counter()
        for i, count in self.executed_instructions():
            counts[i.kind] += count  # type: ignore[assignment]
        return counts

    def seconds(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return the time that each unit needs on its own."""
        gpu = self.kernel.gpu
        lanes = {kind: count * gpu.warp for kind, count in self.executed.items()}
        found = {}
        if self.uses_tensor_cores:
            found = {unit: amount / rates[unit] for unit, amount in self.mma_flops.items()}
        for unit, kind, each in (("fp32", "fp32", 2), ("special", "special function", 1), ("fp64", "fp64", 2)):
            if rates.get(unit):
                found[unit] = each * lanes.get(kind, 0) / rates[unit]
        found["issue"] = sum(self.executed.values()) / (ISSUE_RATE * gpu.sms * gpu.clock_mhz * 1e6)
        return {unit: seconds for unit, seconds in found.items() if seconds}

    @property
    def resident_blocks(self) -> float:
        """Resident blocks per SM: the occupancy, or fewer if the grid is small."""
        blocks = self.kernel.occupancy.blocks
        return min(blocks, self.kernel.launch.blocks / self.kernel.gpu.sms) if self.kernel.launch else blocks

    @property
    def in_flight(self) -> float:
        """Upper bound of the bytes in flight per SM: every load of the code for all threads, limited by registers."""
        widths = [
            sum(i.width for i in self.instructions if i.in_loop == inside and i.kind in LOADS)
            for inside in (False, True)
        ]
        in_code = self.resident_blocks * self.kernel.compiled.threads * max(widths)
        return min(in_code, self.kernel.gpu.registers_per_sm * REGISTER)

    @property
    def spilled(self) -> float:
        """Bytes of local memory that miss the L1; none if the stacks of all resident threads fit into it."""
        resident = self.resident_blocks * self.kernel.compiled.threads * self.kernel.resources.stack
        if resident <= self.kernel.gpu.shared_per_sm:
            return 0.0
        local = [i for i in self.instructions if i.kind in ("local load", "local store")]
        return sum(i.width * self._trips(i) for i in local) * self.warps * self.kernel.gpu.warp * self.programs

    @property
    def has_known_flops(self) -> bool:
        """Return whether the trip count of every loop with MMAs, and the shape of every MMA, is known."""
        mmas = [i for i in self.instructions if i.kind == "tensor core"]
        in_loop = any(i.in_loop for i in mmas)
        return all(map(_mma_flops, mmas)) and (not in_loop or bool(self._amounts(True)["bytes"]))

    def with_mma_flops(self, rates: Mapping[str, float]) -> LaunchModel:
        """Return the model with `mma_flops` counted from the code."""
        kinds = {_mma_unit(i.opcode) for i in self.instructions if i.kind == "tensor core"}
        units = [unit for unit in sorted(kinds) if rates.get(unit)]
        if not units:
            return self
        flops = sum(_mma_flops(i) * self._trips(i) for i in self.instructions) * self.warps * self.programs
        return replace(self, mma_flops={units[0]: flops})

    @property
    def load_waits(self) -> float:
        """Dependent waits for loads per program: one outside of loops and one per loop trip, unless loads are async."""
        kinds = [{i.kind for i in self.instructions if i.in_loop == inside} for inside in (False, True)]
        return float("global load" in kinds[0]) + self.trips[1] * ("global load" in kinds[1])

    @property
    def instructions_per_warp(self) -> float:
        return sum(self.executed.values()) / (self.warps * self.programs)


def _fma_flops(instruction: Instruction) -> float:
    return 2.0 * _LANES if instruction.opcode.startswith("FFMA") else 0.0


def _mma_unit(opcode: str) -> str:
    """Return the rate that applies, by operand type."""
    for mark, unit in MMA_UNITS.items():
        if mark in opcode:
            return f"tensor.{unit}"
    return "tensor.int8" if opcode.startswith("I") else "tensor.float16"


def _mma_flops(instruction: Instruction) -> float:
    """Return the FLOPs per warp of an MMA."""
    found = _MMA.match(instruction.opcode)
    if not found or instruction.kind != "tensor core":
        return 0.0
    m, n, k = (int(size) for size in found.groups() if size)
    return 2 * m * n * k / (_WARPGROUP if "GMMA" in instruction.opcode else 1)

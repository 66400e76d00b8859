"""What a launch makes the units of an SM do: the instructions of its code, each as often as the bytes, or the products,
of the launch say that it runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tilewright.workbench.explain.divergence import Parting, partings
from tilewright.workbench.explain.evidence import Moved
from tilewright.workbench.explain.loops import Step, steps
from tilewright.workbench.inspect import Inspection

ISSUED = 4  # instructions that an SM starts in a clock: one in each of its parts
MEMORY = ("global load", "global store", "async copy", "atomic")
LOADS = ("global load", "async copy")
_PRODUCT = re.compile(r"[A-Z]GMMA\.(\d+)x(\d+)x(\d+)|[A-Z]MMA\.(\d\d)(\d)(\d+)")
MULTIPLIED = {"BF16": "bfloat16", "TF32": "tf32", "E4M3": "float8_e4m3fn", "E5M2": "float8_e4m3fn"}
REGISTER = 4  # bytes
_LANES = 32
_GROUP = 4  # warps that share a product of the *GMMA kind


@dataclass(frozen=True)
class Work:
    """Of one launch. `products` are the operations on matrices that it must do, by unit, where that is known."""

    one: Inspection
    moved: Moved | None
    products: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def steps(self) -> list[Step]:
        return steps(self.one.made)

    @cached_property
    def partings(self) -> list[Parting] | None:
        return partings(self.one.made, self.one.launch.arguments if self.one.launch else ())

    @property
    def programs(self) -> int:
        return self.one.launch.programs * self.one.launch.times if self.one.launch else 1

    @property
    def warps(self) -> float:
        """Of a program."""
        return self.one.made.threads * self.one.made.cluster / self.one.gpu.warp

    @property
    def thread_bytes(self) -> float | None:
        """That a thread asks memory for, in all; None where that of the launch is not known."""
        return self.moved.asked / (self.programs * self.warps * self.one.gpu.warp) if self.moved else None

    @cached_property
    def trips(self) -> tuple[float, float]:
        """How often code outside of loops, and inside, runs in a program: so often that it moves the bytes, or does
        the products, of the launch. No less than half: the code may have a second way for edges, but lanes that are
        masked off cost as much as others."""
        outside, inside = self._amounts(False), self._amounts(True)
        for amount, total in (("products", sum(self.products.values())), ("bytes", self.moved and self.moved.asked)):
            if total and (outside[amount] or inside[amount]):
                each = total / self.programs
                if inside[amount]:
                    return 1.0, max(0.5, (each - outside[amount]) / inside[amount])
                return min(1.0, max(0.5, each / outside[amount])), 1.0
        return 1.0, 1.0

    def _amounts(self, in_loop: bool) -> dict[str, float]:
        steps = [step for step in self.steps if step.in_loop == in_loop]
        lanes = self.warps * self.one.gpu.warp
        moved = sum(lanes * step.instruction.width for step in steps if step.instruction.kind in MEMORY)
        count = _product if self.has_matrix_unit else _multiply_adds
        return {"bytes": moved, "products": sum(self.warps * count(step) for step in steps)}

    @property
    def has_matrix_unit(self) -> bool:
        return "tensor core" in self.one.mix.kinds

    @cached_property
    def executed(self) -> Mapping[str, float]:
        """Instructions that warps run, by kind, over the whole launch."""
        outside, inside = self.trips
        counts: Counter[str] = Counter()
        for step in self.steps:
            counts[step.instruction.kind] += inside if step.in_loop else outside  # type: ignore[assignment]
        return {kind: count * self.warps * self.programs for kind, count in counts.items()}

    def seconds(self, rates: Mapping[str, float]) -> dict[str, float]:
        """By unit, if nothing else held it up."""
        gpu = self.one.gpu
        lanes = {kind: count * gpu.warp for kind, count in self.executed.items()}
        found = {}
        if self.has_matrix_unit:
            found = {unit: amount / rates[unit] for unit, amount in self.products.items()}
        for unit, kind, each in (("fp32", "fp32", 2), ("special", "special function", 1), ("fp64", "fp64", 2)):
            if rates.get(unit):
                found[unit] = each * lanes.get(kind, 0) / rates[unit]
        found["issue"] = sum(self.executed.values()) / (ISSUED * gpu.sms * gpu.clock_mhz * 1e6)
        return {unit: seconds for unit, seconds in found.items() if seconds}

    @property
    def resident(self) -> float:
        """Blocks that an SM has at a time, if the grid has so many."""
        blocks = self.one.occupancy.blocks
        return min(blocks, self.one.launch.blocks / self.one.gpu.sms) if self.one.launch else blocks

    @property
    def in_flight(self) -> float:
        """Bytes that an SM may have asked memory for at once, at most: every load of the code, of all its threads, as
        far as its registers hold them."""
        widths = [
            sum(s.instruction.width for s in self.steps if s.in_loop == inside and s.instruction.kind in LOADS)
            for inside in (False, True)
        ]
        return min(self.resident * self.one.made.threads * max(widths), self.one.gpu.registers_per_sm * REGISTER)

    @property
    def spilled(self) -> float:
        """Bytes of local memory that threads move, where the L1 cannot hold what all threads of an SM have there."""
        held = self.resident * self.one.made.threads * self.one.resources.stack
        if held <= self.one.gpu.shared_per_sm:
            return 0.0
        outside, inside = self.trips
        local = [s for s in self.steps if s.instruction.kind in ("local load", "local store")]
        each = sum(s.instruction.width * (inside if s.in_loop else outside) for s in local)
        return each * self.warps * self.one.gpu.warp * self.programs

    @property
    def matrix_operations(self) -> float:
        """That the matrix unit does in the whole launch."""
        outside, inside = self.trips
        each = sum(_product(step) * (inside if step.in_loop else outside) for step in self.steps)
        return each * self.warps * self.programs

    @property
    def is_told(self) -> bool:
        """Whether its bytes say how often a loop that multiplies runs, and its instructions what they multiply."""
        products = [step for step in self.steps if step.instruction.kind == "tensor core"]
        in_loop = any(step.in_loop for step in products)
        return all(map(_product, products)) and (not in_loop or bool(self._amounts(True)["bytes"]))

    def with_products(self, rates: Mapping[str, float]) -> Work:
        """The same, with the products that the code makes for the matrix unit."""
        kinds = {_unit(step.instruction.opcode) for step in self.steps if step.instruction.kind == "tensor core"}
        units = [unit for unit in sorted(kinds) if rates.get(unit)]
        return replace(self, products={units[0]: self.matrix_operations}) if units else self

    @property
    def waits(self) -> float:
        """How often a program waits for loads, one after the other: once for all outside of loops, and in them once a
        round, unless what it waits for was asked for rounds before."""
        kinds = [{s.instruction.kind for s in self.steps if s.in_loop == inside} for inside in (False, True)]
        return float("global load" in kinds[0]) + self.trips[1] * ("global load" in kinds[1])

    @property
    def steps_each(self) -> float:
        """Instructions of one warp."""
        return sum(self.executed.values()) / (self.warps * self.programs)


def _multiply_adds(step: Step) -> float:
    return 2.0 * _LANES if step.instruction.opcode.startswith("FFMA") else 0.0


def _unit(opcode: str) -> str:
    """Of the matrix unit, by what it multiplies."""
    for mark, unit in MULTIPLIED.items():
        if mark in opcode:
            return f"tensor.{unit}"
    return "tensor.int8" if opcode.startswith("I") else "tensor.float16"


def _product(step: Step) -> float:
    """Operations of a warp on matrices."""
    found = _PRODUCT.match(step.instruction.opcode)
    if not found or step.instruction.kind != "tensor core":
        return 0.0
    m, n, k = (int(size) for size in found.groups() if size)
    return 2 * m * n * k / (_GROUP if "GMMA" in step.instruction.opcode else 1)

"""Which instructions of machine code stand in a loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.workbench.inspect.compiling import Compiled
from tilewright.workbench.inspect.instructions import Instruction, read_instructions
from tilewright.workbench.inspect.listing import Line, listing

_LABEL = re.compile(r"\s*(\.L\w+):")
_JUMP = re.compile(r"\b(?:BRA|s_c?branch\w*)\b.*?(\.L\w+)")


@dataclass(frozen=True)
class Step:
    """An instruction, and where it stands."""

    instruction: Instruction
    in_loop: bool


def steps(made: Compiled) -> list[Step]:
    lines, is_amd = listing(made, "sass"), made.arch.startswith("gfx")
    loops = _loops(lines)
    return [
        Step(instruction, any(first <= number <= last for first, last in loops))
        for number, line in enumerate(lines)
        for instruction in read_instructions([line], is_amd)
    ]


def _loops(lines: Sequence[Line]) -> list[tuple[int, int]]:
    """From a label to a jump back to it. The last jump of a kernel, to itself, catches what runs over its end."""
    labels = {found[1]: n for n, line in enumerate(lines) if (found := _LABEL.match(line.code))}
    jumps = [(n, found[1]) for n, line in enumerate(lines) if (found := _JUMP.search(line.code))]
    return [(labels[to], at) for at, to in jumps if labels.get(to, at) < at - 1]

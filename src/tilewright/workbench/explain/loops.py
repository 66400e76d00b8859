"""Find which machine instructions are inside a loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tilewright.workbench.inspect.compiler import CompiledKernel
from tilewright.workbench.inspect.instructions import Instruction, read_instructions
from tilewright.workbench.inspect.line_info import CodeLine, code_lines

_LABEL = re.compile(r"\s*(\.L\w+):")
_JUMP = re.compile(r"\b(?:BRA|s_c?branch\w*)\b.*?(\.L\w+)")


def instructions_with_loops(compiled: CompiledKernel) -> list[Instruction]:
    """Return the instructions of a kernel, with `in_loop` set."""
    lines, is_amd = code_lines(compiled, "sass"), compiled.arch.startswith("gfx")
    loops = _loops(lines)
    return [
        replace(instruction, in_loop=any(first <= number <= last for first, last in loops))
        for number, line in enumerate(lines)
        for instruction in read_instructions([line], is_amd)
    ]


def _loops(lines: Sequence[CodeLine]) -> list[tuple[int, int]]:
    """Return the line ranges from a label to a jump back to it, without the self-jump that ends each kernel."""
    labels = {found[1]: n for n, line in enumerate(lines) if (found := _LABEL.match(line.code))}
    jumps = [(n, found[1]) for n, line in enumerate(lines) if (found := _JUMP.search(line.code))]
    return [(labels[to], at) for at, to in jumps if labels.get(to, at) < at - 1]

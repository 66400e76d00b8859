"""Find divergent branches, by simulating the PTX for all lanes of a block.

A branch whose condition depends on data counts as divergent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.workbench.inspect.bank_conflicts import kernel_lines
from tilewright.workbench.inspect.compiler import CompiledKernel
from tilewright.workbench.inspect.line_info import CodeLine, SourceLine, code_lines
from tilewright.workbench.inspect.ptx_sim import branches

PLACEHOLDER = 2**20  # for unknown sizes
FEW = 8  # instructions; shorter branches, as around a masked access, cost next to nothing
_LABEL = re.compile(r"\s*(\$\w+):")
_BRANCH = re.compile(r"\s*@!?%\w+\s+bra(?:\.\w+)*\s+(\$\w+)")
_JUMP = re.compile(r"\s*bra(?:\.\w+)*\s+(\$\w+)")


@dataclass(frozen=True)
class DivergentBranch:
    """A branch that may split a warp."""

    share: float  # instructions that only some lanes run / all
    source_line: SourceLine


def divergent_branches(compiled: CompiledKernel, arguments: Sequence[int | None] = ()) -> list[DivergentBranch] | None:
    """Return the divergent branches, largest first, or None without PTX.

    `arguments` are the integer launch arguments by position.
    """
    if "ptx" not in compiled.texts:
        return None
    lines = kernel_lines(code_lines(compiled, "ptx"), compiled.symbol)
    positions = [n for n, line in enumerate(lines) if _BRANCH.match(line.code)]
    total = _instructions(lines)
    found = []
    for position, branch in zip(positions, branches(lines, compiled.threads, arguments, PLACEHOLDER), strict=True):
        size = _instructions(lines[slice(*_region(lines, position))]) if branch.diverges is not False else 0
        if size > FEW:
            found.append(DivergentBranch(size / total, branch.source_line))
    return sorted(found, key=lambda branch: -branch.share)


def _region(lines: Sequence[CodeLine], branch: int) -> tuple[int, int]:
    """Return the lines that only some lanes run: the if and else parts of a branch, or the body of a loop."""
    labels = {found[1]: n for n, line in enumerate(lines) if (found := _LABEL.match(line.code))}
    target = labels[_BRANCH.match(lines[branch].code)[1]]  # type: ignore[index]
    if target < branch:
        return target, branch
    over = _JUMP.match(lines[target - 1].code)
    return branch + 1, max(target, labels[over[1]] if over else 0)


def _instructions(lines: Sequence[CodeLine]) -> int:
    return sum(line.code.rstrip().endswith(";") and not line.code.lstrip().startswith(".") for line in lines)

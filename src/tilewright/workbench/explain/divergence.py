"""Where lanes of a warp go different ways: branches of the PTX, followed for all lanes of a block.

A branch that depends on data counts as one at which they part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.workbench.inspect.banks import kernel_lines
from tilewright.workbench.inspect.compiling import Compiled
from tilewright.workbench.inspect.listing import Line, Place, listing
from tilewright.workbench.inspect.ptx_sim import branches

STAND_IN = 2**20  # for sizes that are not known
FEW = 8  # instructions that may be jumped over at no cost to speak of: a masked access
_LABEL = re.compile(r"\s*(\$\w+):")
_BRANCH = re.compile(r"\s*@!?%\w+\s+bra(?:\.\w+)*\s+(\$\w+)")
_JUMP = re.compile(r"\s*bra(?:\.\w+)*\s+(\$\w+)")


@dataclass(frozen=True)
class Parting:
    """Instructions that lanes of one warp run in turns."""

    share: float  # of all
    place: Place  # of the branch


def partings(made: Compiled, arguments: Sequence[int | None] = ()) -> list[Parting] | None:
    """The largest first; None where there is no PTX. `arguments` are the whole numbers that the kernel is launched
    with, by place."""
    if "ptx" not in made.texts:
        return None
    lines = kernel_lines(listing(made, "ptx"), made.symbol)
    at = [n for n, line in enumerate(lines) if _BRANCH.match(line.code)]
    ways = zip(at, branches(lines, made.threads, arguments, STAND_IN), strict=True)
    total = _instructions(lines)
    found = []
    for number, branch in ways:
        size = _instructions(lines[slice(*_region(lines, number))]) if branch.parts is not False else 0
        if size > FEW:
            found.append(Parting(size / total, branch.place))
    return sorted(found, key=lambda parting: -parting.share)


def _region(lines: Sequence[Line], branch: int) -> tuple[int, int]:
    """What only some lanes run: up to the branch's target, and what they jump over there; or a loop, back to it."""
    labels = {found[1]: n for n, line in enumerate(lines) if (found := _LABEL.match(line.code))}
    target = labels[_BRANCH.match(lines[branch].code)[1]]  # type: ignore[index]
    if target < branch:
        return target, branch
    over = _JUMP.match(lines[target - 1].code)
    return branch + 1, max(target, labels[over[1]] if over else 0)


def _instructions(lines: Sequence[Line]) -> int:
    return sum(line.code.rstrip().endswith(";") and not line.code.lstrip().startswith(".") for line in lines)

"""The source lines on which a call spends its instructions."""

from __future__ import annotations

import inspect
import linecache
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

from tilewright.workbench.explain.launch_model import LaunchModel
from tilewright.workbench.inspect.line_info import SourceLine, call_sites

SHOWN = 3  # lines
LEAST = 0.05  # share of the instructions; lines with less are not named


@dataclass(frozen=True)
class LineCost:
    source_line: tuple[str, int]
    share: float  # relative to all warp instructions that the call executes
    kind: str  # the most frequent kind of instruction on this line

    def __str__(self) -> str:
        file, number = self.source_line
        code = linecache.getline(file, number).strip()
        return f"{self.share:.0%} {Path(file).name}:{number} `{code}` (mostly {self.kind})"


def line_costs(models: Sequence[LaunchModel], kinds: Collection[str] = ()) -> list[LineCost]:
    """Return the most expensive lines, by executed instructions of these kinds, or of all."""
    counts: dict[SourceLine, Counter[str]] = {}
    for model in models:
        callers = call_sites(model.kernel.compiled)
        for instruction, executed in model.executed_instructions():
            if not kinds or instruction.kind in kinds:
                line = _in_kernel(instruction.source_line, callers)
                counts.setdefault(line, Counter())[instruction.kind] += executed  # type: ignore[assignment]
    total = sum(map(Counter.total, counts.values()))
    costs = [
        LineCost(line, by_kind.total() / total, by_kind.most_common(1)[0][0])
        for line, by_kind in counts.items()
        if line and by_kind.total() > LEAST * total
    ]
    return sorted(costs, key=lambda cost: -cost.share)[:SHOWN]


def is_in_triton(source_line: SourceLine) -> bool:
    """Return whether a line is in Triton's library."""
    file = source_line[0] if source_line else ""
    return Path(file).is_relative_to(Path(inspect.getfile(triton)).parent)


def _in_kernel(line: SourceLine, callers: dict[SourceLine, set[SourceLine]]) -> SourceLine:
    """Return the line of the kernel that calls a line of Triton's library, if there is exactly one."""
    sites = callers.get(line, set()) if is_in_triton(line) else set()
    return next(iter(sites)) if len(sites) == 1 else line

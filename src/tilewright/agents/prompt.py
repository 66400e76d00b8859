"""The prompt of `tilewright evolve`: the problem, the rules, the best kernels so far, and what the last one did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.agents.answers import ProblemText

MAX_CODE = 20_000  # characters of one kernel
BETWEEN = "\n\n\n"  # two definitions
MAX_EVIDENCE = 6_000  # characters


@dataclass(frozen=True)
class KnownKernel:
    """A kernel of the archive, with its results in words."""

    code: str
    results: str


def build(problem: ProblemText, best: Sequence[KnownKernel], last: KnownKernel | None) -> str:
    """Return the prompt. `last` is the latest kernel that was judged, with the evidence of its verdict."""
    parts = [
        f"# Task\n\nWrite a fast and correct GPU kernel for `{problem.name}`: {problem.computes}",
        f"Signature: `{problem.signature}`. Dtypes: {', '.join(problem.dtypes)}.",
        f"## Reference\n\n{_block(problem.reference)}",
    ]
    if problem.inputs:
        parts.append("## Inputs of the first timed case\n\n" + _items(problem.inputs))
    cases = [f"checked: {'; '.join(problem.check_cases)}"]
    cases += [f"timed: {'; '.join(problem.bench_cases)}"] if problem.bench_cases else []
    parts += ["## Cases\n\n" + _items(cases), "## Rules\n\n" + _items(problem.rules)]
    if best:
        parts.append("## Best kernels so far")
        parts += [f"{one.results}\n\n{_block(one.code)}" for one in best]
    if last:
        evidence = last.results[:MAX_EVIDENCE]
        parts.append(f"## The last attempt\n\n{evidence}\n\n{_block(last.code)}")
    parts.append("## Answer\n\nAnswer with one complete Python file in one ```python block.")
    return "\n\n".join(parts) + "\n"


def _items(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _block(code: str) -> str:
    return f"```python\n{shortened(code).rstrip()}\n```"


def shortened(code: str) -> str:
    """Return code; of one longer than MAX_CODE the last definitions that fit, as a kernel stands after what it uses."""
    if len(code) <= MAX_CODE:
        return code
    kept, left = [], MAX_CODE
    for definition in reversed(code.split(BETWEEN)):
        if len(definition) <= left:
            kept.append(definition)
            left -= len(definition)
    return BETWEEN.join([f"# {len(code) - MAX_CODE + left} characters are left out", *reversed(kept)])

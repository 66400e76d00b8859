"""Problems as an agent needs them: the mathematics, the signature, the cases and the rules."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewright import registry, source
from tilewright.agents.answers import ProblemText
from tilewright.agents.rules import RULES
from tilewright.errors import ProblemNotFound
from tilewright.spec import Op
from tilewright.workbench.check import problems
from tilewright.workbench.check.problems import Problem
from tilewright.worker.solutions import ENTRY_POINTS

CASES = 12  # listed; the others have the same form


@contextlib.contextmanager
def opened(name: str) -> Iterator[tuple[Op, Problem | None]]:
    """Yield the Op of a problem: an operation by name, or a third-party problem by path."""
    if name in source.op_files():
        yield registry.load(name), None
        return
    path = Path(name)
    if not path.exists():
        raise ProblemNotFound(name, source.op_files())
    problem = problems.load(path)
    try:
        yield problem.op, problem
    finally:
        problem.close()


def describe(name: str) -> ProblemText:
    """Return the text of a problem."""
    with opened(name) as (op, problem):
        return _describe_problem(op, problem) if problem else _describe_op(op)


def _describe_op(op: Op) -> ProblemText:
    arguments = [*inspect.signature(op.reference).parameters]
    signature = f"{op.name}({', '.join(arguments)})"
    form = f'Define a function `{signature}`, or decorate one with @tilewright.kernel("{op.name}").'
    gradient = "A kernel without a gradient gets the label `forward only`." if op.backward_cost else ""
    case = op.benched()[0]
    values = zip(arguments, op.make(case, "meta"), strict=True)
    text = source.read(source.op_files()[op.name])
    return ProblemText(
        name=op.name,
        kind="operation",
        computes=text.summary,
        entry_point=op.name,
        signature=signature,
        reference=inspect.getsource(op.reference),
        inputs=[f"{case} {case.dtype}", *(_input(name, value) for name, value in values)],
        dtypes=list(op.dtypes),
        check_cases=[str(one) for one in op.check[:CASES]],
        bench_cases=[str(one) for one in op.bench[:CASES]],
        has_gradient=op.backward_cost is not None,
        rules=[form, *RULES, *filter(None, [gradient])],
        kernels=text.kernels,
    )


def _input(name: str, value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{name}: {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"{name} = {value!r}"


def _describe_problem(op: Op, problem: Problem) -> ProblemText:
    entry = ENTRY_POINTS[problem.kind]
    texts = [problem.path] if problem.path.suffix in (".py", ".json") else sorted(problem.path.parent.glob("*.py"))
    return ProblemText(
        name=str(problem.path),
        kind=problem.kind,
        computes=op.name,
        entry_point=entry,
        signature=f"{entry}(…)",
        reference="\n".join(f"# {path.name}\n{path.read_text()}" for path in texts),
        inputs=[],
        dtypes=list(op.dtypes),
        check_cases=[str(one) for one in op.check[:CASES]],
        bench_cases=[],
        has_gradient=False,
        rules=[f"Define `{entry}`, with the arguments of the problem's own reference.", *RULES],
    )

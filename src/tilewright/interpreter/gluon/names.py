"""Names of buffers: the variables to which a kernel assigns them."""

from __future__ import annotations

import ast
import functools
import linecache
import types
from typing import Any

from tilewright.interpreter.exceptions import kernel_frames


def assigned_name(default: str) -> str:
    """Return the name of the variable that receives the value of the current call, through functions that return it."""
    name = default
    for frame in kernel_frames():
        place = _at(frame)
        if place is None:  # the source has changed since it was compiled
            break
        function, statement = place
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            name = _target(statement, frame, function) or name
        returned = {ast.unparse(n.value) for n in ast.walk(function) if isinstance(n, ast.Return) and n.value}
        if not isinstance(statement, ast.Return) and name not in returned:
            break
    return name


@functools.lru_cache
def _functions(source: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]


def _at(frame: types.FrameType) -> tuple[ast.FunctionDef, ast.stmt] | None:
    """Return the innermost function and statement at the line that a frame executes."""
    line, name = frame.f_lineno, frame.f_code.co_name

    def covers(node: ast.stmt) -> bool:
        return node.lineno <= line <= (node.end_lineno or node.lineno)

    source = "".join(linecache.getlines(frame.f_code.co_filename))
    functions = [node for node in _functions(source) if covers(node) and node.name == name]
    if not functions:
        return None
    return functions[-1], [node for node in ast.walk(functions[-1]) if isinstance(node, ast.stmt) and covers(node)][-1]


def _target(statement: ast.Assign | ast.AnnAssign, frame: types.FrameType, function: ast.FunctionDef) -> str | None:
    """Return the name that receives the value of the call, which may be one of several in a tuple."""
    target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
        code: Any = frame.f_code
        if not hasattr(code, "co_positions"):  # Python 3.10 knows lines only
            return None
        line, _, column, _ = list(code.co_positions())[frame.f_lasti // 2]
        place = (
            line or 0,
            (column or 0) + function.col_offset,
        )  # columns of a nested function count from its indentation
        before = [i for i, value in enumerate(statement.value.elts) if (value.lineno, value.col_offset) <= place]
        target = target.elts[before[-1]]
    return target.id if isinstance(target, ast.Name) else None

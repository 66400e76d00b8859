"""The sizes in a Python file: integers, and tuples of integers, that its top level assigns to a name."""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
}
MAX_POWER = 64
SMALLEST_LITERAL = 8  # in a function: a smaller number is rather an axis, a kernel size or a number of channels


def sizes(tree: ast.Module) -> dict[str, Any]:
    """Return the sizes by name. A size that is computed from another one is not among them, since it follows it."""
    return {name: _value(node) for name, node, _ in _assigned(tree)}


def replace_sizes(tree: ast.Module, values: Mapping[str, Any], only: Mapping[str, Any] | None = None) -> None:
    """Assign other values to these sizes; with `only`, to those that have the values given there."""
    for name, node, put in list(_assigned(tree)):
        if name in values and (only is None or _value(node) == only.get(name)):
            put(_node(values[name], node))


def literals(tree: ast.Module, functions: tuple[str, ...]) -> dict[str, int]:
    """Return the integers written in these functions, each under its own digits."""
    return {str(node.value): int(node.value) for node in _literals(tree, functions)}  # type: ignore[arg-type]


def replace_literals(tree: ast.Module, functions: tuple[str, ...], values: Mapping[str, int]) -> None:
    for node in list(_literals(tree, functions)):
        node.value = values.get(str(node.value), node.value)


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr, Callable[[ast.expr], None]]]:
    """Yield names, their values, and a function that assigns another value."""
    tree.body = [part for statement in tree.body for part in _split(statement)]
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        else:
            continue
        if isinstance(target, ast.Name) and _value(value) is not None:
            yield target.id, value, lambda node, at=statement: setattr(at, "value", node)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for number, (name, item) in enumerate(zip(target.elts, value.elts, strict=True)):
                if isinstance(name, ast.Name) and _value(item) is not None:
                    yield name.id, item, lambda node, at=value, n=number: at.elts.__setitem__(n, node)


def _split(statement: ast.stmt) -> list[ast.stmt]:
    """Return `height = width = 128` as one statement per name, so that each can get a value of its own."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) == 1 or _value(statement.value) is None:
        return [statement]
    parts = [ast.Assign([target], copy.deepcopy(statement.value)) for target in statement.targets]
    return [ast.copy_location(part, statement) for part in parts]


def _literals(tree: ast.Module, functions: tuple[str, ...]) -> Iterator[ast.Constant]:
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name in functions:
            for node in ast.walk(function):
                if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= SMALLEST_LITERAL:
                    yield node


def _value(node: ast.expr) -> Any:
    """Return the integer, or the tuple or list of integers, that an expression of literals gives, or None."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Tuple | ast.List):
        items = [_value(item) for item in node.elts]
        return tuple(items) if items and all(type(item) is int for item in items) else None
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if type(left) is not int or type(right) is not int:
            return None
        if isinstance(node.op, ast.Pow):
            return left**right if 0 <= right <= MAX_POWER else None
        if type(node.op) in OPERATORS and not (isinstance(node.op, ast.FloorDiv) and not right):
            return OPERATORS[type(node.op)](left, right)
    return None


def _node(value: Any, like: ast.expr) -> ast.expr:
    if not isinstance(value, tuple):
        return ast.copy_location(ast.Constant(value), like)
    items: list[ast.expr] = [ast.copy_location(ast.Constant(item), like) for item in value]
    kind = ast.List if isinstance(like, ast.List) else ast.Tuple
    return ast.copy_location(kind(items, ast.Load()), like)

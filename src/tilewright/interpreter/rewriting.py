"""Rewriting of a kernel's source where Triton's semantics differ from Python's, and the helpers that it then calls."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITCallable

from tilewright.interpreter.builder import ACTIVE
from tilewright.interpreter.tensors import Shape, adopt, unwrap

# Helpers that the rewritten source of a kernel calls.


def _assigned(value: Any) -> Any:
    """Convert a Python number that is assigned or returned to a tensor, as a compiled kernel does."""
    value = unwrap(value)
    if isinstance(value, bool | int | float):
        return adopt(ACTIVE.semantic.to_tensor(value))
    if type(value) is tuple:
        return tuple(_assigned(v) for v in value)
    return value


def _and(*parts: Callable[[], Any]) -> Any:
    return _logical(parts, ACTIVE.semantic.logical_and, short_circuits_on=False)


def _or(*parts: Callable[[], Any]) -> Any:
    return _logical(parts, ACTIVE.semantic.logical_or, short_circuits_on=True)


def _logical(parts: tuple[Callable[[], Any], ...], join: Callable[[Any, Any], Any], short_circuits_on: bool) -> Any:
    """Short-circuit on constants, as Python does; evaluate and combine all tensors, as Triton does."""
    value, tensors = None, []
    for part in parts:
        value = unwrap(part())
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) is short_circuits_on:
            return value
    return adopt(functools.reduce(join, tensors)) if tensors else value


def _not(a: Any) -> Any:
    a = unwrap(a)
    return adopt(ACTIVE.semantic.not_(a)) if isinstance(a, tl.tensor) else not a


def _conditional(test: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """Evaluate `yes if test else no`; the result is a tensor if the test is one."""
    test = unwrap(test)
    chosen = yes() if test else no()
    return _assigned(chosen) if isinstance(test, tl.tensor) else chosen


def _plain(value: Any) -> Any:
    """Unwrap a shape or a size, since constexprs are plain numbers here."""
    return Shape([adopt(v) for v in value.values]) if isinstance(value, tl.tuple) else unwrap(value)


def _value_of(value: Any) -> Any:
    """Evaluate `.value` of a constexpr, which may have been unwrapped already."""
    return value if isinstance(value, bool | int | float | str | tl.dtype | type(None)) else value.value


def _type_of(value: Any) -> Any:
    """Evaluate `.type`, which constexprs have too."""
    is_constant = isinstance(value, bool | int | float | str | tuple | type(None))
    return tl.constexpr_type(value) if is_constant else value.type


class DynamicRange:
    """The range of a loop in the compiled kernel, unlike `tl.static_range`."""

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator


HELPERS: dict[str, Any] = {
    "__is_dynamic__": lambda iterator: isinstance(iterator, DynamicRange),
    "__type_of__": _type_of,
    "__assigned__": _assigned,
    "__unwrapped__": unwrap,
    "__and__": _and,
    "__or__": _or,
    "__not__": _not,
    "__conditional__": _conditional,
    "__plain__": _plain,
    "__value_of__": _value_of,
    "__tick__": lambda: ACTIVE.builder.tick(),
}


_SHAPES = ("shape", "strides", "numel")
_ATTRIBUTES = {"value": "__value_of__", "type": "__type_of__"}


class _Rewriter(ast.NodeTransformer):
    """Rewrites the constructs whose semantics differ between Python and Triton."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list, node.returns = [], None
        arguments = node.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            argument.annotation = None
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
        arguments.kw_defaults = [ast.Constant(None) if d is not None else None for d in arguments.kw_defaults]
        node.body = [new for old in node.body for new in _statements(self.visit(old))]
        return node

    def visit_For(self, node: ast.For) -> Any:
        """Delete the loop variable after the loop: the compiler leaves it without a value, and says nothing."""
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        iterator, target = f"__iterator_of_{node.target.id}__", node.target.id
        before = ast.Assign([ast.Name(iterator, ast.Store())], node.iter)
        node.iter = ast.Name(iterator, ast.Load())
        assign = ast.Assign([ast.Name(target, ast.Store())], ast.Constant(None))  # there may have been no iteration
        delete = ast.Delete([ast.Name(target, ast.Del())])
        after = ast.If(_call("__is_dynamic__", ast.Name(iterator, ast.Load())), [assign, delete], [])
        return [ast.copy_location(before, node), node, ast.copy_location(after, node)]

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        node.value = _call("__assigned__", node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        now = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.copy_location(ast.Assign([node.target], _call("__assigned__", now)), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        constant = "constexpr" in ast.unparse(node.annotation)
        value = _call("__unwrapped__" if constant else "__assigned__", self.visit(node.value))
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        if node.value is not None:
            node.value = _call("__assigned__", node.value)
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        return ast.copy_location(ast.Pass(), node)  # Triton compiles it only in debug mode

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        name = "__and__" if isinstance(node.op, ast.And) else "__or__"
        return ast.copy_location(_call(name, *map(_lambda, node.values)), node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        return ast.copy_location(_call("__conditional__", node.test, _lambda(node.body), _lambda(node.orelse)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        return ast.copy_location(_call("__not__", node.operand), node) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        sides = [node.left, *node.comparators]  # Triton 3.6 rejects chains, later versions take them
        pairs = [ast.Compare(a, [op], [b]) for a, op, b in zip(sides[:-1], node.ops, sides[1:], strict=True)]
        return ast.copy_location(_call("__and__", *map(_lambda, pairs)), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.attr in _ATTRIBUTES:
            return ast.copy_location(_call(_ATTRIBUTES[node.attr], node.value), node)
        return ast.copy_location(_call("__plain__", node), node) if node.attr in _SHAPES else node

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_call("__tick__")))
        return node


def _statements(visited: Any) -> list[ast.stmt]:
    return visited if isinstance(visited, list) else [visited]


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _lambda(body: ast.expr) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), body)


def rewritten(function: Any) -> types.CodeType:
    fn = function.fn
    if isinstance(function, JITCallable):
        text = function.src  # begins with the definition, below its decorators
        above = next(i for i, line in enumerate(function.raw_src) if line.lstrip().startswith("def "))
        first = function.starting_line_number + above
    else:
        lines, first = inspect.getsourcelines(fn)
        text = textwrap.dedent("".join(lines))
    tree = ast.parse(text)
    tree = ast.fix_missing_locations(_Rewriter().visit(tree))
    ast.increment_lineno(tree, first - 1)
    module = compile(tree, inspect.getsourcefile(fn) or "<kernel>", "exec")
    return next(c for c in module.co_consts if isinstance(c, types.CodeType) and c.co_name == fn.__name__)

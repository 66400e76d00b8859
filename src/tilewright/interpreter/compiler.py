"""The front end of Triton's compiler: what it rejects, the interpreter rejects too.

A kernel runs as Python here, and Python takes more than Triton: `break`, a variable that only one branch defines, a
loop that changes the type of a variable. So the compiler's front end sees each specialization of a kernel first.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.compiler.code_generator import CodeGenerator, flatten_values_to_ir
from triton.compiler.errors import CompilationError
from triton.runtime.jit import compute_cache_key, create_function_from_signature

from tilewright.interpreter.exceptions import RejectedKernel, relative_path

TARGET = GPUTarget("cuda", 90, 32)
BACKEND: Any = CUDABackend(TARGET)
_TRITON = Path(triton.__file__).parent
_GLOBAL = re.compile(r"Cannot access global variable (\w+)")
_FIND_CARRIES = CodeGenerator._find_carries


class Verdict(NamedTuple):
    """The compiler's answer."""

    file: str
    line: int
    error: str = ""  # empty: it compiles
    cause: BaseException | None = None  # what the compiler raised
    shared: int = 0  # bytes of shared memory, where it was allocated


_VERDICTS: dict[Hashable, Verdict] = {}


def verify(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RejectedKernel if the front end rejects a kernel with these arguments."""
    judged(function, args, kwargs, ASTSource, lambda source, options: attempted(lambda: front_end(source, options)))


def judged(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: Callable[..., Any],
    judge: Callable[[Any, Any], dict[str, Any]],
) -> Verdict:
    """Return the verdict on a specialization, of which each is judged once; raise RejectedKernel for an error."""
    kwargs = {"enable_fp_fusion": False, **kwargs}  # some versions warn that its default will change
    bound, specialization, options = _binder(function)(*args, **kwargs)
    key = function.cache_key, compute_cache_key({}, specialization, options)
    if key not in _VERDICTS:
        parsed, signature, constants, attributes = function._pack_args(BACKEND, kwargs, bound, specialization, options)
        place = relative_path(function.fn.__code__.co_filename), function.starting_line_number
        reply = judge(source(function, signature, constants, attributes), parsed)
        _VERDICTS[key] = Verdict(**{"file": place[0], "line": place[1], **reply})
    verdict = _VERDICTS[key]
    if verdict.error:
        where = f"{verdict.file}:{verdict.line}"
        raise RejectedKernel(f"{where}: {function.fn.__name__} fails: {verdict.error}") from verdict.cause
    return verdict


@functools.lru_cache(1024)
def _binder(function: Any) -> Callable[..., Any]:
    return create_function_from_signature(function.signature, function.params, BACKEND)


def front_end(source: Any, options: Any) -> Any:
    """Return the module that the front end generates."""
    context = ir.context()
    ir.load_dialects(context)
    BACKEND.load_dialects(context)
    functions, modules = BACKEND.get_codegen_implementation(options), BACKEND.get_module_map()
    with patch.object(CodeGenerator, "_find_carries", _find_carries):
        return source.make_ir(TARGET, options, functions, modules, context)


def attempted(compile: Callable[[], Any]) -> dict[str, Any]:
    """Return the fields of a verdict: an error and its place if compilation fails, nothing otherwise."""
    try:
        with _silent():  # the interpreter prints and warns itself
            compile()
    except Exception as error:
        return _described(error)
    return {}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    functions = CodeGenerator.statically_implemented_functions
    prints = [fn for fn in functions if getattr(fn, "__name__", "") == "static_print"]  # Triton's and Gluon's
    nothing = dict.fromkeys(prints, lambda _generator, _node: tl.constexpr(None))
    with patch.dict(functions, nothing), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _find_carries(self: Any, node: Any, liveins: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Find the variables that a loop changes, and refuse one that the compiler overlooks.

    It compares a variable's value before the loop with its value after one pass over the body, in which all others
    have their value from before the loop too. So it overlooks `previous = slot` if both are the same before the loop.
    """
    carried = _FIND_CARRIES(self, node, liveins, *args, **kwargs)
    before = {name: _handles(value) for name, value in liveins.items()}
    names = set(carried[0])
    for statement in (inner for outer in node.body for inner in ast.walk(outer)):
        if not isinstance(statement, ast.Assign):
            continue
        read = {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)} & names
        for target in (n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)):
            if target in before and target not in names and before[target] in [before[name] for name in read]:
                self.cur_node = statement
                what = f"Triton {triton.__version__} loses this assignment to `{target}` in the next iteration"
                why = "since the right side has the same value before the loop; compute it instead, as with `where`"
                raise CompilationError(self.jit_fn.src, statement, f"{what}, {why}")
    return carried


def _handles(value: Any) -> list[Any]:
    return flatten_values_to_ir([value]) if isinstance(value, tl.core.base_value) else []


def _described(error: BaseException) -> dict[str, Any]:
    """Return the message of the innermost compilation error, and the line that the code generator was visiting."""
    found: dict[str, Any] = {}
    while True:
        trace = error.__traceback__
        while trace is not None:
            generator = trace.tb_frame.f_locals.get("self")
            if isinstance(generator, CodeGenerator) and generator.cur_node is not None:
                file, node = str(generator.file_name), cast("ast.expr", generator.cur_node)
                if _TRITON not in Path(file).parents:
                    found |= {"file": relative_path(file), "line": generator.begin_line + node.lineno}
            trace = trace.tb_next
        cause = error.__cause__ or (error.__context__ if isinstance(error, CompilationError) else None)
        if cause is None:
            break
        error = cause
    message = (error.error_message or "") if isinstance(error, CompilationError) else str(error)
    text = message.strip().splitlines()
    what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    if text and (name := _GLOBAL.match(text[0])) is not None:
        what = f"`{name[1]}` is a plain global; declare it as tl.constexpr"
    error.__traceback__ = error.__context__ = None  # verdicts are kept, but not the frames of the compiler
    return {**found, "error": what, "cause": error}

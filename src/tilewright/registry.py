"""Finds operations in `ops/`, peers in `peers/` and kernels in users' files."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import KernelInterface

from tilewright import driver, source
from tilewright.errors import (
    AmbiguousFunction,
    FileBroken,
    FileNeedsCompiler,
    FileNeedsPackage,
    MissingFunction,
    MissingPackage,
    UnknownFunction,
    UnknownKernel,
    UnknownOp,
    WrongArguments,
    first_line,
)
from tilewright.spec import Kernel, Op, compiled

SEARCHED = "compile-max"


def load(name: str) -> Op:
    """Return the Op of a name."""
    if name not in source.op_files():
        raise UnknownOp(name, source.op_files())
    return importlib.import_module(source.module_name(source.op_files()[name])).op


def pick(op: Op, names: list[str]) -> list[Kernel]:
    """Return the named kernels, or all of the op's own.

    The public function, the searched kernel and peers must be named.
    """
    known = named(op)
    for name in names:
        if name not in known:
            raise UnknownKernel(op.name, name, known)
    return [known[name] for name in known if name in (names or op.kernels)]


def named(op: Op) -> dict[str, Kernel]:
    """Return all kernels that can be named: the op's own, the public function, the searched kernel and peers."""
    return op.kernels | shipped(op) | {SEARCHED: searched(op)} | ({} if op.file else peers(op))


def shipped(op: Op) -> dict[str, Kernel]:
    """Return the public function as a kernel."""
    return {op.shipped.name: op.shipped} if op.shipped else {}


def searched(op: Op) -> Kernel:
    """Return the reference compiled in mode "max-autotune".

    Without CUDA graphs, since a replay overwrites the previous result.
    """
    options = {"max_autotune": True, "coordinate_descent_tuning": True, "autotune_num_choices_displayed": 0}
    fn = compiled(op.reference, **options)
    return replace(op.kernels["compile"], name=SEARCHED, fn=fn)


def peers(op: Op) -> dict[str, Kernel]:
    """Return the kernels of other libraries for this Op, installed or not."""
    found = {}
    for name in source.peer_files():
        module = importlib.import_module(f"tilewright.peers.{name}")
        if fn := getattr(module, op.name, None):
            fits = getattr(module, f"fits_{op.name}", lambda *_: True)
            has_gradient = op.backward_cost is not None and op.name not in getattr(module, "WITHOUT_GRADIENT", ())
            found[name] = Kernel(name, _installed(fn, module), module.LANGUAGE, fits, has_gradient, origin="peer")
    return found


def absent(kernel: Kernel) -> str | None:
    """Return how to install the library of a peer kernel, if it is not installed."""
    if kernel.origin != "peer":
        return None
    module = importlib.import_module(f"tilewright.peers.{kernel.name}")
    return None if importlib.util.find_spec(module.PACKAGE) else module.INSTALL


def compiling_peer(kernel: Kernel) -> Callable[[], contextlib.AbstractContextManager[Any]] | None:
    """Return the context in which a peer's library compiles for tensors without memory and launches nothing."""
    return getattr(importlib.import_module(f"tilewright.peers.{kernel.name}"), "compiling", None)


def _installed(fn: Callable[..., Any], module: types.ModuleType) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        try:
            return fn(*args)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != module.PACKAGE:
                raise
            raise MissingPackage(f"the kernel {module.__name__.rpartition('.')[2]}", module.INSTALL) from None

    return call


def load_file(path: Path, op: Op, *, differentiable: bool = False) -> Kernel:
    """Return the kernel for an Op in a user's file."""
    fn = _find(load_module(path), path, op.file.stem if op.file else op.name)
    _require_callable(fn, path, op)
    return Kernel(path.name, fn, "python", _fits(fn), differentiable, origin="user")


def load_kernel(path: Path, op: str, function: str | None = None, *, is_own: bool = False) -> Callable[..., Any]:
    """Return a user's kernel: the one for an operation, which may be the user's own, or a named function.

    It raises NotImplementedError for calls that its `fits` does not take.
    """
    module = load_module(path)
    fn = named_function(module, path, function) if function else _find(module, path, op)
    if op in source.op_files() and not is_own:
        _require_callable(fn, path, load(op))
    fits = getattr(fn, "__tilewright_fits__", None)
    if fits is None:
        return fn

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if not fits(*args):
            raise NotImplementedError("its `fits` is false")
        return fn(*args)

    return call


def named_function(module: types.ModuleType, path: Path, name: str) -> Callable[..., Any]:
    """Return the function of a user's file with this name."""
    fn = getattr(module, name, None)
    if not callable(fn) or isinstance(fn, type):
        raise UnknownFunction(path, name, functions_of(module))
    return fn


def functions_of(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the public functions that a user's file defines."""
    return {
        n: fn
        for n, fn in vars(module).items()
        if isinstance(fn, types.FunctionType) and fn.__module__ == module.__name__ and not n.startswith("_")
    }


def launchers(functions: Mapping[str, Callable[..., Any]], module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    """Return those of the functions that lead to a Triton kernel of the file and that none of the others calls."""
    reached = {name: names_reached(fn, module) for name, fn in functions.items()}
    kernels = {name for name, value in vars(module).items() if isinstance(value, KernelInterface)}
    launching = [name for name in functions if reached[name] & kernels]
    called = {other for name in launching for other in reached[name] if other != name}
    return {name: functions[name] for name in launching if name not in called}


def names_reached(value: Any, module: types.ModuleType) -> set[str]:
    """Return the module-level names that a function or class of a file leads to."""
    reached: set[str] = set()
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type):
            waiting += [getattr(held, "__func__", held) for held in vars(value).values()]
        elif isinstance(value, types.FunctionType):
            waiting.append(value.__code__)
        elif isinstance(value, types.CodeType):
            waiting += value.co_consts
            used = {i.argval for i in dis.get_instructions(value) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
            new = {name for name in used if name in vars(module)} - reached
            held = [vars(module)[name] for name in new]
            waiting += [one for one in held if getattr(one, "__module__", None) == module.__name__]
            reached |= new
    return reached


def _fits(fn: Callable[..., Any]) -> Callable[..., bool]:
    return getattr(fn, "__tilewright_fits__", lambda *_: True)


def load_module(path: Path, edit: Callable[[ast.Module], None] | None = None) -> types.ModuleType:
    """Import a user's file, which may import from its own folder; `edit` may change its syntax tree first.

    Two processes that import it get the same random parameters.
    """
    source.require_python_file(path)
    spec = importlib.util.spec_from_file_location(f"_tilewright_user_{path.stem}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    sys.path.append(str(path.parent))  # last: a file named triton.py must not hide the real one
    try:
        # Device properties are often read when a file is imported.
        with driver.stand_in(), _seeded():
            # Not by the loader, which would take its bytecode again for a file of this size edited in the same second.
            tree = ast.parse(path.read_bytes(), str(path))
            if edit is not None:
                edit(tree)
                ast.fix_missing_locations(tree)
            exec(compile(tree, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name:
            raise FileNeedsPackage(path, error.name) from error
        if _passes_through(error.__traceback__, "cpp_extension.py"):
            raise FileNeedsCompiler(path, first_line(error)) from error
        line = error.__traceback__ and _last_line_in(error.__traceback__, path)
        raise FileBroken(path, line, first_line(error)) from error
    return module


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seed the CPU's generator while the context is open. `fork_rng` would not accept a default device of meta."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def launcher(path: Path, name: str | None) -> Callable[..., Any]:
    """Return the function of a user's file that launches kernels: the named one, or the only candidate.

    A name may be private, an alias such as `op = Function.apply`, or dotted (`Function.apply`).
    """
    module = load_module(path)
    own = {n: fn for n, fn in vars(module).items() if _is_own_function(fn, module)}
    public = {n: fn for n, fn in own.items() if not n.startswith("_")}
    if name is not None:
        found = _attribute(module, name)
        if not callable(found) or isinstance(found, type | KernelInterface):
            raise UnknownFunction(path, name, own)
        return _renamed(found, name)
    kernels = {n for n, value in vars(module).items() if isinstance(value, KernelInterface)}
    launching = {n: fn for n, fn in own.items() if _autograd_function(fn) or kernels & set(fn.__code__.co_names)}
    candidates = {n: fn for n, fn in launching.items() if n in public} or launching or public
    if len(candidates) != 1:
        raise AmbiguousFunction(path, candidates)
    return next(_renamed(fn, n) for n, fn in candidates.items())


def _is_own_function(value: Any, module: types.ModuleType) -> bool:
    defined = _autograd_function(value) or (value if isinstance(value, types.FunctionType) else None)
    return defined is not None and defined.__module__ == module.__name__


def _autograd_function(value: Any) -> Any:
    """Return the torch.autograd.Function whose `apply` this is; None for anything else."""
    import torch

    owner = getattr(value, "__self__", None) if isinstance(value, types.MethodType) else None
    is_apply = isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and value.__name__ == "apply"
    return owner if is_apply else None


def _attribute(module: types.ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _renamed(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function under the name by which `launcher` finds it again, with the signature of its `forward`."""
    if isinstance(fn, types.FunctionType) and fn.__name__ == name:
        return fn

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    owner = _autograd_function(fn)
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(owner.forward if owner else fn)
        if owner and "setup_context" not in vars(owner):
            signature = signature.replace(parameters=[*signature.parameters.values()][1:])  # without ctx
        call.__signature__ = signature  # type: ignore[attr-defined]
    call.__name__ = name
    return call


def _find(module: object, path: Path, op: str) -> Callable[..., Any]:
    marked = [fn for fn in vars(module).values() if getattr(fn, "__tilewright_op__", None) == op]
    if len(marked) > 1:
        raise FileBroken(path, None, f"{len(marked)} functions are marked as kernels of {op}, which takes one per file")
    fn = marked[0] if marked else getattr(module, op, None)
    if not callable(fn):
        raise MissingFunction(path, op)
    return fn


def _require_callable(fn: Callable[..., Any], path: Path, op: Op) -> None:
    args = op.make(op.check[0], device="meta")
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        raise WrongArguments(path, op.name, str(error), ", ".join(inspect.signature(op.reference).parameters)) from None
    except ValueError:
        return  # a builtin without a signature: calling it will tell


def _passes_through(traceback: Any, name: str) -> bool:
    return any(Path(frame.filename).name == name for frame in inspect.getinnerframes(traceback))


def _last_line_in(traceback: Any, path: Path) -> int | None:
    frames = [frame for frame in inspect.getinnerframes(traceback) if Path(frame.filename) == path]
    return frames[-1].lineno if frames else None

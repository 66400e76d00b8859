"""Finds operations in `ops/`, peers in `peers/` and kernels in users' files."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from triton.runtime.jit import KernelInterface

from tilewright import driver, source
from tilewright.errors import (
    AmbiguousFunction,
    FileBroken,
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
    return op.kernels | shipped(op) | {SEARCHED: searched(op)} | peers(op)


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
            has_gradient = op.backward_cost is not None
            found[name] = Kernel(name, _installed(fn, module), module.LANGUAGE, fits, has_gradient, origin="peer")
    return found


def absent(kernel: Kernel) -> str | None:
    """Return how to install the library of a peer kernel, if it is not installed."""
    if kernel.origin != "peer":
        return None
    module = importlib.import_module(f"tilewright.peers.{kernel.name}")
    return None if importlib.util.find_spec(module.PACKAGE) else module.INSTALL


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
    fn = _find(load_module(path), path, op)
    if fn is None:
        raise MissingFunction(path, op.name)
    _require_callable(fn, path, op)
    return Kernel(path.name, fn, "python", lambda *_: True, differentiable, origin="user")


def load_module(path: Path) -> types.ModuleType:
    """Import a user's file, which may import from its own folder."""
    source.require_python_file(path)
    spec = importlib.util.spec_from_file_location(f"_tilewright_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    sys.path.append(str(path.parent))  # last: a file named triton.py must not hide the real one
    try:
        with driver.stand_in():  # device properties are often read when a file is imported
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line = error.__traceback__ and _last_line_in(error.__traceback__, path)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        why = f"it needs the package '{missing}', which is not installed here" if missing else first_line(error)
        raise FileBroken(path, line, why) from error
    return module


def launcher(path: Path, name: str | None) -> Callable[..., Any]:
    """Return the function of a user's file that launches kernels: the named one, or the only candidate."""
    module = load_module(path)
    own = {
        n: fn
        for n, fn in vars(module).items()
        if isinstance(fn, types.FunctionType) and fn.__module__ == module.__name__ and not n.startswith("_")
    }
    if name is not None:
        if name not in own:
            raise UnknownFunction(path, name, own)
        return own[name]
    kernels = {n for n, value in vars(module).items() if isinstance(value, KernelInterface)}
    launching = {n: fn for n, fn in own.items() if kernels & set(fn.__code__.co_names)} or own
    if len(launching) != 1:
        raise AmbiguousFunction(path, launching)
    return next(iter(launching.values()))


def _find(module: object, path: Path, op: Op) -> Callable[..., Any] | None:
    marked = [fn for fn in vars(module).values() if getattr(fn, "__tilewright_op__", None) == op.name]
    if len(marked) > 1:
        raise FileBroken(
            path, None, f"{len(marked)} functions are marked as kernels of {op.name}, which takes one per file"
        )
    named = getattr(module, op.name, None)
    return marked[0] if marked else named if callable(named) else None


def _require_callable(fn: Callable[..., Any], path: Path, op: Op) -> None:
    args = op.make(op.check[0], device="meta")
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        raise WrongArguments(path, op.name, str(error), ", ".join(inspect.signature(op.reference).parameters)) from None
    except ValueError:
        return  # a builtin without a signature: calling it will tell


def _last_line_in(traceback: Any, path: Path) -> int | None:
    frames = [frame for frame in inspect.getinnerframes(traceback) if Path(frame.filename) == path]
    return frames[-1].lineno if frames else None

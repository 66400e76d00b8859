"""Execution of one launch: the programs of the grid run in batches that follow the same control flow."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.jit import KernelParam, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.interpreter.access_log import AccessLog
from tilewright.interpreter.builder import ACTIVE, TRITON, Language, parse_options
from tilewright.interpreter.exceptions import (
    DeviceError,
    Diverged,
    LaunchError,
    OversizedInteger,
    RejectedKernel,
    RejectedOptions,
    SpinWait,
    UnsupportedFeature,
    UnsupportedKernel,
    line_of,
    relative_path,
)
from tilewright.interpreter.language import executable, translated
from tilewright.interpreter.memory import Memory
from tilewright.interpreter.results import Launch
from tilewright.interpreter.tensors import adopt, unwrap
from tilewright.interpreter.values import Handle

MAX_LANES = 2**18  # per access of a batch, so that its arrays stay in the CPU's cache
MAX_LOGGED_LANES = 2**25  # over all accesses of a batch, which are logged until it ends, at 12 bytes per lane
MAX_PROGRAMS = 4096  # per batch
GLUON_DESCRIPTORS = "triton.experimental.gluon.nvidia.hopper"  # the module of their class
KNOWN_OPTIONS = {
    *vars(ACTIVE.builder.options),
    "num_warps",
    "num_stages",
    "num_ctas",
    "maxnreg",
    "stream",
    "grid",
    "warmup",
}
_UNBOUND = re.compile(r"cannot access (?:local|free) variable '(\w+)'")
_TYPES = {
    torch.float32: tl.float32, torch.float64: tl.float64, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64, torch.uint8: tl.uint8,
    torch.uint16: tl.uint16, torch.uint32: tl.uint32, torch.uint64: tl.uint64, torch.bool: tl.int1,
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5, torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2fnuz: tl.float8e5b16,
}  # fmt: skip


def run(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    grid: Any,
    *,
    initialized: dict[int, np.ndarray],
    steps: int,
    maps: bool,
    lanes: int | None = None,
) -> Launch:
    """Run a kernel over its grid; raise LaunchError, with a one-line message, if it cannot finish.

    With `lanes`, run an evenly spread sample of the programs that accesses about this many lanes.
    """
    name = function.fn.__name__
    file, line = relative_path(inspect.getsourcefile(function.fn) or ""), inspect.getsourcelines(function.fn)[1]
    ACTIVE.language = language = _language(function)
    builder = language.builder
    builder.operations, builder.operations_left, builder.has_poison = 0, steps, False
    params = _params(function)
    for param in params:
        if param.is_constexpr and param.do_not_specialize:
            what = f"{param.name} marked as constexpr and listed in do_not_specialize"
            raise RejectedKernel(f"{file}:{line}: {name} fails: {what}")
    given, meta = _bound(function, params, args, kwargs)
    debug = bool(meta.get("debug") or getattr(function, "debug", None) or knobs.runtime.debug)
    try:
        builder.options = parse_options({**meta, "debug": debug})
    except AssertionError as error:
        raise RejectedOptions(f"{file}:{line}: {name} cannot be launched: {error}") from error
    grid = _three_dimensional(grid({**given, **meta}) if callable(grid) else grid, name)
    total = math.prod(grid)
    memory = Memory(name, grid, initialized)
    constants = {p.name: translated(given[p.name]) for p in params if p.is_constexpr}
    arguments = {p.name: _argument(memory, p.name, unwrap(given[p.name]), p) for p in params if not p.is_constexpr}
    log = AccessLog(memory)
    memory.commit = log.commit
    if language is TRITON:  # Gluon's layouts say which warp has a lane, and are not known here
        memory.unseen.warps = builder.options.num_warps
    builder.memory, builder.grid = memory, grid
    try:
        language.verify(function, args, kwargs)
        body = executable(function).bind()
        with np.errstate(all="ignore"):
            ran = _run_all(body, constants | arguments, _Scheduler(total, lanes), memory, log, steps)
    except UnsupportedFeature as error:
        file, line = line_of(error) if line_of(error)[1] else (file, line)
        raise UnsupportedKernel(f"{file}:{line}: {name} uses {error}, which the interpreter cannot run") from None
    except RejectedKernel:
        raise
    except LaunchError as error:
        earlier = [*log.findings, *memory.findings]
        note = f"; found before: {earlier[0]}" if earlier else ""
        raise type(error)(f"{error} (kernel {name}){note}") from None
    except DeviceError as error:
        raise LaunchError(f"{':'.join(map(str, line_of(error)))}: {name} fails: {error}") from None
    except Exception as error:
        memory.roll_back()  # a kernel that does not compile writes nothing
        kernel_file, kernel_line = line_of(error)
        text = str(error).strip().splitlines()
        if isinstance(error, NameError) and error.name in function.fn.__globals__:
            text = [f"`{error.name}` is a plain global; declare it as tl.constexpr"]
        elif (unbound := _UNBOUND.search(str(error))) is not None:  # the front end rejects all other unbound names
            text = [f"`{unbound[1]}` has no value after its loop; assign it to another variable inside"]
        what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        raise RejectedKernel(f"{kernel_file or file}:{kernel_line or line}: {name} fails: {what}") from error
    finally:
        memory.commit = None  # breaks a reference cycle: shadow memory is freed now
        del builder.memory
    for buffer in memory.buffers.values():
        buffer.copy_back()
    options = {p.name: given[p.name] for p in params if p.is_constexpr} | meta
    programs_run = ran if ran < total else None
    traffic = log.traffic(maps)
    return Launch(name, file, line, grid, traffic, log.findings, builder.operations, options, programs_run)


def _language(function: Any) -> Language:
    if not getattr(function, "is_gluon", bool)():
        return TRITON
    from tilewright.interpreter.gluon import GLUON  # takes a while to load

    return GLUON


def _three_dimensional(grid: Any, name: str) -> tuple[int, int, int]:
    sizes = [unwrap(g) for g in ((grid,) if isinstance(grid, int) else grid)]
    if not 1 <= len(sizes) <= 3 or not all(isinstance(s, int) and s >= 0 for s in sizes):
        raise LaunchError(f"{name}: a grid has one to three non-negative integers, not {grid}")
    x, y, z = *sizes, *(1,) * (3 - len(sizes))
    if x >= 2**31 or max(y, z) > 65535:
        raise LaunchError(f"{name}: a grid is at most 2147483647 x 65535 x 65535, not {x} x {y} x {z}")
    return x, y, z


class _Scheduler:
    """Picks the programs of the next batch.

    Program 0 runs alone and shows how many lanes the operations have; later batches have as many programs as keep the
    arrays small. A batch that diverges is rolled back and split. A batch that spins is rolled back and retried when
    another has changed what it polls; failing that, after the others, and together with all other waiting batches if
    none of them makes progress alone. If the grid accesses more than `lanes` lanes, a random program from each of
    several equal ranges runs instead.
    """

    def __init__(self, total: int, lanes: int | None):
        self._total = total
        self._lanes = lanes
        self._sample: np.ndarray | None = None  # None: every program runs
        self.ran = 0
        self._started = min(1, total)
        self._pending = [np.zeros(1, np.int32)] if total else []
        self._batch_size = MAX_PROGRAMS
        self._waiting: list[tuple[np.ndarray, SpinWait]] = []
        self._finished_since_retry = 0
        self._splits = 0
        self._lone_splits = 0  # consecutive splits into one program and the others
        self._merges = 0
        self.may_spin = False  # no other program can run, so a program that spins never stops

    def next(self) -> np.ndarray | None:
        if not self._pending and self._started < self._total:
            count = max(1, min(self._batch_size, self._total - self._started))
            programs = np.arange(self._started, self._started + count, dtype=np.int32)
            self._pending.append(programs if self._sample is None else self._sample[programs])
            self._started += count
        if not self._pending and self._waiting:
            if not self._finished_since_retry:
                self._pending = [np.sort(np.concatenate([programs for programs, _ in self._waiting]))]
                self._merges += 1
                self.may_spin = self._merges > 8
            else:
                self._pending = [programs for programs, _ in reversed(self._waiting)]
            self._waiting, self._finished_since_retry = [], 0
        return self._pending.pop() if self._pending else None

    def finished(self, programs: np.ndarray, memory: Memory) -> None:
        """Record a finished batch, whose accesses are still in the log."""
        count = len(programs)
        widest, lanes = max((access.lanes for access in memory.accesses), default=1), memory.lanes
        if self._waiting:
            woken = [memory.changes(wait.buffer, wait.offsets) for _, wait in self._waiting]
            self._pending += [programs for (programs, _), wakes in zip(self._waiting, woken, strict=True) if wakes]
            self._waiting = [waiting for waiting, wakes in zip(self._waiting, woken, strict=True) if not wakes]
        if not self.ran and self._lanes is not None and self._total * lanes > self._lanes * count:
            self._draw_sample(max(2, self._lanes * count // lanes))
        self.ran += count
        self._finished_since_retry += count
        limits = MAX_LANES * count // widest, MAX_LOGGED_LANES * count // max(lanes, 1)
        self._batch_size = min(self._batch_size, *limits)

    def _draw_sample(self, count: int) -> None:
        """Draw this many programs, program 0 among them."""
        edges = np.linspace(0, self._total, min(count, self._total) + 1).astype(np.int64)
        within = np.random.default_rng(0).random(len(edges) - 1)
        self._sample = (edges[:-1] + within * np.diff(edges)).astype(np.int32)
        self._sample[0] = 0
        self._total = len(self._sample)

    def wait(self, programs: np.ndarray, wait: SpinWait) -> None:
        self._waiting.append((programs, wait))

    def split(self, programs: np.ndarray, keys: np.ndarray) -> None:
        self._splits += 1
        if len(programs) > 2:
            is_lone = np.sort(np.unique(keys, return_counts=True)[1])[:-1].tolist() == [1]
            self._lone_splits = self._lone_splits + 1 if is_lone else 0
        if self._lone_splits > 8 or (self._splits > 32 and len(programs) <= 64):
            keys = np.arange(len(programs))  # they part at every step, as around a lock
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        self._pending.extend(programs[group == g] for g in np.argsort(first)[::-1])


def _run_all(
    body: Any, arguments: dict[str, Any], scheduler: _Scheduler, memory: Memory, log: AccessLog, steps: int
) -> int:
    """Run the scheduled programs and return how many ran."""
    while (programs := scheduler.next()) is not None:
        memory.begin(programs, may_spin=scheduler.may_spin)
        ACTIVE.builder.begin(programs, steps)
        try:
            body(**arguments)
            ACTIVE.builder.end()
        except Diverged as diverged:
            memory.roll_back()
            scheduler.split(programs, diverged.keys)
        except SpinWait as wait:
            memory.roll_back()
            scheduler.wait(programs, wait)
        else:
            scheduler.finished(programs, memory)
            log.commit()
    return scheduler.ran


def _params(function: Any) -> list[KernelParam]:
    if hasattr(function, "params"):
        return function.params
    return [KernelParam(i, p, False, False) for i, p in enumerate(inspect.signature(function.fn).parameters.values())]


def _bound(
    function: Any, params: list[KernelParam], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments by name, and the launch options such as num_warps."""
    names = {p.name for p in params}
    meta = {k: v for k, v in kwargs.items() if k not in names}
    for option in meta:
        if option not in KNOWN_OPTIONS:
            raise LaunchError(f"{function.fn.__name__}: no argument and no Triton launch option is named '{option}'")
    signature = inspect.signature(function.fn)
    try:
        bound = signature.bind(*args, **{k: v for k, v in kwargs.items() if k in names})
    except TypeError as error:
        raise LaunchError(f"{function.fn.__name__}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments), meta


def _argument(memory: Memory, name: str, value: Any, param: KernelParam | None = None) -> Any:
    """Convert an argument to the tensor or tensors that the kernel receives."""
    if isinstance(value, tuple):
        parts = [_argument(memory, f"{name}[{i}]", v) for i, v in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, TensorDescriptor) or type(value).__module__ == GLUON_DESCRIPTORS:
        return _descriptor(memory, name, value)
    if isinstance(value, TensorWrapper | Tensor) or (hasattr(value, "data_ptr") and hasattr(value, "dtype")):
        return _pointer(memory, name, value, is_const=param is not None and param.is_const)
    if isinstance(value, bool):
        return adopt(tl.tensor(Handle(np.full(1, value), tl.int1), tl.int1))
    if isinstance(value, int):
        if value == 1 and not (param is not None and (param.do_not_specialize or param.annotation_type)):
            return 1  # Triton specializes on 1 and compiles it in as a constant
        if not -(2**63) <= value < 2**64:
            raise OversizedInteger(f"`{name}` is {value}, which does not fit into 64 bits")
        return adopt(ACTIVE.semantic.scalar_constant(value, _annotated(param) or _integer_type(value)))
    if isinstance(value, float):
        return adopt(ACTIVE.semantic.scalar_constant(value, _annotated(param) or tl.float32))
    return translated(value)


def _annotated(param: KernelParam | None) -> Any:
    name = param.annotation_type if param is not None else ""
    return tl.str_to_ty(name, None) if name and not name.startswith("*") else None


def _integer_type(value: int) -> tl.dtype:
    if -(2**31) <= value < 2**31:
        return tl.int32
    return tl.int64 if value < 2**63 else tl.uint64


def _pointer(memory: Memory, name: str, value: Any, *, is_const: bool = False) -> Any:
    base = value.base if isinstance(value, TensorWrapper) else value
    dtype = value.dtype if isinstance(value.dtype, tl.dtype) else _TYPES.get(value.dtype)
    if dtype is None:
        raise LaunchError(f"`{name}` has dtype {value.dtype}, which Triton does not support")
    if isinstance(base, Tensor):
        address = memory.add(name, base).address
    elif added := memory.add_pointer(name, value.data_ptr()):
        address = added[1]
    else:
        raise LaunchError(f"`{name}` is a {type(value).__name__} with an address at which no tensor lies")
    ty = tl.pointer_type(dtype, const=is_const)
    return adopt(tl.tensor(Handle(np.full(1, address, np.int64), ty), ty))


def _descriptor(memory: Memory, name: str, value: Any) -> Any:
    base = _pointer(memory, name, value.base)
    shape = [_argument(memory, name, s) for s in value.shape]
    strides = [_argument(memory, name, s) for s in value.strides[:-1]] + [tl.constexpr(1)]
    block = [tl.constexpr(b) for b in value.block_shape]
    made = ACTIVE.language.make_descriptor(value, base, shape, strides, block)
    made.handle.round_to_tf32 = getattr(value, "round_f32_to_tf32", False)
    return adopt(made)

"""One launch: a grid of programs, run in batches that go the same way."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime.jit import KernelParam, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.interpreter.builder import BUILDER, SEMANTIC, Handle
from tilewright.interpreter.language import adopt, translated, twin, unwrap
from tilewright.interpreter.access_log import Ledger
from tilewright.interpreter.memory import Memory
from tilewright.interpreter.results import Launch
from tilewright.interpreter.exceptions import Diverged, NotInterpreted, Stopped, Unsupported, Waiting, line_of, short

LANES = 2**18  # of the widest access of a batch: arrays that stay in a cache
ALL_LANES = 2**25  # of all accesses of a batch: they are kept until its end, 12 bytes each
KNOWN_OPTIONS = {*vars(BUILDER.options), "num_warps", "num_stages", "num_ctas", "maxnreg", "stream", "grid", "warmup"}
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
    fresh: dict[int, np.ndarray],
    steps: int,
    maps: bool,
    lanes: int | None = None,
) -> Launch:
    """Run a kernel over its grid, or over so many programs of it, spread evenly, as touch about so many lanes. Raises
    Stopped, with one line, where it cannot come to its end."""
    name = function.fn.__name__
    file, line = short(inspect.getsourcefile(function.fn) or ""), _first_line(function)
    if getattr(function, "is_gluon", bool)():
        raise NotInterpreted(f"{file}:{line}: {name} uses Gluon, which the interpreter cannot run")
    BUILDER.operations, BUILDER.operations_left = 0, steps
    params = _params(function)
    given, meta = _bound(function, params, args, kwargs)
    BUILDER.options.debug = bool(meta.get("debug") or getattr(function, "debug", None) or knobs.runtime.debug)
    whole = _whole_grid(grid({**given, **meta}) if callable(grid) else grid, name)
    memory = Memory(name, whole)
    values_of = {p.name: _argument(memory, p, given[p.name]) for p in params}
    ledger = Ledger(memory, fresh)
    memory.settle = ledger.take
    BUILDER.memory, BUILDER.grid = memory, whole
    try:
        body = twin(function).bind()
        with np.errstate(all="ignore"):
            ran = _run_all(body, values_of, _Schedule(math.prod(whole), lanes), whole, memory, ledger, steps)
    except Unsupported as error:
        file, line = line_of(error) if line_of(error)[1] else (file, line)
        raise NotInterpreted(f"{file}:{line}: {name} uses {error}, which the interpreter cannot run") from None
    except Stopped as error:
        raise type(error)(f"{error} (kernel {name})") from None
    except Exception as error:
        at, number = line_of(error)
        text = str(error).strip().splitlines()
        if isinstance(error, NameError) and error.name in function.fn.__globals__:
            text = [f"`{error.name}` is a plain global: Triton takes tl.constexpr ones"]
        what = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        raise Stopped(f"{at or file}:{number or line}: {name} fails: {what}") from error
    for buffer in memory.buffers.values():
        buffer.copy_back()
    shown = {p.name: given[p.name] for p in params if p.is_constexpr} | meta
    some = ran if ran < math.prod(whole) else None
    return Launch(name, file, line, whole, ledger.traffic(maps), ledger.findings, BUILDER.operations, shown, some)


def _whole_grid(grid: Any, name: str) -> tuple[int, int, int]:
    sizes = [unwrap(g) for g in ((grid,) if isinstance(grid, int) else grid)]
    if not 1 <= len(sizes) <= 3 or not all(isinstance(s, int) and s >= 0 for s in sizes):
        raise Stopped(f"{name}: a grid is one to three whole numbers, not {grid}")
    x, y, z = *sizes, *(1,) * (3 - len(sizes))
    if x >= 2**31 or max(y, z) > 65535:
        raise Stopped(f"{name}: a GPU takes grids of at most 2147483647 x 65535 x 65535, not {x} x {y} x {z}")
    return x, y, z


class _Schedule:
    """Which programs run next. Program 0 alone tells how wide the operations are; then as many at once as keep arrays
    small. A batch whose programs part is undone and run again in the parts; one that waits for another program is
    undone and run again later, and with the others that wait if none of them can come first. If all programs have more
    than so many lanes, some run: one, anywhere, of every so many."""

    def __init__(self, total: int, lanes: int | None):
        self._total = total
        self._lanes = lanes
        self._chosen: np.ndarray | None = None  # None: every program
        self.ran = 0
        self._started = min(1, total)
        self._pending = [np.zeros(1, np.int32)] if total else []
        self._most = 4096  # programs of a batch
        self._waiting: list[np.ndarray] = []
        self._done_since = 0  # programs, since the waiting were last tried
        self._splits = 0
        self._merges = 0
        self.patient = False  # nothing else can run: whoever waits now, waits for ever

    def next(self) -> np.ndarray | None:
        if not self._pending and self._started < self._total:
            count = max(1, min(self._most, self._total - self._started))
            numbers = np.arange(self._started, self._started + count, dtype=np.int32)
            self._pending.append(numbers if self._chosen is None else self._chosen[numbers])
            self._started += count
        if not self._pending and self._waiting:
            if not self._done_since:
                self._waiting = [np.sort(np.concatenate(self._waiting))]
                self._merges += 1
                self.patient = self._merges > 8
            self._pending, self._waiting, self._done_since = self._waiting[::-1], [], 0
        return self._pending.pop() if self._pending else None

    def done(self, numbers: np.ndarray, widest: int, lanes: int) -> None:
        """These programs came to their end; their widest access and all of them together had so many lanes."""
        if not self.ran and self._lanes is not None and self._total * lanes > self._lanes * len(numbers):
            self._choose(max(2, self._lanes * len(numbers) // lanes))
        self.ran += len(numbers)
        self._done_since += len(numbers)
        self._most = min(self._most, LANES * len(numbers) // widest, ALL_LANES * len(numbers) // max(lanes, 1))

    def _choose(self, count: int) -> None:
        """So many programs, the first among them."""
        edges = np.linspace(0, self._total, min(count, self._total) + 1).astype(np.int64)
        within = np.random.default_rng(0).random(len(edges) - 1)
        self._chosen = (edges[:-1] + within * np.diff(edges)).astype(np.int32)
        self._chosen[0] = 0
        self._total = len(self._chosen)

    def wait(self, numbers: np.ndarray) -> None:
        self._waiting.append(numbers)

    def part(self, numbers: np.ndarray, keys: np.ndarray) -> None:
        self._splits += 1
        if self._splits > 32 and len(numbers) <= 64:  # they part at every turn, as around a lock
            keys = np.arange(len(numbers))
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        self._pending.extend(numbers[group == g] for g in np.argsort(first)[::-1])


def _run_all(
    body: Any,
    given: dict[str, Any],
    schedule: _Schedule,
    grid: tuple[int, int, int],
    memory: Memory,
    ledger: Ledger,
    steps: int,
) -> int:
    """How many programs ran."""
    x, y, _ = grid
    while (numbers := schedule.next()) is not None:
        BUILDER.programs = np.stack([numbers % x, numbers // x % y, numbers // (x * y)], axis=1)
        BUILDER.operations_left = steps
        memory.begin(numbers, patient=schedule.patient)
        try:
            body(**given)
        except Diverged as parted:
            memory.undo()
            schedule.part(numbers, parted.keys)
        except Waiting:
            memory.undo()
            schedule.wait(numbers)
        else:
            schedule.done(numbers, max((a.lanes for a in memory.accesses), default=1), memory.lanes)
            ledger.take()
    return schedule.ran


def _params(function: Any) -> list[KernelParam]:
    if hasattr(function, "params"):
        return function.params
    return [KernelParam(i, p, False, False) for i, p in enumerate(inspect.signature(function.fn).parameters.values())]


def _first_line(function: Any) -> int:
    return inspect.getsourcelines(function.fn)[1]


def _bound(function: Any, params: list[KernelParam], args: tuple[Any, ...], kwargs: dict[str, Any]):
    """Arguments by name, and launch options such as num_warps."""
    names = {p.name for p in params}
    meta = {k: v for k, v in kwargs.items() if k not in names}
    for option in meta:
        if option not in KNOWN_OPTIONS:
            raise Stopped(f"{function.fn.__name__}: it has no argument and Triton no option named '{option}'")
    signature = inspect.signature(function.fn)
    try:
        bound = signature.bind(*args, **{k: v for k, v in kwargs.items() if k in names})
    except TypeError as error:
        raise Stopped(f"{function.fn.__name__}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments), meta


def _argument(memory: Memory, param: KernelParam, value: Any) -> Any:
    """What the kernel is given: constants as they are, numbers and tensors as values."""
    if param.is_constexpr:
        return translated(value)
    return _converted(memory, param.name, unwrap(value), param)


def _converted(memory: Memory, name: str, value: Any, param: KernelParam | None) -> Any:
    if isinstance(value, tuple):
        parts = [_converted(memory, f"{name}[{i}]", v, None) for i, v in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, TensorDescriptor):
        return _descriptor(memory, name, value)
    if isinstance(value, TensorWrapper | Tensor):
        return _pointer(memory, name, value)
    if isinstance(value, bool):
        return adopt(tl.tensor(Handle(np.full(1, value), tl.int1), tl.int1))
    if isinstance(value, int):
        if value == 1 and not (param is not None and (param.do_not_specialize or param.annotation_type)):
            return 1  # Triton compiles a 1 in as a constant
        kind = _annotated(param) or _integer_type(value)
        return adopt(SEMANTIC.scalar_constant(value, kind))
    if isinstance(value, float):
        return adopt(SEMANTIC.scalar_constant(value, _annotated(param) or tl.float32))
    return value


def _annotated(param: KernelParam | None) -> Any:
    name = param.annotation_type if param is not None else ""
    return tl.str_to_ty(name, None) if name and not name.startswith("*") else None


def _integer_type(value: int) -> tl.dtype:
    if -(2**31) <= value < 2**31:
        return tl.int32
    return tl.int64 if value < 2**63 else tl.uint64


def _pointer(memory: Memory, name: str, value: Any) -> Any:
    base = value.base if isinstance(value, TensorWrapper) else value
    dtype = value.dtype
    kind = dtype if isinstance(dtype, tl.dtype) else _TYPES.get(dtype)
    if kind is None:
        raise Stopped(f"`{name}` has dtype {dtype}, which Triton does not take")
    argument = memory.add(name, base)
    ty = tl.pointer_type(kind)
    return adopt(tl.tensor(Handle(np.full(1, argument.address, np.int64), ty), ty))


def _descriptor(memory: Memory, name: str, value: TensorDescriptor) -> Any:
    base = _pointer(memory, name, value.base)
    shape = [_converted(memory, name, s, None) for s in value.shape]
    strides = [_converted(memory, name, s, None) for s in value.strides[:-1]] + [tl.constexpr(1)]
    block = [tl.constexpr(b) for b in value.block_shape]
    made = SEMANTIC.make_tensor_descriptor(base, shape, strides, block, value.padding)
    made.handle.round_to_tf32 = getattr(value, "round_f32_to_tf32", False)
    return adopt(made)

"""Memory as a kernel sees it: every tensor argument in an address range of its own.

An address holds the number of its argument above 48 bits and an offset in the argument's storage below, so a pointer
never loses the tensor it came from: where it points outside of that tensor, no neighbour is read. What each access did
is logged and goes to the ledger when the batch of programs has come to its end; a batch that diverges is undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir

from tilewright.interpreter import numerics
from tilewright.interpreter.results import OUT_OF_BOUNDS, OVERFLOW, RACE, SECTOR, Finding
from tilewright.interpreter.exceptions import Stopped, Waiting, here

HELD = 2**22  # lanes of accesses that are kept until the batch ends
PATIENCE = 500  # atomics at one place in a row, after which a program counts as waiting for another
SLOT = 48  # bits of an address below the number of the argument
ORIGIN = 1 << 47  # offset of a storage's first byte, so that negative offsets stay in their slot


class Buffer:
    """One storage, shared by all arguments that view it."""

    def __init__(self, tensor: Tensor):
        self.storage = tensor.untyped_storage()
        self.on_cpu = self.storage if self.storage.device.type == "cpu" else self.storage.cpu()
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(self.on_cpu).numpy()
        self.unit = 8  # bytes: the smallest element of any argument here
        self.written = False

    def typed(self, size: int) -> np.ndarray:
        whole = len(self.bytes) // size * size
        return self.bytes[:whole].view(f"u{size}")

    def copy_back(self) -> None:
        if self.written and self.on_cpu is not self.storage:
            self.storage.copy_(self.on_cpu)


class Argument:
    """A tensor given to a kernel."""

    def __init__(self, name: str, tensor: Tensor, buffer: Buffer, slot: int):
        self.name = name
        self.tensor = tensor
        self.buffer = buffer
        self.size = tensor.element_size()
        self.base = (slot << SLOT) + ORIGIN  # address of the storage's first byte
        self.first = int(tensor.storage_offset()) * self.size  # byte of the first element
        self.span = 0  # elements from the first to the last in memory
        self.dense = True  # all of them are the tensor's
        if tensor.numel():
            runs = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s and n > 1)
            self.span = sum((n - 1) * s for s, n in runs) + 1
            self.dense = all(s == math.prod(n for _, n in runs[:place]) for place, (s, _) in enumerate(runs))
        self.end = self.first + self.span * self.size
        self._inside: np.ndarray | None = None

    @property
    def address(self) -> int:
        return self.base + self.first

    @property
    def inside(self) -> np.ndarray:
        """Which elements of the span belong to the tensor: a view may have gaps."""
        if self._inside is None:
            self._inside = np.zeros(self.span, bool)
            if self.span:
                self.shaped(self._inside)[...] = True
        return self._inside

    def shaped(self, per_element: np.ndarray) -> np.ndarray:
        """An array over the span, seen in the tensor's shape."""
        strides = [s * per_element.itemsize for s in self.tensor.stride()]
        return np.lib.stride_tricks.as_strided(per_element, self.tensor.shape, strides)

    def index(self, element: int) -> tuple[int, ...]:
        """The tensor's index of an element of the span, or its distance from the first where it has none."""
        if not 0 <= element < self.span or not self.inside[element]:
            return (element,)
        place: dict[int, int] = {}
        strides = [0 if n == 1 else s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True)]
        for dim in sorted(range(len(strides)), key=lambda d: -strides[d]):
            place[dim], element = divmod(element, strides[dim]) if strides[dim] else (0, element)
        return tuple(place[dim] for dim in range(len(strides)))

    def named(self, element: int) -> str:
        index = self.index(element)
        return f"`{self.name}[{', '.join(map(str, index))}]`" if index else f"`{self.name}`"

    def outside(self, element: int) -> str:
        """What an element that is not the tensor's is called."""
        shape = f"shape {tuple(self.tensor.shape)}"
        if not self.span:
            return f"`{self.name}`, which is empty"
        if 0 <= element < self.span:
            return f"element {element} of `{self.name}`, in a gap of it ({shape}, strides {self.tensor.stride()})"
        strides = "" if self.tensor.is_contiguous() else f", strides {self.tensor.stride()}"
        return f"element {element} of `{self.name}`, whose elements are 0 to {self.span - 1} ({shape}{strides})"


@dataclass
class Part:
    """The lanes of one operation that touch one argument."""

    argument: Argument
    where: np.ndarray  # byte in the storage
    on: np.ndarray | None  # lanes that take part, in the shape of `where`; None: all
    rows: np.ndarray | None  # which program of the batch, broadcast over `where`; None: each lane is every program's
    lanes: np.ndarray | None = None  # which of the operation's lanes these are; None: all, in their shape

    def pick(self, per_lane: np.ndarray) -> np.ndarray:
        """Of an array over the operation's lanes, those that are on here, flat."""
        part = per_lane.reshape(-1)[self.lanes] if self.lanes is not None else per_lane
        return part[self.on] if self.on is not None else part.reshape(-1)


@dataclass
class Access:
    """What one operation did to one argument: flat arrays over the lanes that took part."""

    kind: str  # load, store or atomic
    argument: Argument
    size: int
    where: np.ndarray  # byte in the storage
    programs: np.ndarray | None  # numbers; None: every program of the batch did this
    place: tuple[str, int]
    lanes: int  # on and off
    sectors: int
    changed: np.ndarray | None = None  # of stores and atomics: lanes that put another value there
    order: Any = None  # of atomics: which memory order, and among whom
    scope: Any = None
    volatile: bool = False


class Memory:
    """The arguments of one launch, and what the running batch has done to them."""

    def __init__(self, kernel: str, grid: tuple[int, int, int]):
        self.kernel = kernel
        self.grid = grid
        self.arguments: list[Argument] = []
        self.buffers: dict[int, Buffer] = {}
        self.numbers = np.zeros(1, np.int32)  # of the batch's programs
        self.settle: Callable[[], None] | None = None  # what to do with many accesses of a batch that cannot part
        self._patience: float = PATIENCE
        self.forget()

    def add(self, name: str, tensor: Tensor) -> Argument:
        key = tensor.untyped_storage().data_ptr() or -1 - len(self.arguments)  # storages without memory share address 0
        buffer = self.buffers.get(key) or self.buffers.setdefault(key, Buffer(tensor))
        argument = Argument(name, tensor, buffer, len(self.arguments) + 1)
        buffer.unit = min(buffer.unit, argument.size)
        self.arguments.append(argument)
        return argument

    def begin(self, numbers: np.ndarray, patient: bool = False) -> None:
        self.numbers = numbers
        self._patience = math.inf if patient else PATIENCE
        self.forget()

    def undo(self) -> None:
        for memory, index, old in reversed(self._undo):
            memory[index] = old
        self.forget()

    def forget(self) -> None:
        self.accesses: list[Access] = []
        self.findings: list[Finding] = []
        self.lanes = 0  # of the accesses
        self._undo: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._looked: tuple[Any, ...] = ()  # the line and place of the last atomic
        self._looks = 0  # how often in a row

    def program(self, number: int) -> tuple[int, int, int]:
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def find(
        self,
        kind: str,
        argument: Argument,
        place: tuple[str, int],
        program: int | None,
        element: int,
        lanes: int,
        detail: str,
    ) -> Finding:
        at = self.program(program) if program is not None else None
        return Finding(kind, self.kernel, argument.name, *place, at, argument.index(element), lanes, detail)

    # the three kinds of access

    def load(self, pointer: Any, mask: np.ndarray | None, ty: tl.dtype, volatile: bool) -> np.ndarray:
        size = numerics.itemsize(ty)
        shape = pointer.data.shape if mask is None else np.broadcast_shapes(pointer.data.shape, mask.shape)
        out = None
        for part in self._parts(pointer, shape, mask, size, "load"):
            memory = part.argument.buffer.typed(size)
            bits = memory[part.where // size] if len(memory) else np.zeros(part.where.shape, f"u{size}")
            if part.on is not None:
                bits = np.where(part.on, bits, bits.dtype.type(0))
            self._log("load", part, size, volatile=volatile)
            if part.lanes is None:
                out = bits
            else:
                out = np.zeros(shape, f"u{size}") if out is None else out
                out.reshape(-1)[part.lanes] = bits
        return numerics.unpack(np.zeros(shape, f"u{size}") if out is None else out, ty)

    def store(self, pointer: Any, data: np.ndarray, mask: np.ndarray | None, ty: tl.dtype) -> None:
        size = numerics.itemsize(ty)
        shape = self._all_programs(pointer, data, mask)
        bits = np.broadcast_to(numerics.pack(data, ty), shape)
        for part in self._parts(pointer, shape, mask, size, "store"):
            memory, index = self._opened(part, size)
            now, old = part.pick(bits), memory[index]
            memory[index] = now
            lost = memory[index] != now
            if lost.any():
                self._report_lost(part, index, lost, size)
            self._log("store", part, size, changed=old != now)

    def update(
        self,
        pointer: Any,
        value: Any,
        mask: np.ndarray | None,
        change: Callable[..., np.ndarray],
        order: Any,
        scope: Any,
        expected: np.ndarray | None = None,
    ) -> np.ndarray:
        """An atomic read-modify-write; lanes take their turns in the order of programs. Returns what was there.

        `change(old, new)`, or `change(old, new, expected)`, gives what to write.
        """
        ty = pointer.dtype.element_ty
        size = numerics.itemsize(ty)
        shape = self._all_programs(pointer, value.data, mask)
        operands = [np.broadcast_to(value.data, shape)]
        if expected is not None:
            operands.append(np.broadcast_to(expected, shape))
        out = np.zeros(shape, operands[0].dtype)
        for part in self._parts(pointer, shape, mask, size, "atomic"):
            memory, index = self._opened(part, size)
            given = [part.pick(operand) for operand in operands]
            before = np.zeros(len(index), out.dtype)
            changed = np.zeros(len(index), bool)
            for turn in _turns(index):
                old = before[turn] = numerics.unpack(memory[index[turn]], ty)
                bits = numerics.pack(change(old, *[g[turn] for g in given]), ty)
                changed[turn] = memory[index[turn]] != bits
                memory[index[turn]] = bits
            on = part.pick(np.arange(out.size).reshape(shape))
            out.reshape(-1)[on] = before
            self._log("atomic", part, size, changed=changed, order=order, scope=scope)
        return out

    def _all_programs(self, pointer: Any, data: np.ndarray, mask: np.ndarray | None) -> tuple[int, ...]:
        """The shape of a write: each program makes its own, even where all make the same."""
        batch = (len(self.numbers),) + (1,) * (pointer.data.ndim - 1)
        return np.broadcast_shapes(batch, pointer.data.shape, data.shape, () if mask is None else mask.shape)

    def _opened(self, part: Part, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The memory that a part writes and its indices there, with what is needed to undo."""
        memory = part.argument.buffer.typed(size)
        index = (part.where[part.on] if part.on is not None else part.where.reshape(-1)) // size
        self._undo.append((memory, index, memory[index]))
        part.argument.buffer.written |= bool(len(index))
        return memory, index

    def _report_lost(self, part: Part, index: np.ndarray, lost: np.ndarray, size: int) -> None:
        loser = int(np.flatnonzero(lost)[0])
        winner = int(np.flatnonzero(index == index[loser])[-1])
        programs = self._programs(part)
        assert programs is not None
        one, two = int(programs[loser]), int(programs[winner])
        argument = part.argument
        element = (int(index[loser]) * size - argument.first) // argument.size
        who = "two lanes of the program store" if one == two else f"it and program {self.program(two)} store"
        detail = f"{who} different values to {argument.named(element)}"
        self.findings.append(self.find(RACE, argument, here(), one, element, int(lost.sum()), detail))

    def _programs(self, part: Part) -> np.ndarray | None:
        if part.rows is None:
            return None
        rows = np.broadcast_to(part.rows, part.where.shape)
        return self.numbers[rows[part.on] if part.on is not None else rows.reshape(-1)]

    def _log(self, kind: str, part: Part, size: int, **more: Any) -> None:
        where = part.where[part.on] if part.on is not None else part.where.reshape(-1)
        repeats = len(self.numbers) if part.rows is None else 1
        lanes, moved = part.where.size * repeats, sectors(part.where, part.on, size) * repeats
        access = Access(kind, part.argument, size, where, self._programs(part), here(), lanes, moved, **more)
        self.accesses.append(access)
        self.lanes += access.lanes
        if kind != "atomic" and not access.volatile:
            self._looks = 0
            if self.lanes > HELD and self.settle is not None and len(self.numbers) == 1 and not self._looked:
                self.settle()
        elif (access.place, *access.where[:1].tolist()) != self._looked:
            self._looks, self._looked = 0, (access.place, *access.where[:1].tolist())
        else:
            self._looks += 1
            if self._looks > self._patience:
                raise Waiting

    # addresses

    def _parts(self, pointer: Any, shape: tuple[int, ...], mask: np.ndarray | None, size: int, what: str) -> list[Part]:
        """An operation's lanes by the argument they touch, without those that fall outside of it."""
        addresses = np.broadcast_to(pointer.data, shape)
        on = None if mask is None else np.broadcast_to(mask, shape)
        if not addresses.size:
            return []
        one_row = shape[0] == 1 and len(self.numbers) > 1
        rows = None if one_row else np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        if pointer.wrapped is not None:
            addresses, on = self._without_wrapped(pointer, addresses, on, rows)
        low, high = int(addresses.min()), int(addresses.max())
        if low >> SLOT == high >> SLOT and self._known(low >> SLOT):
            parts = [self._part(low >> SLOT, addresses, on, rows, None, size, what, (low, high))]
        else:
            lanes = np.arange(addresses.size) if on is None else np.flatnonzero(on.reshape(-1))
            flat = addresses.reshape(-1)[lanes]
            all_rows = None if rows is None else np.broadcast_to(rows, shape).reshape(-1)[lanes]
            parts = []
            for slot in np.unique(flat >> SLOT):
                own = flat >> SLOT == slot
                if not self._known(int(slot)):
                    self._astray(what, int(own.sum()))
                of_rows = None if all_rows is None else all_rows[own]
                bounds = int(flat[own].min()), int(flat[own].max())
                parts.append(self._part(int(slot), flat[own], None, of_rows, lanes[own], size, what, bounds))
        return parts

    def _known(self, slot: int) -> bool:
        return 0 < slot <= len(self.arguments)

    def _part(self, slot, addresses, on, rows, lanes, size, what, bounds) -> Part:
        argument = self.arguments[slot - 1]
        part = Part(argument, addresses - argument.base, on, rows, lanes)
        low, high = bounds[0] - argument.base, bounds[1] - argument.base + size
        if not argument.dense or low < argument.first or high > argument.end:
            self._keep_inside(part, size, what)
        if size != argument.size and (part.where % size).any():
            file, line = here()
            raise Stopped(f"{file}:{line}: a misaligned {what} of {size} bytes of `{argument.name}`")
        return part

    def _keep_inside(self, part: Part, size: int, what: str) -> None:
        """Accesses outside of the tensor are reported and turned off; all that are off go where they harm nothing."""
        argument, where = part.argument, part.where
        bad = (where < argument.first) | (where + size > argument.end)
        element = (where - argument.first) // argument.size
        if not argument.dense:
            bad |= ~argument.inside[np.where(bad, 0, element)]
        if part.on is not None:
            bad &= part.on
        if bad.any():
            lane = int(np.flatnonzero(bad.reshape(-1))[0])
            row = 0 if part.rows is None else int(np.broadcast_to(part.rows, where.shape).reshape(-1)[lane])
            place = int(element.reshape(-1)[lane])
            repeats = len(self.numbers) if part.rows is None else 1
            detail = f"{what} of {argument.outside(place)}"
            number = int(self.numbers[row])
            self.findings.append(
                self.find(OUT_OF_BOUNDS, argument, here(), number, place, int(bad.sum()) * repeats, detail)
            )
            part.on = ~bad if part.on is None else part.on & ~bad
        if part.on is not None:
            part.where = np.where(part.on, where, argument.first if argument.span else 0)

    def _without_wrapped(self, pointer: Any, addresses: np.ndarray, on: np.ndarray | None, rows: np.ndarray | None):
        """Lanes whose offset wrapped are reported and turned off, wherever they came to lie."""
        wrap = pointer.wrapped
        lanes = np.broadcast_to(wrap.lanes, addresses.shape)
        bad = lanes if on is None else lanes & on
        if not bad.any():
            return addresses, on
        lane = int(np.flatnonzero(bad.reshape(-1))[0])
        row = 0 if rows is None else int(np.broadcast_to(rows, addresses.shape).reshape(-1)[lane])
        slot = int(addresses.reshape(-1)[lane]) >> SLOT
        if not self._known(slot):
            self._astray("access", int(bad.sum()))
        argument = self.arguments[slot - 1]
        element = (int(addresses.reshape(-1)[lane]) - argument.address) // argument.size
        what = f"an offset into `{argument.name}` reached {wrap.value}"
        detail = f"{what} and wrapped around int{wrap.bits}: compute it in int64"
        number, repeats = int(self.numbers[row]), len(self.numbers) if rows is None else 1
        self.findings.append(
            self.find(OVERFLOW, argument, wrap.place, number, element, int(bad.sum()) * repeats, detail)
        )
        return np.where(bad, argument.address, addresses), (~bad if on is None else on & ~bad)

    def _astray(self, what: str, lanes: int) -> None:
        file, line = here()
        raise Stopped(f"{file}:{line}: {what} at an address that came from no tensor argument ({lanes} lanes)")


def sectors(where: np.ndarray, on: np.ndarray | None, size: int) -> int:
    """How many sectors the warps of a program ask for, if neighbouring lanes go along the dimension with the smallest
    stride, as Triton lays them out, each taking as much of a run as 16 bytes hold."""
    if not where.size:
        return 0
    if where.ndim == 1:  # lanes of several arguments, or one a program: nothing is known of their neighbours
        return int(where.size if on is None else on.sum())
    steps = {}
    for dim in range(1, where.ndim):
        if where.shape[dim] > 1:
            pair = where[(0,) * dim + (slice(0, 2),) + (0,) * (where.ndim - dim - 1)]
            steps[dim] = abs(int(pair[1]) - int(pair[0]))
    order = sorted(range(1, where.ndim), key=lambda dim: (-(steps.get(dim) or 2**62), dim))
    lined = where.transpose(0, *order).reshape(where.shape[0], -1)
    step = steps.get(order[-1], size) or size
    vector = 1
    while vector * size < 16 and step == size and int(lined[0, 0]) % (2 * vector * size) == 0:
        vector *= 2
    width = min(32 * vector, lined.shape[1])
    sector = lined.reshape(-1, width) // SECTOR
    if on is not None:
        lanes_on = on.transpose(0, *order).reshape(-1, width)
        sector = np.where(lanes_on, sector, -1)
    if (sector[:, 1:] < sector[:, :-1]).any():
        sector = np.sort(sector, axis=1)
    new = sector[:, 1:] != sector[:, :-1]
    return int(new.sum()) + len(sector) - (int((sector == -1).any(axis=1).sum()) if on is not None else 0)


def _turns(index: np.ndarray) -> list[Any]:
    """Lanes in groups that touch no element twice; an element's lanes keep their order."""
    if len(index) < 2 or len(np.unique(index)) == len(index):
        return [slice(None)]
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    turn = np.arange(len(index)) - np.repeat(starts, np.diff(np.append(starts, len(index))))
    by_turn = order[np.argsort(turn, kind="stable")]
    return np.split(by_turn, np.cumsum(np.bincount(turn))[:-1])


ACQUIRE = {ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE}
RELEASE = {ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE}

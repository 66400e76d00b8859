"""Simulated global memory: loads, stores and atomics of a batch of programs.

Accesses are logged and committed to the AccessLog when the batch has finished; a batch that diverges is rolled back.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter

from tilewright.interpreter import numerics
from tilewright.interpreter.arguments import SLOT_BITS, Argument, Buffer
from tilewright.interpreter.exceptions import LaunchError, Location, SpinWait, current_line
from tilewright.interpreter.lanes import Access, Part, sectors
from tilewright.interpreter.results import OUT_OF_BOUNDS, OVERFLOW, RACE, READ_BEFORE_WRITE, Finding
from tilewright.interpreter.unwritten import FIRST, Source
from tilewright.interpreter.visibility import UnseenStores

MAX_LOGGED_LANES = 2**22  # a program that runs alone commits its accesses when it has logged more
SPIN_LIMIT = 500  # consecutive atomics at one address after which a program counts as waiting for another


class Memory:
    """The arguments of one launch and the accesses that the current batch has made to them."""

    def __init__(self, kernel: str, grid: tuple[int, int, int], initialized: dict[int, np.ndarray]):
        self.kernel = kernel
        self._initialized = initialized  # by address of memory from torch.empty: a mask of the bytes written so far
        self.grid = grid
        self.arguments: list[Argument] = []
        self.buffers: dict[int, Buffer] = {}
        self._resolved: dict[int, int] = {}  # addresses in slots, by real address
        self._live: list[Tensor] | None = None  # every tensor of the process, once a real address is met
        self.programs = np.zeros(1, np.int32)  # indices of the programs in the batch
        self.commit: Callable[[], None] | None = None  # commits the logged accesses of a batch that cannot diverge
        self._spin_limit: float = SPIN_LIMIT
        self._sources: list[Source] = []  # loads of unwritten memory by the batch
        self.unseen = UnseenStores()
        self.clear_log()

    def add(self, name: str, tensor: Tensor) -> Argument:
        key = tensor.untyped_storage().data_ptr() or -1 - len(self.arguments)  # empty storages share address 0
        buffer = self.buffers.get(key) or self.buffers.setdefault(key, Buffer(tensor, self._initialized.get(key)))
        argument = Argument(name, tensor, buffer, len(self.arguments) + 1)
        buffer.unit = min(buffer.unit, argument.itemsize)
        self.arguments.append(argument)
        return argument

    def resolve(self, addresses: np.ndarray) -> np.ndarray:
        """Replace real addresses, as tables of pointers hold them, by addresses of the tensors that lie there."""
        is_real = (addresses >> SLOT_BITS == 0) & (addresses != 0)
        if not is_real.any():
            return addresses
        out = addresses.copy()
        for address in np.unique(addresses[is_real]).tolist():
            if address not in self._resolved:
                self._resolved[address] = self._find(address)
            out[addresses == address] = self._resolved[address]
        return out

    def add_pointer(self, name: str, address: int) -> tuple[Argument, int] | None:
        """Add the tensor that lies at a real address; return it and the address in its slot. None: no tensor does."""
        if self._live is None:
            self._live = [t for t in gc.get_objects() if type(t) in (Tensor, Parameter) and t.device.type != "meta"]
        near = [t for t in self._live if 0 <= address - t.untyped_storage().data_ptr() < t.untyped_storage().nbytes()]
        if not near:
            return None
        tensor = max(near, key=lambda t: (t.data_ptr() == address, t.numel()))  # begins here or, failing that, is large
        argument = self.add(name, tensor)
        return argument, argument.storage_address + address - tensor.untyped_storage().data_ptr()

    def _find(self, address: int) -> int:
        """Return the address in its slot; a real one if no tensor lies there."""
        tables = [a for a in self.arguments if a.itemsize == 8 and a.is_dense]
        found = [(a, np.flatnonzero(a.buffer.typed(8)[a.first_byte // 8 : a.end_byte // 8] == address)) for a in tables]
        name = next((f"*{a.name}[{at[0]}]" for a, at in found if len(at)), f"*{address:#x}")
        added = self.add_pointer(name, address)
        return added[1] if added else address

    def begin(self, programs: np.ndarray, may_spin: bool = False) -> None:
        self.programs = programs
        self._spin_limit = math.inf if may_spin else SPIN_LIMIT
        self._sources = []
        self.unseen.synchronize()
        self.clear_log()

    def changes(self, buffer: Buffer, offsets: np.ndarray) -> bool:
        """Return whether the batch has changed what lies at one of these offsets."""
        return any(
            access.argument.buffer is buffer and bool(np.isin(access.offsets[access.changed], offsets).any())
            for access in self.accesses
            if access.changed is not None
        )

    def roll_back(self) -> None:
        for memory, index, old in reversed(self._undo):
            memory[index] = old
        self.clear_log()

    def clear_log(self) -> None:
        self.accesses: list[Access] = []
        self.findings: list[Finding] = []
        self.lanes = 0  # in `accesses`
        self._undo: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._last_atomic: tuple[Any, ...] = ()  # line and address
        self._repeats = 0  # consecutive repetitions of the last atomic

    def program_id(self, index: Any) -> tuple[Any, Any, Any]:
        x, y, _ = self.grid
        return index % x, index // x % y, index // (x * y)

    def finding(
        self, kind: str, argument: Argument, location: Location, program: int, element: int, lanes: int, detail: str
    ) -> Finding:
        where = (*location, self.program_id(program), argument.index(element))
        return Finding(kind, self.kernel, argument.name, *where, lanes, detail)

    def load(self, pointer: Any, mask: Any, ty: tl.dtype, volatile: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the values and their poison."""
        itemsize = numerics.itemsize(ty)
        shape = pointer.data.shape if mask is None else np.broadcast_shapes(pointer.data.shape, mask.data.shape)
        out = poison = None
        for part in self._parts(pointer, shape, mask, itemsize, "load"):
            memory = part.argument.buffer.typed(itemsize)
            index = part.offsets // itemsize
            bits = memory[index] if len(memory) else np.zeros(part.offsets.shape, f"u{itemsize}")
            if part.mask is not None:
                bits = np.where(part.mask, bits, bits.dtype.type(0))
            unwritten = self._poison(part, index, itemsize)
            self._report_missed_stores(part, itemsize)
            self._log("load", part, itemsize, volatile=volatile)
            if part.lanes is None:
                out, poison = bits, unwritten
                continue
            out = np.zeros(shape, f"u{itemsize}") if out is None else out
            out.reshape(-1)[part.lanes] = bits
            if unwritten is not None:
                poison = np.zeros(shape, np.int64) if poison is None else poison
                poison.reshape(-1)[part.lanes] = unwritten
        return numerics.unpack(np.zeros(shape, f"u{itemsize}") if out is None else out, ty), poison

    def store(self, pointer: Any, value: Any, mask: Any, ty: tl.dtype) -> None:
        itemsize = numerics.itemsize(ty)
        shape = self._all_programs(pointer, value, mask)
        self.use(value.poison, "store", mask)
        bits = np.broadcast_to(numerics.pack(value.data, ty), shape)
        for part in self._parts(pointer, shape, mask, itemsize, "store"):
            memory, index = self._writable(part, itemsize)
            now, old = part.select(bits), memory[index]
            memory[index] = now
            lost = memory[index] != now
            if lost.any():
                self._report_conflicting_store(part, index, lost, itemsize)
            changed = (old != now) | self._mark_written(part, index, itemsize)
            programs = self._programs(part)
            assert programs is not None
            self.unseen.add(part, itemsize, programs, changed, current_line())
            self._log("store", part, itemsize, changed=changed)

    def atomic(
        self,
        pointer: Any,
        value: Any,
        mask: Any,
        update: Callable[..., np.ndarray],
        order: Any,
        scope: Any,
        expected: Any = None,
    ) -> np.ndarray:
        """Perform an atomic read-modify-write and return the old values; lanes take turns in program order.

        `update(old, new)`, or `update(old, new, expected)`, returns the value to write.
        """
        ty = pointer.dtype.element_ty
        itemsize = numerics.itemsize(ty)
        self.unseen.synchronize()
        shape = self._all_programs(pointer, value, mask)
        handles = [value] if expected is None else [value, expected]
        for handle in handles:
            self.use(handle.poison, "atomic", mask)
        operands = [np.broadcast_to(handle.data, shape) for handle in handles]
        out = np.zeros(shape, operands[0].dtype)
        for part in self._parts(pointer, shape, mask, itemsize, "atomic"):
            self.use(self._poison(part, part.offsets // itemsize, itemsize), "atomic")
            memory, index = self._writable(part, itemsize)
            active = [part.select(operand) for operand in operands]
            before = np.zeros(len(index), out.dtype)
            changed = np.zeros(len(index), bool)
            for group in _conflict_free_groups(index):
                old = before[group] = numerics.unpack(memory[index[group]], ty)
                bits = numerics.pack(update(old, *[operand[group] for operand in active]), ty)
                changed[group] = memory[index[group]] != bits
                memory[index[group]] = bits
            self._mark_written(part, index, itemsize)
            out.reshape(-1)[part.select(np.arange(out.size).reshape(shape))] = before
            self._log("atomic", part, itemsize, changed=changed, order=order, scope=scope)
        return out

    def use(self, poison: np.ndarray | None, what: str, mask: Any = None) -> None:
        """Report the loads of unwritten memory that reach a store, an address or a branch in an active lane."""
        if poison is None:
            return
        if mask is not None:
            poison = np.where(mask.data, poison, 0)
        lanes = np.unique(poison[poison < 0])
        if not len(lanes):
            return
        sources = np.searchsorted([source.first for source in self._sources], lanes, side="right") - 1
        for number in np.unique(sources):
            source = self._sources[number]
            if not source.is_reported:
                source.is_reported = True
                self._report_poison(source, int(lanes[sources == number][0]) - source.first, what)

    def _report_poison(self, source: Source, lane: int, what: str) -> None:
        part, argument = source.part, source.part.argument
        element = (int(part.offsets.reshape(-1)[lane]) - argument.first_byte) // argument.itemsize
        row = 0 if part.rows is None else int(np.broadcast_to(part.rows, part.offsets.shape).reshape(-1)[lane])
        detail = f"{argument.describe(element)}, which has not been written"
        file, line = use = current_line()
        if use == source.location and what == "atomic":
            detail = f"atomic of {detail}"
        else:
            where = f"line {line}" if file == source.location[0] else f"{file}:{line}"
            detail = f"load of {detail}, reaches the {what} in {where}"
        found = self.finding(
            READ_BEFORE_WRITE, argument, source.location, int(self.programs[row]), element, source.lanes, detail
        )
        self.findings.append(found)

    def _poison(self, part: Part, index: np.ndarray, itemsize: int) -> np.ndarray | None:
        """Return the poison of what a part reads, and number its lanes."""
        unwritten = part.argument.buffer.unwritten(index, itemsize)
        if unwritten is not None and part.mask is not None:
            unwritten = unwritten & part.mask
        if unwritten is None or not unwritten.any():
            return None
        first = self._sources[-1].first + self._sources[-1].part.offsets.size if self._sources else FIRST
        self._sources.append(Source(first, part, current_line(), int(unwritten.sum())))
        return np.where(unwritten, first + np.arange(unwritten.size).reshape(unwritten.shape), 0)

    def _mark_written(self, part: Part, index: np.ndarray, itemsize: int) -> np.ndarray | bool:
        """Mark elements as written, until a roll-back, and return which of them were not written before."""
        buffer = part.argument.buffer
        if (unwritten := buffer.unwritten(index, itemsize)) is None:
            return False
        initialized = buffer.initialized
        assert initialized is not None
        written = initialized[: len(initialized) // itemsize * itemsize].view(f"u{itemsize}")
        self._undo.append((written, index, written[index]))
        written[index] = np.frombuffer(b"\1" * itemsize, written.dtype)[0]
        return unwritten

    def _all_programs(self, pointer: Any, value: Any, mask: Any) -> tuple[int, ...]:
        """Return the shape of a write with one row per program, even if all programs write the same."""
        batch = (len(self.programs),) + (1,) * (pointer.data.ndim - 1)
        return np.broadcast_shapes(batch, pointer.data.shape, value.data.shape, () if mask is None else mask.data.shape)

    def _writable(self, part: Part, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the memory that a part writes and the indices there, and save the old values for a roll-back."""
        memory = part.argument.buffer.typed(itemsize)
        index = (part.offsets[part.mask] if part.mask is not None else part.offsets.reshape(-1)) // itemsize
        self._undo.append((memory, index, memory[index]))
        part.argument.buffer.written |= bool(len(index))
        return memory, index

    def _report_conflicting_store(self, part: Part, index: np.ndarray, lost: np.ndarray, itemsize: int) -> None:
        loser = int(np.flatnonzero(lost)[0])
        winner = int(np.flatnonzero(index == index[loser])[-1])
        programs = self._programs(part)
        assert programs is not None
        one, two = int(programs[loser]), int(programs[winner])
        argument = part.argument
        element = (int(index[loser]) * itemsize - argument.first_byte) // argument.itemsize
        who = "two lanes of one program" if one == two else f"this program and program {self.program_id(two)}"
        detail = f"{who} store different values to {argument.describe(element)}"
        self.findings.append(self.finding(RACE, argument, current_line(), one, element, int(lost.sum()), detail))

    def _report_missed_stores(self, part: Part, itemsize: int) -> None:
        if not self.unseen.may_miss(part):
            return
        programs, argument = self._programs(part), part.argument
        missed = self.unseen.missed(part, itemsize, programs, current_line())
        if missed is None:
            return
        lanes, line = missed
        lane = int(np.flatnonzero(lanes)[0])
        program = int(self.programs[0] if programs is None else programs[lane])
        element = (int(part.select(part.offsets)[lane]) - argument.first_byte) // argument.itemsize
        what = f"reads {argument.describe(element)}, which another warp of the program stores in line {line}"
        detail = f"{what}, without tl.debug_barrier in between"
        self.findings.append(self.finding(RACE, argument, current_line(), program, element, int(lanes.sum()), detail))

    def _programs(self, part: Part) -> np.ndarray | None:
        if part.rows is None:
            return None
        rows = np.broadcast_to(part.rows, part.offsets.shape)
        return self.programs[rows[part.mask] if part.mask is not None else rows.reshape(-1)]

    def _log(self, kind: str, part: Part, itemsize: int, **more: Any) -> None:
        offsets = part.offsets[part.mask] if part.mask is not None else part.offsets.reshape(-1)
        repeats = len(self.programs) if part.rows is None else 1
        lanes, moved = part.offsets.size * repeats, sectors(part.offsets, part.mask, itemsize) * repeats
        programs = self._programs(part)
        access = Access(kind, part.argument, itemsize, offsets, programs, current_line(), lanes, moved, **more)
        self.accesses.append(access)
        self.lanes += access.lanes
        if kind != "atomic" and not access.volatile:
            self._repeats = 0
            alone = len(self.programs) == 1 and not self._last_atomic
            if self.lanes > MAX_LOGGED_LANES and self.commit is not None and alone:
                self.commit()
        elif (atomic := (access.location, *access.offsets[:1].tolist())) != self._last_atomic:
            self._repeats, self._last_atomic = 0, atomic
        else:
            self._repeats += 1
            if self._repeats > self._spin_limit:
                raise SpinWait(part.argument.buffer, access.offsets)

    def _parts(self, pointer: Any, shape: tuple[int, ...], mask: Any, itemsize: int, kind: str) -> list[Part]:
        """Split an operation's lanes by the argument they access, and mask the lanes that are out of bounds."""
        addresses = np.broadcast_to(pointer.data, shape)
        if mask is not None:
            self.use(mask.poison, "mask")
            mask = np.broadcast_to(mask.data, shape)
        if not addresses.size:
            return []
        same_for_all = shape[0] == 1 and len(self.programs) > 1
        rows = None if same_for_all else np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        if pointer.poison is not None:
            addresses, mask = self._mask_poisoned(pointer, addresses, mask)
        if pointer.wrapped is not None:
            addresses, mask = self._mask_wrapped(pointer, addresses, mask, rows)
        low, high = int(addresses.min()), int(addresses.max())
        if low >> SLOT_BITS == high >> SLOT_BITS and self._is_slot(low >> SLOT_BITS):
            return [self._part(low >> SLOT_BITS, addresses, mask, rows, None, itemsize, kind, (low, high))]
        lanes = np.arange(addresses.size) if mask is None else np.flatnonzero(mask.reshape(-1))
        flat = addresses.reshape(-1)[lanes]
        all_rows = None if rows is None else np.broadcast_to(rows, shape).reshape(-1)[lanes]
        parts = []
        for slot in np.unique(flat >> SLOT_BITS):
            own = flat >> SLOT_BITS == slot
            if not self._is_slot(int(slot)):
                self._raise_unmapped(kind, int(own.sum()))
            own_rows = None if all_rows is None else all_rows[own]
            bounds = int(flat[own].min()), int(flat[own].max())
            parts.append(self._part(int(slot), flat[own], None, own_rows, lanes[own], itemsize, kind, bounds))
        return parts

    def _is_slot(self, slot: int) -> bool:
        return 0 < slot <= len(self.arguments)

    def _part(self, slot, addresses, mask, rows, lanes, itemsize, kind, bounds) -> Part:
        argument = self.arguments[slot - 1]
        part = Part(argument, addresses - argument.storage_address, mask, rows, lanes)
        low, high = bounds[0] - argument.storage_address, bounds[1] - argument.storage_address + itemsize
        if not argument.is_dense or low < argument.first_byte or high > argument.end_byte:
            self._mask_out_of_bounds(part, itemsize, kind)
        if itemsize != argument.itemsize and (part.offsets % itemsize).any():
            file, line = current_line()
            raise LaunchError(f"{file}:{line}: misaligned {itemsize}-byte {kind} in `{argument.name}`")
        return part

    def _mask_out_of_bounds(self, part: Part, itemsize: int, kind: str) -> None:
        """Report and mask the lanes outside of the tensor, and point all masked lanes at its first element."""
        argument, offsets = part.argument, part.offsets
        bad = (offsets < argument.first_byte) | (offsets + itemsize > argument.end_byte)
        elements = (offsets - argument.first_byte) // argument.itemsize
        if not argument.is_dense:
            for step in range(max(1, itemsize // argument.itemsize)):  # a wide access covers several elements
                bad |= ~argument.occupied[np.where(bad, 0, elements + step)]
        if part.mask is not None:
            bad &= part.mask
        if bad.any():
            lane, program, count = self._first_of(bad, part.rows)
            element = int(elements.reshape(-1)[lane])
            detail = f"{kind} of {argument.describe_outside(element, itemsize)}"
            self.findings.append(self.finding(OUT_OF_BOUNDS, argument, current_line(), program, element, count, detail))
            part.mask = ~bad if part.mask is None else part.mask & ~bad
        if part.mask is not None:
            part.offsets = np.where(part.mask, offsets, argument.first_byte if argument.span else 0)

    def _mask_poisoned(
        self, pointer: Any, addresses: np.ndarray, mask: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Report and mask the lanes whose address derives from unwritten memory."""
        poison = np.broadcast_to(pointer.poison, addresses.shape)
        self.use(poison if mask is None else np.where(mask, poison, 0), "address")
        clean = poison == 0
        return np.where(clean, addresses, self.arguments[0].address), clean if mask is None else mask & clean

    def _mask_wrapped(
        self, pointer: Any, addresses: np.ndarray, mask: np.ndarray | None, rows: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Report and mask the lanes whose offset wrapped around, wherever it points now."""
        wrap = pointer.wrapped
        lanes = np.broadcast_to(wrap.lanes, addresses.shape)
        bad = lanes if mask is None else lanes & mask
        if not bad.any():
            return addresses, mask
        lane, program, count = self._first_of(bad, rows)
        slot = int(addresses.reshape(-1)[lane]) >> SLOT_BITS
        if not self._is_slot(slot):
            self._raise_unmapped("access", int(bad.sum()))
        argument = self.arguments[slot - 1]
        element = (int(addresses.reshape(-1)[lane]) - argument.address) // argument.itemsize
        reached = f"an offset into `{argument.name}` reached {wrap.value}"
        detail = f"{reached} and wrapped around int{wrap.bits}: compute it in int64"
        self.findings.append(self.finding(OVERFLOW, argument, wrap.location, program, element, count, detail))
        return np.where(bad, argument.address, addresses), (~bad if mask is None else mask & ~bad)

    def _first_of(self, bad: np.ndarray, rows: np.ndarray | None) -> tuple[int, int, int]:
        """Return the first bad lane, its program, and the number of bad lanes over all programs."""
        lane = int(np.flatnonzero(bad.reshape(-1))[0])
        if rows is None:
            return lane, int(self.programs[0]), int(bad.sum()) * len(self.programs)
        row = int(np.broadcast_to(rows, bad.shape).reshape(-1)[lane])
        return lane, int(self.programs[row]), int(bad.sum())

    def _raise_unmapped(self, kind: str, lanes: int) -> None:
        file, line = current_line()
        raise LaunchError(f"{file}:{line}: {kind} at an address outside of every tensor argument ({lanes} lanes)")


def _conflict_free_groups(index: np.ndarray) -> list[Any]:
    """Split lanes into groups that access no element twice; the lanes of one element keep their order."""
    if len(index) < 2 or len(np.unique(index)) == len(index):
        return [slice(None)]
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    turn = np.arange(len(index)) - np.repeat(starts, np.diff(np.append(starts, len(index))))
    by_turn = order[np.argsort(turn, kind="stable")]
    return np.split(by_turn, np.cumsum(np.bincount(turn))[:-1])

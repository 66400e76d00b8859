"""Gluon's IR builder implemented with NumPy: the operations that Triton's does not have."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._semantic import GluonCallerContext

from tilewright.interpreter import numerics
from tilewright.interpreter.builder import ACTIVE, Builder
from tilewright.interpreter.exceptions import UnsupportedFeature
from tilewright.interpreter.gluon.layouts import LayoutRules
from tilewright.interpreter.gluon.machine import Machine
from tilewright.interpreter.gluon.order import COPY, MMA, STORE, Event, Partition
from tilewright.interpreter.gluon.shared import View
from tilewright.interpreter.tensors import per_program, uniform_value
from tilewright.interpreter.values import DescriptorHandle, Handle


class Accumulator(Handle):
    """The result of a wgmma that may be in flight."""

    __slots__ = ("_event", "_machine", "_value")

    def __init__(self, value: Handle, machine: Machine, event: Event):
        self._machine, self._event = machine, event
        super().__init__(value.data, value.dtype)
        self.poison, self.layout = value.poison, value.layout

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        self._machine.check_accumulator(self._event)
        return self._value

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._value = value

    def has_finished(self, partition: Partition) -> bool:
        return self._event.happened_before(partition)

    @property
    def finished(self) -> Handle:
        """The value, once the wgmma has finished; registers of one that is in flight may feed the next."""
        value = Handle(self._value, self.dtype)
        value.poison, value.layout = self.poison, self.layout
        return value


class GluonBuilder(Builder):
    """The methods that Gluon's semantic layer calls."""

    machine: Machine

    @functools.cached_property
    def rules(self) -> LayoutRules:
        return LayoutRules()

    @property
    def generator(self) -> Any:  # type: ignore[override]
        return self

    @property
    def caller_context(self) -> GluonCallerContext:
        return GluonCallerContext(self.machine.current.warps)

    def begin(self, programs: np.ndarray, steps: int) -> None:
        super().begin(programs, steps)
        self.machine = Machine(self.memory, self.options.num_warps)

    def end(self) -> None:
        self.machine.finish()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("create_", "get_")):
            raise UnsupportedFeature(f"Gluon's {ACTIVE.calling}")
        raise AttributeError(name)

    # Types and layouts

    def block_type(self, element: tl.dtype, shape: list[int], layout: Any) -> tl.block_type:
        return gl.distributed_type(element, shape, layout)

    def get_distributed_ty(self, element: tl.dtype, shape: list[int], layout: Any) -> tl.block_type:
        return tl.block_type(element, shape)

    def get_shared_mem_desc_ty(self, element: tl.dtype, shape: list[int], layout: Any, alloc_shape: Any) -> View:
        index = np.broadcast_to(np.zeros((), np.int64), shape)  # a view of no memory has the type of others
        form = element.name, layout, tuple(shape[-2:])  # determines where elements lie
        return View(None, element, index, "", form)  # type: ignore[arg-type]

    def get_tensor_descriptor_layout_type(self, block: tl.block_type, is_signed: bool, layout: Any) -> tl.block_type:
        return block

    def get_gluon_layout_from_tensor(self, value: Handle) -> Any:
        return value.layout

    def get_gluon_layout_from_memdesc(self, view: View) -> Any:
        return view.layout

    def is_convert_layout_trivial(self, ty: Any, value: Handle) -> bool:
        return True  # the compiler has accepted the kernel

    def layout_of_reduction(self, value: Handle, axis: int) -> Any:
        return self._inferred("reduce", value, axis) if value.data.ndim > 2 else None

    def _inferred(self, operation: str, value: Handle, *params: Any) -> Any:
        return self.rules.of_tensor(operation, value.layout, value.data.shape[1:], *params)

    # Tensors

    def _with_layout(self, value: Handle, layout: Any) -> Handle:
        out = self._reshaped(value, lambda x: x)
        out.layout = layout
        return out

    def create_convert_layout(self, ty: Any, value: Handle) -> Handle:
        return self._reshaped(value, lambda x: x)

    def create_set_auto_layout(self, layout: Any, value: Handle) -> Handle:
        return self._reshaped(value, lambda x: x)

    def create_broadcast(self, value: Handle, shape: Any) -> Handle:
        return super().create_broadcast(value, getattr(shape, "shape", shape))  # Gluon passes a type

    def create_expand_dims(self, value: Handle, axis: int) -> Handle:
        out = super().create_expand_dims(value, axis)
        out.layout = self._inferred("expand_dims", value, axis)
        return out

    def create_reshape(self, value: Handle, shape: list[int], can_reorder: bool) -> Handle:
        out = super().create_reshape(value, shape, can_reorder)
        out.layout = self._inferred("reshape", value, tuple(int(s) for s in shape), can_reorder)
        return out

    def create_trans(self, value: Handle, order: list[int]) -> Handle:
        out = super().create_trans(value, order)
        out.layout = self._inferred("trans", value, tuple(int(d) for d in order))
        return out

    def create_join(self, a: Handle, b: Handle) -> Handle:
        out = super().create_join(a, b)
        out.layout = self._inferred("join", a)
        return out

    def create_split(self, value: Handle) -> tuple[Handle, Handle]:
        parts = super().create_split(value)
        for part in parts:
            part.layout = self._inferred("split", value)
        return parts

    def create_histogram(self, value: Handle, bins: int, mask: Handle | None, layout: Any = None) -> Handle:
        return super().create_histogram(value, bins, mask)

    def create_cat(self, a: Handle, b: Handle, ty: Any = None) -> Handle:
        return super().create_cat(a, b)

    # Shared memory

    def create_local_alloc(self, ty: View, value: Handle | None = None) -> View:
        self.tick()
        view = self.machine.allocate(ty.dtype, list(ty.shape))
        view.form = ty.form
        if value is not None:
            self.create_local_store(view, value)
        return view

    def create_local_dealloc(self, view: View) -> None:
        self.tick()

    def create_local_load(self, ty: Any, view: View) -> Handle:
        return self._loaded(*self.machine.load(view), view.dtype)

    def create_local_store(self, view: View, value: Handle) -> None:
        self.tick()
        self.machine.store(view, _bits(value, view), value.poison)

    def _loaded(self, bits: np.ndarray, poison: np.ndarray | None, ty: tl.dtype) -> Handle:
        out = self._make(numerics.unpack(bits, ty), ty)
        out.poison = poison
        return out

    def create_memdesc_index(self, ty: View, view: View, index: Handle) -> View:
        self.tick()
        i, length = self._scalar(index), view.shape[0]
        out = view.at(np.asarray(view.index[i % length]), f"{view.name}[{i}]")
        if not 0 <= i < length:
            out.outside = f"index {i} of `{view.name}`, whose first dimension has {length} elements"
        return out

    def create_memdesc_subslice(self, ty: View, view: View, offsets: list[int]) -> View:
        self.tick()
        parts = [slice(o, o + s) for o, s in zip(offsets, ty.shape, strict=True)]
        for part, size in zip(parts, view.shape, strict=True):
            if part.start < 0 or part.stop > size:
                raise ValueError(
                    f"slice {part.start}:{part.stop} of `{view.name}`, whose dimension has {size} elements"
                )
        changed = [
            f"{p.start}:{p.stop}" if p.stop - p.start < s else ":" for p, s in zip(parts, view.shape, strict=True)
        ]
        return view.at(view.index[tuple(parts)], f"{view.name}[{', '.join(changed)}]")

    def create_memdesc_trans(self, view: View, order: list[int]) -> View:
        self.tick()
        out = view.at(view.index.transpose(order), view.name)
        out.layout = self.rules.of_buffer("trans", view.layout, view.shape, view.dtype, tuple(order))
        return out

    def create_memdesc_reshape(self, view: View, shape: list[int]) -> View:
        self.tick()
        out = view.at(view.index.reshape(shape), view.name)
        out.layout = self.rules.of_buffer("reshape", view.layout, view.shape, view.dtype, tuple(shape))
        return out

    def create_memdesc_reinterpret(self, ty: View, view: View) -> View:
        self.tick()
        size = numerics.itemsize(ty.dtype)
        start = int(view.index.min()) * numerics.itemsize(view.dtype)
        nbytes = math.prod(ty.shape) * size
        available = view.allocation.bytes.shape[1] - start
        if nbytes > available or start % size:
            raise ValueError(f"_reinterpret needs {nbytes} bytes, and `{view.name}` has {available}")
        index = (start // size + np.arange(math.prod(ty.shape))).reshape(ty.shape)
        return View(view.allocation, ty.dtype, index, view.name, ty.form)

    # Asynchronous copies by warps

    def create_async_copy_global_to_local(self, view: View, pointer: Handle, mask: Any, other: Any, *_: Any) -> None:
        value = self.create_masked_load(pointer, mask if isinstance(mask, Handle) else None, None, False)
        self.machine.copy_by_warps(view, _bits(value, view), value.poison)

    def create_async_commit_group(self) -> None:
        self.tick()
        self.machine.commit_copies()

    def create_async_wait_group(self, outstanding: int) -> None:
        self.tick()
        self.machine.current.wait(COPY, outstanding)

    # Barriers

    def create_mbarrier_init(self, view: View, count: int) -> None:
        self.tick()
        self.machine.init_barrier(view, count)

    def create_mbarrier_inval(self, view: View) -> None:
        self.tick()
        self.machine.invalidate_barrier(view)

    def create_mbarrier_expect(self, view: View, nbytes: int, pred: Handle) -> None:
        self.tick()
        if self._scalar(pred):
            self.machine.arrive(view, 1, nbytes)

    def create_mbarrier_arrive(self, view: View, count: int, pred: Handle) -> None:
        self.tick()
        if self._scalar(pred):
            self.machine.arrive(view, count)

    def create_mbarrier_wait(self, view: View, phase: Handle, pred: Handle, deps: list[Any]) -> None:
        self.tick()
        if self._scalar(pred):
            self.machine.wait(view, self._scalar(phase) & 1)

    def create_fence_async_shared(self, cluster: bool) -> None:
        self.tick()
        self.machine.current.fence()

    # TMA

    def create_make_tensor_descriptor(  # type: ignore[override]
        self, ty: Any, base: Handle, shape: list[Handle], strides: list[Handle], padding: Any
    ) -> DescriptorHandle:
        block = [int(s) for s in ty.shape]
        return super().create_make_tensor_descriptor(base, shape, strides, block, False, padding)

    def create_async_tma_copy_global_to_local(
        self, descriptor: DescriptorHandle, coordinates: list[Handle], barrier: View, view: View, pred: Handle
    ) -> None:
        if not self._scalar(pred):
            return
        value = self.create_descriptor_load(descriptor, coordinates)
        self.machine.copy_into(view, _bits(value, view), value.poison, self.machine.barrier(barrier))

    def create_async_tma_copy_local_to_global(
        self, descriptor: DescriptorHandle, coordinates: list[Handle], view: View
    ) -> None:
        value = self._loaded(*self.machine.load_for_store(view), view.dtype)
        self.create_descriptor_store(descriptor, value, coordinates)

    def create_async_tma_store_wait(self, outstanding: int) -> None:
        self.tick()
        self.machine.current.wait(STORE, outstanding)

    # wgmma

    def create_warpgroup_mma(
        self, a: Any, b: View, acc: Handle, use_acc: Handle, precision: Any, imprecise: int, is_async: bool
    ) -> Handle:
        event: Event | None = None
        operands: list[Handle] = []
        for operand in (a, b):
            if isinstance(operand, View):
                bits, poison, event = self.machine.load_for_mma(operand, event)
                operand = self._loaded(bits, poison, operand.dtype)
            operands.append(operand)
        assert event is not None  # b lies in shared memory
        start = acc.finished if isinstance(acc, Accumulator) else acc
        if not per_program(use_acc).all():
            keep = use_acc.data.reshape(-1, *[1] * (start.data.ndim - 1))
            zero = Handle(np.zeros_like(start.data), start.dtype)
            start = self.create_select(Handle(keep, tl.int1), start, zero)
        result = self.create_dot(operands[0], operands[1], start, precision, imprecise)
        if is_async:
            return Accumulator(result, self.machine, event)
        self.machine.current.wait(MMA)
        return result

    def create_warpgroup_mma_wait(self, deps: list[Any], outstanding: int) -> list[Any]:
        self.tick()
        partition = self.machine.current
        partition.wait(MMA, outstanding)
        return [d.finished if isinstance(d, Accumulator) and d.has_finished(partition) else d for d in deps]

    def _scalar(self, value: Handle) -> Any:
        """Return the value that all programs of the batch have in common, or raise Diverged."""
        return uniform_value(per_program(value))


def _bits(value: Handle, view: View) -> np.ndarray:
    return numerics.pack(np.broadcast_to(value.data, (value.data.shape[0], *view.shape)), view.dtype)


_LAYOUTS = (
    "auto", "coalesced", "blocked", "slice", "distributed_linear", "dot_operand", "mma", "nvmma_shared",
    "swizzled_shared", "padded_shared", "shared_linear",
)  # fmt: skip


def _layout(kind: str) -> Callable[..., Any]:
    return lambda self, *args: (kind, repr(args))


for _kind in _LAYOUTS:
    setattr(GluonBuilder, f"get_{_kind}_layout", _layout(_kind))

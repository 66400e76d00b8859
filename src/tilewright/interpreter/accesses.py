"""Loads, stores and atomics, through pointers, block pointers and descriptors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from tilewright.interpreter import numerics, unwritten
from tilewright.interpreter.exceptions import DeviceError, UnsupportedFeature
from tilewright.interpreter.values import BlockPointer, DescriptorHandle, Handle, Operations, Wrap


class Accesses(Operations):
    """Pointer arithmetic and accesses, which `memory` checks and carries out."""

    create_add: Callable[..., Any]  # in Arithmetic

    def create_addptr(self, pointer: Handle, offset: Handle) -> Handle:
        size = numerics.itemsize(pointer.dtype.element_ty)
        wrapped = Wrap.of(pointer, offset)
        return self._make(pointer.data + offset.data.astype(np.int64) * size, pointer, None, wrapped)

    def create_load(self, pointer: Handle, *policy: Any) -> Handle:
        return self.create_masked_load(pointer, None, None, *policy)

    def create_masked_load(self, pointer: Handle, mask: Handle | None, other: Handle | None, *policy: Any) -> Handle:
        ty = pointer.dtype.element_ty
        data, loaded = self.memory.load(pointer, mask, ty, volatile=bool(policy[-1]))
        if mask is not None:
            data = np.where(mask.data, data, other.data if other is not None else data.dtype.type(0))
        out = self._make(self.memory.resolve(data) if ty.is_ptr() else data, _signless(ty))
        out.poison = unwritten.joined(loaded, unwritten.selected(mask, None, other) if mask is not None else None)
        self.has_poison |= loaded is not None
        return out

    def create_store(self, pointer: Handle, value: Handle, *policy: Any) -> None:
        self.create_masked_store(pointer, value, None, *policy)

    def create_masked_store(self, pointer: Handle, value: Handle, mask: Handle | None, *policy: Any) -> None:
        self.tick()
        self.memory.store(pointer, value, mask, pointer.dtype.element_ty)

    def create_atomic_rmw(self, op, pointer: Handle, value: Handle, mask: Handle, order: Any, scope: Any) -> Handle:
        update = _atomic_update(op.name, value.dtype)
        return self._make(self.memory.atomic(pointer, value, mask, update, order, scope), value)

    def create_atomic_cas(self, pointer: Handle, expected: Handle, value: Handle, order: Any, scope: Any) -> Handle:
        def swap(old: np.ndarray, new: np.ndarray, wanted: np.ndarray) -> np.ndarray:
            same = numerics.pack(old, value.dtype) == numerics.pack(wanted, value.dtype)
            return np.where(same, new, old)

        return self._make(self.memory.atomic(pointer, value, None, swap, order, scope, expected), value)

    def create_atomic_load(self, pointer: Handle, mask: Handle | None, order: Any, scope: Any) -> Handle:
        return self.create_masked_load(pointer, mask, None, True)

    def create_atomic_store(self, pointer: Handle, value: Handle, mask: Handle | None, order: Any, scope: Any) -> None:
        self.memory.atomic(pointer, value, mask, lambda old, new: new, order, scope)

    def create_atomic_poll(self, *args: Any) -> Handle:
        raise UnsupportedFeature("tl.atomic_poll")

    # Block pointers and descriptors

    def create_make_block_ptr(self, base, shape, strides, offsets, block, order) -> BlockPointer:
        return BlockPointer(base, shape, strides, offsets, block)

    def create_advance(self, pointer: BlockPointer, offsets: list[Handle]) -> BlockPointer:
        return replace(pointer, offsets=[self.create_add(a, b) for a, b in zip(pointer.offsets, offsets, strict=True)])

    def create_tensor_pointer_load(self, pointer: BlockPointer, check, padding, *policy: Any) -> Handle:
        addresses, mask = self._addresses(pointer, pointer.offsets, check)
        return self.create_masked_load(addresses, mask, _padding(padding, addresses.dtype.element_ty), *policy)

    def create_tensor_pointer_store(self, pointer: BlockPointer, value: Handle, check, *policy: Any) -> None:
        addresses, mask = self._addresses(pointer, pointer.offsets, check)
        self.create_masked_store(addresses, value, mask, *policy)

    def create_make_tensor_descriptor(self, base, shape, strides, block, is_signed, padding) -> DescriptorHandle:
        size = numerics.itemsize(base.dtype.element_ty)
        if (base.data % 16).any():
            raise DeviceError("the base of a tensor descriptor must be aligned to 16 bytes")
        if any((stride.data * size % 16).any() for stride in strides[:-1]):
            raise DeviceError("the strides of a tensor descriptor must be multiples of 16 bytes")
        return DescriptorHandle(base, shape, strides, [int(b) for b in block], padding)

    def create_descriptor_load(self, descriptor: DescriptorHandle, offsets: list[Handle], *policy: Any) -> Handle:
        addresses, mask = self._addresses(descriptor, offsets, range(len(offsets)))
        other = _padding(descriptor.padding, addresses.dtype.element_ty)
        loaded = self.create_masked_load(addresses, mask, other, False)
        if descriptor.round_to_tf32 and loaded.dtype.is_fp32():
            return self._make(numerics.to_tf32(loaded.data), loaded)
        return loaded

    def create_descriptor_store(self, descriptor: DescriptorHandle, value: Handle, offsets: list[Handle]) -> None:
        addresses, mask = self._addresses(descriptor, offsets, range(len(offsets)))
        self.create_masked_store(addresses, value, mask)

    def create_descriptor_reduce(self, kind: Any, descriptor: DescriptorHandle, value: Handle, offsets) -> None:
        addresses, mask = self._addresses(descriptor, offsets, range(len(offsets)))
        update = _atomic_update(kind.name, descriptor.base.dtype.element_ty)
        self.memory.atomic(addresses, value, mask, update, ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU)

    def create_descriptor_gather(self, descriptor: DescriptorHandle, rows: Handle, column: Handle, ty) -> Handle:
        addresses, mask = self._addresses(descriptor, [rows, column], (0, 1), rows=True)
        return self.create_masked_load(addresses, mask, _padding(descriptor.padding, addresses.dtype.element_ty), False)

    def create_descriptor_scatter(self, descriptor: DescriptorHandle, value: Handle, rows: Handle, column: Handle):
        addresses, mask = self._addresses(descriptor, [rows, column], (0, 1), rows=True)
        self.create_masked_store(addresses, value, mask)

    def _addresses(self, block: BlockPointer | DescriptorHandle, offsets: list[Handle], check, rows=False):
        """Return the addresses of a block and a mask of those inside the shape in the dimensions to check."""
        for handle in (block.base, *block.shape, *block.strides, *offsets):
            self.memory.use(handle.poison, "address")
        size = numerics.itemsize(block.base.dtype.element_ty)
        rank = len(block.block)
        address = block.base.data.reshape(-1, *[1] * rank)
        mask: np.ndarray = np.ones((1,) * (rank + 1), bool)
        for dim in range(rank):
            side = [1] * rank
            if rows and dim == 0:  # a gather or scatter has one index per row
                index = offsets[0].data.astype(np.int64).reshape(offsets[0].data.shape[0], -1, 1)
            else:
                side[dim] = block.block[dim]
                start = offsets[dim].data.astype(np.int64).reshape(-1, *[1] * rank)
                index = start + np.arange(block.block[dim]).reshape(1, *side)
            address = address + index * block.strides[dim].data.astype(np.int64).reshape(-1, *[1] * rank) * size
            if dim in check:
                mask = mask & (index >= 0) & (index < block.shape[dim].data.reshape(-1, *[1] * rank))
        mask = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, address.shape))
        return Handle(address, block.base.dtype), Handle(mask, tl.int1)


def _signless(ty: tl.dtype) -> tl.dtype:
    return getattr(tl, str(ty.name).removeprefix("u")) if ty.is_int() else ty


def _padding(option: Any, ty: tl.dtype) -> Handle | None:
    if option != ir.PADDING_OPTION.PAD_NAN:
        return None
    return Handle(np.full(1, math.nan, numerics.numpy_type(ty)), ty)


_UPDATES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "ADD": np.add,
    "FADD": np.add,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
    "XCHG": lambda old, new: new,
    "MAX": numerics.maximum,
    "MIN": numerics.minimum,
    "UMAX": numerics.on_unsigned(np.maximum),
    "UMIN": numerics.on_unsigned(np.minimum),
}


def _atomic_update(name: str, ty: tl.dtype) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    update = _UPDATES["U" + name if name in ("MAX", "MIN") and ty.is_int_unsigned() else name]
    return (lambda old, new: numerics.rounded(update(old, new), ty)) if ty.is_floating() else update

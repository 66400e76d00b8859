"""Triton's IR builder implemented with NumPy: where the compiler would emit an operation, the value is computed.

`triton.language.semantic` determines types, broadcasting and errors, exactly as it does for the compiler, and calls the
methods here. All programs of a batch run at once: axis 0 of every array is the program axis, of length 1 if all
programs have the same value.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.language.semantic import TritonSemantic

from tilewright.interpreter import libdevice, numerics
from tilewright.interpreter.exceptions import DeviceError, Location, StepLimitExceeded, UnsupportedFeature, current_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilewright.interpreter.memory import Memory

Bounds = tuple[int, int] | None


class Handle:
    """A value: its array, its Triton type and, for integers, their range and whether an offset wrapped around."""

    __slots__ = ("_bounds", "data", "dtype", "wrapped")

    def __init__(self, data: np.ndarray, dtype: tl.dtype, bounds: Bounds = None, wrapped: Wrap | None = None):
        self.data = data
        self.dtype: Any = dtype.scalar  # a pointer's has an element_ty
        self._bounds = bounds
        self.wrapped = wrapped and wrapped.reshaped(lambda lanes: np.broadcast_to(lanes, data.shape))

    @property
    def bounds(self) -> tuple[int, int]:
        """Lower and upper bound as signed integers, not necessarily tight."""
        if self._bounds is None:
            self._bounds = (int(self.data.min()), int(self.data.max())) if self.data.size else (0, 0)
        return self._bounds


@dataclass(frozen=True)
class Wrap:
    """An integer overflow: where it first happened, and the lanes whose values derive from it."""

    location: Location
    value: int  # the first value that did not fit
    bits: int
    lanes: np.ndarray

    def reshaped(self, reshape: Callable[[np.ndarray], np.ndarray]) -> Wrap:
        return replace(self, lanes=reshape(self.lanes))

    @staticmethod
    def of(*handles: Handle) -> Wrap | None:
        """Return the overflow of a value computed from these handles."""
        wraps = [h.wrapped for h in handles if h.wrapped is not None]
        if len(wraps) < 2:
            return wraps[0] if wraps else None
        return replace(wraps[0], lanes=functools.reduce(np.logical_or, [w.lanes for w in wraps]))


@dataclass(frozen=True, eq=False)
class BlockPointer:
    """The result of `tl.make_block_ptr`."""

    base: Handle
    shape: list[Handle]
    strides: list[Handle]
    offsets: list[Handle]
    block: list[int]


@dataclass(eq=False)
class DescriptorHandle:
    """A TMA descriptor."""

    base: Handle
    shape: list[Handle]
    strides: list[Handle]
    block: list[int]
    padding: Any
    round_to_tf32: bool = False


TARGET = GPUTarget("cuda", 90, 32)
_NVIDIA = CUDABackend(TARGET)


def parse_options(given: dict[str, Any]) -> SimpleNamespace:
    """Return the launch options with Triton's defaults; Triton raises AssertionError for invalid ones."""
    parsed = vars(_NVIDIA.parse_options({"enable_fp_fusion": False, **given}))
    return SimpleNamespace(**{**parsed, "sanitize_overflow": False})


_OPTIONS = parse_options({"debug": False})


def _signless(ty: tl.dtype) -> tl.dtype:
    return getattr(tl, str(ty.name).removeprefix("u")) if ty.is_int() else ty


class Builder:
    """The methods that Triton's semantic layer calls; the executor sets `memory`, `programs` and `grid`."""

    options = _OPTIONS
    arch = "sm90"
    memory: Memory
    programs: np.ndarray  # (batch, 3): the program ids of this batch
    grid: tuple[int, int, int]

    def __init__(self) -> None:
        self.codegen_fns: dict[str, Callable[..., Any]] = {
            **_NVIDIA.get_codegen_implementation(_OPTIONS),
            "convert_custom_types": self._convert_custom_types,
        }
        self.operations = 0
        self.operations_left = 0

    def tick(self) -> None:
        self.operations += 1
        self.operations_left -= 1
        if self.operations_left < 0:
            file, line = current_line()
            raise StepLimitExceeded(
                f"{file}:{line}: still running after {self.operations} operations; fix the endless loop or raise steps"
            )

    def _make(self, data: np.ndarray, like: Handle | tl.dtype, bounds: Bounds = None, wrapped: Any = None) -> Handle:
        self.tick()
        return Handle(data, like.dtype if isinstance(like, Handle) else like, bounds, wrapped)

    @staticmethod
    def _convert_custom_types(value, ty, rounding, _semantic):
        return tl.tensor(_semantic.builder.create_fp_to_fp(value.handle, ty, rounding), ty)

    # Types

    def get_block_ty(self, element: tl.dtype, shape: list[int]) -> tl.dtype:
        return tl.block_type(element, shape)

    def get_ptr_ty(self, element: tl.dtype, address_space: int) -> tl.dtype:
        return tl.pointer_type(element, address_space)

    def get_void_ty(self) -> tl.dtype:
        return tl.void

    # Constants

    def get_null_value(self, ty: tl.dtype) -> Handle:
        kind = numerics.numpy_type(ty)
        return self._make(np.zeros(1, kind), ty, (0, 0) if kind.kind == "i" else None)

    def get_all_ones_value(self, ty: tl.dtype) -> Handle:
        return self._make(np.full(1, True if ty.is_bool() else -1, numerics.numpy_type(ty)), ty)

    # Program ids

    def create_get_program_id(self, axis: int) -> Handle:
        return self._make(self.programs[:, axis].astype(np.int32), tl.int32, (0, max(self.grid[axis] - 1, 0)))

    def create_get_num_programs(self, axis: int) -> Handle:
        return self._make(np.full(1, self.grid[axis], np.int32), tl.int32)

    # Conversions

    def create_int_cast(self, value: Handle, ty: tl.dtype, is_signed: bool) -> Handle:
        ty, data = ty.scalar, value.data
        if ty.is_bool():
            return self._make((data & 1).astype(bool), ty)
        if not is_signed:
            data = numerics.unsigned(data)
        bounds, wrapped = value._bounds, value.wrapped
        if wrapped is not None and not is_signed and 0 <= wrapped.value < 2**32:
            wrapped = None  # the value fits an unsigned integer
        if bounds is not None and not (is_signed or bounds[0] >= 0):
            bounds = None
        if bounds is not None and not _fits(bounds, ty.primitive_bitwidth):
            bounds = None
        return self._make(data.astype(numerics.numpy_type(ty)), ty, bounds, wrapped)

    def create_fp_to_fp(self, value: Handle, ty: tl.dtype, rounding: Any) -> Handle:
        return self._make(numerics.rounded(value.data, ty, rounding == ir.ROUNDING_MODE.RTZ), ty.scalar)

    def create_fp_trunc(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(numerics.rounded(value.data, ty), ty.scalar)

    create_fp_ext = create_fp_trunc

    def create_si_to_fp(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(_from_integer(value.data, ty), ty.scalar)

    def create_ui_to_fp(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(_from_integer(numerics.unsigned(value.data), ty), ty.scalar)

    def create_fp_to_si(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(numerics.to_integer(value.data, ty.scalar.primitive_bitwidth, is_signed=True), ty.scalar)

    def create_fp_to_ui(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(numerics.to_integer(value.data, ty.scalar.primitive_bitwidth, is_signed=False), ty.scalar)

    def create_bitcast(self, value: Handle, ty: tl.dtype) -> Handle:
        ty = ty.scalar
        if ty.is_ptr() or value.dtype.is_ptr():
            return self._make(self.memory.resolve(value.data) if ty.is_ptr() else value.data, ty)
        return self._make(numerics.unpack(numerics.pack(value.data, value.dtype), ty), ty)

    def create_int_to_ptr(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(self.memory.resolve(value.data.astype(np.int64)), ty.scalar)

    def create_ptr_to_int(self, value: Handle, ty: tl.dtype) -> Handle:
        return self._make(value.data.astype(numerics.numpy_type(ty)), ty.scalar)

    # Integer arithmetic: wraps around as the hardware does, and records that it did

    def _wrapping(self, a: Handle, b: Handle, ufunc: np.ufunc, exact: Callable[[int, int], int]) -> Handle:
        if a.data.dtype == bool:
            return self._make((ufunc(a.data.astype(np.int8), b.data.astype(np.int8)) & 1).astype(bool), a)
        (a0, a1), (b0, b1) = a.bounds, b.bounds
        corners = [exact(a0, b0), exact(a0, b1), exact(a1, b0), exact(a1, b1)]
        bounds = (min(corners), max(corners))
        wrapped = Wrap.of(a, b)
        bits = a.data.itemsize * 8
        if not _fits(bounds, bits):
            bounds = None
            if bits == 32 and wrapped is None:  # the default width of offsets; narrower integers wrap on purpose
                wide = ufunc(a.data.astype(np.int64), b.data.astype(np.int64))
                lanes = (wide < -(2**31)) | (wide >= 2**31)
                if lanes.any():
                    wrapped = Wrap(current_line(), int(wide[lanes].reshape(-1)[0]), bits, lanes)
        return self._make(ufunc(a.data, b.data), a, bounds, wrapped)

    def create_add(self, a: Handle, b: Handle) -> Handle:
        return self._wrapping(a, b, np.add, lambda x, y: x + y)

    def create_sub(self, a: Handle, b: Handle) -> Handle:
        return self._wrapping(a, b, np.subtract, lambda x, y: x - y)

    def create_mul(self, a: Handle, b: Handle) -> Handle:
        return self._wrapping(a, b, np.multiply, lambda x, y: x * y)

    def create_sdiv(self, a: Handle, b: Handle) -> Handle:
        return self._make(_quotient(a.data, b.data), a, _shrunk(a), a.wrapped)

    def create_udiv(self, a: Handle, b: Handle) -> Handle:
        return self._make(numerics.signed(_quotient(numerics.unsigned(a.data), numerics.unsigned(b.data))), a)

    def create_srem(self, a: Handle, b: Handle) -> Handle:
        return self._make(_remainder(a.data, b.data), a)

    def create_urem(self, a: Handle, b: Handle) -> Handle:
        return self._make(numerics.signed(_remainder(numerics.unsigned(a.data), numerics.unsigned(b.data))), a)

    def create_shl(self, a: Handle, b: Handle) -> Handle:
        return self._make(_shifted(np.left_shift, a.data, b.data), a, None, a.wrapped)

    def create_lshr(self, a: Handle, b: Handle) -> Handle:
        return self._make(numerics.signed(_shifted(np.right_shift, numerics.unsigned(a.data), b.data)), a)

    def create_ashr(self, a: Handle, b: Handle) -> Handle:
        bits = a.data.itemsize * 8
        return self._make(
            np.right_shift(a.data, np.minimum(numerics.unsigned(b.data), bits - 1).astype(a.data.dtype)), a
        )

    def create_umulhi(self, a: Handle, b: Handle) -> Handle:
        if a.data.itemsize == 8:
            return self._make(libdevice.evaluate("__nv_umul64hi", [a.data, b.data]), a)
        x, y = (numerics.unsigned(v.data).astype(np.uint64) for v in (a, b))
        return self._make(numerics.signed((x * y >> np.uint64(32)).astype(np.uint32)), a)

    # Floating-point arithmetic

    def _rounding(self, data: np.ndarray, like: Handle) -> Handle:
        return self._make(numerics.rounded(data, like.dtype), like)

    def create_fma(self, a: Handle, b: Handle, c: Handle) -> Handle:
        return self._make(_fused(a.data, b.data, c.data, c.dtype), c)

    def create_frem(self, a: Handle, b: Handle) -> Handle:
        """Compute the remainder as compiled code does, which is exact only if the quotient is."""
        quotient = np.trunc(numerics.rounded(a.data / b.data, a.dtype))
        return self._make(np.where(np.isinf(b.data), a.data, _fused(-quotient, b.data, a.data, a.dtype)), a)

    def create_clampf(self, x: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
        out = numerics.minimum(numerics.maximum(x.data, low.data), high.data)
        nan = np.isnan(x.data)
        if nan.any():
            if propagate_nan == tl.PropagateNan.ALL:
                out = np.where(nan, x.data, out)
            else:  # clamping to [-limit, limit] compiles to one instruction, which keeps the sign of NaN
                out = np.where(nan & (low.data == -high.data), np.copysign(high.data, x.data), out)
        return self._make(out, x)

    def create_select(self, condition: Handle, a: Handle, b: Handle) -> Handle:
        bounds = None
        if a.data.dtype.kind == "i" and a._bounds is not None and b._bounds is not None:
            bounds = (min(a._bounds[0], b._bounds[0]), max(a._bounds[1], b._bounds[1]))
        wrapped = Wrap.of(a, b)
        if wrapped is not None:
            off = np.zeros(1, bool)
            lanes = [h.wrapped.lanes if h.wrapped else off for h in (a, b)]
            wrapped = replace(wrapped, lanes=np.where(condition.data, *lanes))
        return self._make(np.where(condition.data, a.data, b.data), a, bounds, wrapped)

    def create_extern_elementwise(self, library, path, symbol, args, ty, is_pure) -> Handle:
        try:
            return self._make(libdevice.evaluate(symbol, [a.data for a in args]), ty.scalar)
        except KeyError:
            raise UnsupportedFeature(f"the extern function {symbol}") from None

    # Shapes: axis 0 of an array is the program axis, so all axes shift by one

    def _reshaped(self, value: Handle, reshape: Callable[[np.ndarray], np.ndarray]) -> Handle:
        return self._make(reshape(value.data), value, value._bounds, value.wrapped and value.wrapped.reshaped(reshape))

    def create_splat(self, ty: tl.block_type, value: Handle) -> Handle:
        shape = [int(s) for s in ty.shape]
        return self._reshaped(value, lambda x: np.broadcast_to(x.reshape(-1, *[1] * len(shape)), (x.shape[0], *shape)))

    def create_unsplat(self, value: Handle) -> Handle:
        return self._reshaped(value, lambda x: x.reshape(x.shape[0], -1)[:, 0])

    def create_broadcast(self, value: Handle, shape: list[int]) -> Handle:
        return self._reshaped(value, lambda x: np.broadcast_to(x, (x.shape[0], *[int(s) for s in shape])))

    def create_expand_dims(self, value: Handle, axis: int) -> Handle:
        return self._reshaped(value, lambda x: np.expand_dims(x, axis + 1))

    def create_reshape(self, value: Handle, shape: list[int], can_reorder: bool) -> Handle:
        return self._reshaped(value, lambda x: x.reshape(x.shape[0], *[int(s) for s in shape]))

    def create_trans(self, value: Handle, order: list[int]) -> Handle:
        return self._reshaped(value, lambda x: x.transpose(0, *[int(d) + 1 for d in order]))

    def create_cat(self, a: Handle, b: Handle) -> Handle:
        return self._make(np.concatenate(same_batch(a.data, b.data), axis=1), a)

    def create_join(self, a: Handle, b: Handle) -> Handle:
        return self._make(np.stack(same_batch(a.data, b.data), axis=-1), a)

    def create_split(self, value: Handle) -> tuple[Handle, Handle]:
        return self._reshaped(value, lambda x: x[..., 0]), self._reshaped(value, lambda x: x[..., 1])

    def create_make_range(self, ty: tl.dtype, start: int, end: int) -> Handle:
        return self._make(np.arange(start, end, dtype=np.int32)[None], tl.int32, (start, end - 1))

    def create_gather(self, source: Handle, index: Handle, axis: int) -> Handle:
        data, where = same_batch(source.data, index.data)
        if where.size and (where.min() < 0 or where.max() >= data.shape[axis + 1]):
            raise DeviceError(f"tl.gather: an index is not in 0 to {data.shape[axis + 1] - 1}")
        return self._make(np.take_along_axis(data, where.astype(np.int64), axis + 1), source)

    def create_histogram(self, value: Handle, bins: int, mask: Handle | None) -> Handle:
        data = value.data
        on = (data >= 0) & (data < bins)
        if mask is not None:
            data, on = np.broadcast_arrays(data, on & mask.data)
        row = np.broadcast_to(np.arange(data.shape[0])[:, None] * bins, data.shape)
        counts = np.bincount((row + data)[on], minlength=data.shape[0] * bins)
        return self._make(counts.reshape(data.shape[0], bins).astype(np.int32), tl.int32)

    # Dot products: exact products, summed in the accumulator's type

    def create_dot(self, a: Handle, b: Handle, acc: Handle, precision: Any, max_num_imprecise_acc: int) -> Handle:
        x, y = a.data, b.data
        if not a.dtype.is_floating():
            product = np.matmul(x.astype(np.float64), y.astype(np.float64)).astype(np.int64)
            return self._make((product + acc.data).astype(np.int32), acc)
        if a.dtype.is_fp32() and precision == ir.INPUT_PRECISION.TF32:
            x, y = numerics.to_tf32(x), numerics.to_tf32(y)
        return self._rounding(np.matmul(x, y) + acc.data, acc)

    def create_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast_math, a_pack, b_pack, acc) -> Handle:
        x = _scaled(a, a_scale, a_format, packed=-1 if a_pack else -2, along=-1)
        y = _scaled(b, b_scale, b_format, packed=-2 if b_pack else -1, along=-2)
        return self._rounding(np.matmul(x, y) + acc.data, acc)

    # Memory

    def create_addptr(self, pointer: Handle, offset: Handle) -> Handle:
        size = numerics.itemsize(pointer.dtype.element_ty)
        wrapped = Wrap.of(pointer, offset)
        return self._make(pointer.data + offset.data.astype(np.int64) * size, pointer, None, wrapped)

    def create_load(self, pointer: Handle, *policy: Any) -> Handle:
        return self.create_masked_load(pointer, None, None, *policy)

    def create_masked_load(self, pointer: Handle, mask: Handle | None, other: Handle | None, *policy: Any) -> Handle:
        ty = pointer.dtype.element_ty
        data = self.memory.load(pointer, mask.data if mask is not None else None, ty, volatile=bool(policy[-1]))
        if mask is not None:
            data = np.where(mask.data, data, other.data if other is not None else data.dtype.type(0))
        return self._make(self.memory.resolve(data) if ty.is_ptr() else data, _signless(ty))

    def create_store(self, pointer: Handle, value: Handle, *policy: Any) -> None:
        self.create_masked_store(pointer, value, None, *policy)

    def create_masked_store(self, pointer: Handle, value: Handle, mask: Handle | None, *policy: Any) -> None:
        self.tick()
        ty = pointer.dtype.element_ty
        self.memory.store(pointer, value.data, mask.data if mask is not None else None, ty)

    def create_atomic_rmw(self, op, pointer: Handle, value: Handle, mask: Handle, order: Any, scope: Any) -> Handle:
        update = _atomic_update(op.name, value.dtype)
        return self._make(self.memory.atomic(pointer, value, mask.data, update, order, scope), value)

    def create_atomic_cas(self, pointer: Handle, expected: Handle, value: Handle, order: Any, scope: Any) -> Handle:
        def swap(old: np.ndarray, new: np.ndarray, wanted: np.ndarray) -> np.ndarray:
            same = numerics.pack(old, value.dtype) == numerics.pack(wanted, value.dtype)
            return np.where(same, new, old)

        return self._make(self.memory.atomic(pointer, value, None, swap, order, scope, expected.data), value)

    def create_atomic_load(self, pointer: Handle, mask: Handle | None, order: Any, scope: Any) -> Handle:
        return self.create_masked_load(pointer, mask, None, True)

    def create_atomic_store(self, pointer: Handle, value: Handle, mask: Handle | None, order: Any, scope: Any) -> None:
        self.memory.atomic(pointer, value, mask.data if mask is not None else None, lambda old, new: new, order, scope)

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
        self.memory.atomic(addresses, value, mask.data, update, ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU)

    def create_descriptor_gather(self, descriptor: DescriptorHandle, rows: Handle, column: Handle, ty) -> Handle:
        addresses, mask = self._addresses(descriptor, [rows, column], (0, 1), rows=True)
        return self.create_masked_load(addresses, mask, _padding(descriptor.padding, addresses.dtype.element_ty), False)

    def create_descriptor_scatter(self, descriptor: DescriptorHandle, value: Handle, rows: Handle, column: Handle):
        addresses, mask = self._addresses(descriptor, [rows, column], (0, 1), rows=True)
        self.create_masked_store(addresses, value, mask)

    def _addresses(self, block: BlockPointer | DescriptorHandle, offsets: list[Handle], check, rows=False):
        """Return the addresses of a block and a mask of those inside the shape in the dimensions to check."""
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

    # Operations without a result

    def create_print(self, prefix: str, hexadecimal: bool, args: list[Handle], is_signed: list[bool]) -> None:
        for row, program in enumerate(self.programs):
            for arg, sign in zip(args, is_signed, strict=True):
                data = arg.data[row if arg.data.shape[0] > 1 else 0]
                if arg.data.dtype.kind == "i" and not sign:
                    data = numerics.unsigned(data)
                shown = np.vectorize(hex)(data) if hexadecimal and data.dtype.kind in "iu" else data
                print(f"pid {tuple(int(p) for p in program)}{prefix}{shown}")
            if not args:
                print(f"pid {tuple(int(p) for p in program)}{prefix}")

    def create_assert(self, condition: Handle, message: str) -> None:
        if not condition.data.all():
            raise DeviceError(f"tl.device_assert: {message}")

    def create_assume(self, condition: Handle) -> None:
        if not condition.data.all():
            raise DeviceError("the condition of tl.assume is false")

    def create_barrier(self) -> None:
        self.tick()

    def create_grid_dependency_wait(self) -> None:
        self.tick()

    create_grid_dependency_launch_dependents = create_grid_dependency_wait

    def get_cache_policy(self, *_: Any) -> None:
        return None

    def create_inline_asm(self, *_: Any) -> Handle:
        raise UnsupportedFeature("tl.inline_asm_elementwise")


def _constants(ty: tl.dtype) -> Callable[[Builder, Any], Handle]:
    def constant(self: Builder, value: Any) -> Handle:
        kind = numerics.numpy_type(ty)
        if kind.kind == "i":
            half = 2 ** (kind.itemsize * 8 - 1)
            wrapped = (int(value) + half) % (2 * half) - half
            return self._make(np.full(1, wrapped, kind), ty, (wrapped, wrapped))
        data = np.full(1, value, np.float64 if ty.is_floating() else kind)
        return self._make(numerics.rounded(data, ty) if ty.is_floating() else data, ty)

    return constant


_INTEGERS = {
    f"{sign}int{bits}": getattr(tl, f"int{bits}")
    for bits in (1, 8, 16, 32, 64)
    for sign in ("", "u")
    if bits > 1 or not sign
}
_CONSTANTS = {**_INTEGERS, "fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32, "fp64": tl.float64}
_TYPES = {**_INTEGERS, "half": tl.float16, "bf16": tl.bfloat16, "float": tl.float32, "double": tl.float64}
_TYPES |= {f"fp8{kind}": getattr(tl, f"float8{kind}") for kind in ("e4nv", "e5", "e4b8", "e5b16", "e4b15")}


def _type_getter(ty: tl.dtype) -> Callable[[Builder], tl.dtype]:
    return lambda self: ty


for _name, _ty in _CONSTANTS.items():
    setattr(Builder, f"get_{_name}", _constants(_ty))
for _name, _ty in _TYPES.items():
    setattr(Builder, f"get_{_name}_ty", _type_getter(_ty))


def _rounded(ufunc: Callable[..., np.ndarray]) -> Callable[..., Handle]:
    return lambda self, *args: self._rounding(ufunc(*[a.data for a in args]), args[0])


def _exact(ufunc: Callable[..., np.ndarray]) -> Callable[[Builder, Handle, Handle], Handle]:
    return lambda self, a, b: self._make(ufunc(a.data, b.data), a, None, Wrap.of(a, b))


def _comparison(
    ufunc: Callable[..., np.ndarray], unsigned: bool = False
) -> Callable[[Builder, Handle, Handle], Handle]:
    def method(self: Builder, a: Handle, b: Handle) -> Handle:
        x, y = (numerics.unsigned(a.data), numerics.unsigned(b.data)) if unsigned else (a.data, b.data)
        return self._make(ufunc(x, y), tl.int1)

    return method


def _unsigned(ufunc: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda a, b: numerics.signed(ufunc(numerics.unsigned(a), numerics.unsigned(b)))


def _propagating(ufunc: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, ufunc(x, y)).astype(x.dtype)


def _erf(x: np.ndarray) -> np.ndarray:
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x, np.float64))).numpy()


def _flushed(x: np.ndarray) -> np.ndarray:
    """Flush subnormal fp32 numbers to zero, as some instructions do."""
    if x.dtype != np.float32 or not (small := np.abs(x) < np.float32(2.0**-126)).any():
        return x
    return np.where(small, np.copysign(np.float32(0), x), x)


_ROUNDED = {
    "fadd": np.add,
    "fsub": np.subtract,
    "fmul": np.multiply,
    "fdiv": np.divide,
    "precise_divf": np.divide,
    "approx_divf": np.divide,
    "fabs": np.abs,
    "fneg": np.negative,
    "cos": np.cos,
    "sin": np.sin,
    "exp": np.exp,
    "exp2": lambda x: _flushed(np.exp2(_flushed(x))),
    "log": np.log,
    "log2": np.log2,
    "sqrt": lambda x: np.sqrt(_flushed(x)),
    "precise_sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(_flushed(x).astype(np.float64)),
    "floor": lambda x: np.floor(_flushed(x)),
    "ceil": lambda x: np.ceil(_flushed(x)),
    "erf": _erf,
}
_EXACT = {
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "minsi": np.minimum,
    "maxsi": np.maximum,
    "minui": _unsigned(np.minimum),
    "maxui": _unsigned(np.maximum),
    "minnumf": numerics.minimum,
    "maxnumf": numerics.maximum,
    "minimumf": _propagating(numerics.minimum),
    "maximumf": _propagating(numerics.maximum),
}
_COMPARED = {"LE": np.less_equal, "LT": np.less, "GE": np.greater_equal, "GT": np.greater}
_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _rounded(f) for name, f in _ROUNDED.items()},
    **{name: _exact(f) for name, f in _EXACT.items()},
    "and": lambda self, a, b: self._make(a.data & b.data, a),  # drops the overflow: hashes wrap and mask on purpose
    "iabs": lambda self, a: self._make(np.abs(a.data), a),
    **{f"icmpS{name}": _comparison(f) for name, f in _COMPARED.items()},
    **{f"icmpU{name}": _comparison(f, unsigned=True) for name, f in _COMPARED.items()},
    **{f"fcmpO{name}": _comparison(f) for name, f in _COMPARED.items()},
    "icmpEQ": _comparison(np.equal),
    "icmpNE": _comparison(np.not_equal),
    "fcmpOEQ": _comparison(np.equal),
    "fcmpUNE": _comparison(np.not_equal),
}
for _name, _method in _METHODS.items():
    setattr(Builder, f"create_{_name}", _method)


def _fits(bounds: tuple[int, int], bits: int) -> bool:
    return bounds[0] >= -(2 ** (bits - 1)) and bounds[1] < 2 ** (bits - 1)


def _shrunk(value: Handle) -> Bounds:
    """Return bounds for a result between the value and zero."""
    return (min(value._bounds[0], 0), max(value._bounds[1], 0)) if value._bounds else None


def _from_integer(data: np.ndarray, ty: tl.dtype) -> np.ndarray:
    if data.itemsize < 8 or ty.scalar.primitive_bitwidth == 64:
        return numerics.rounded(data.astype(np.float64), ty)
    high, low = (data >> 32).astype(np.float64) * 2.0**32, (data & 0xFFFFFFFF).astype(np.float64)
    return numerics.rounded(numerics.sum_to_odd(high, low), ty)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray, ty: tl.dtype) -> np.ndarray:
    """Return a * b + c, rounded once."""
    if ty.primitive_bitwidth == 64:
        return libdevice.evaluate("__nv_fma", [a, b, c])
    return numerics.rounded(numerics.sum_to_odd(a.astype(np.float64) * b, c.astype(np.float64)), ty)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the quotient, truncated; division by zero gives all ones, as on the hardware."""
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    return np.where(b == 0, _all_ones(a), (a - np.fmod(a, safe)) // safe).astype(a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    return np.where(b == 0, a, np.fmod(a, safe)).astype(a.dtype)


def _all_ones(a: np.ndarray) -> Any:
    return ~a.dtype.type(0)


def _shifted(ufunc: np.ufunc, a: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Shift by any amount; the width or more gives zero."""
    by = numerics.unsigned(by)
    bits = a.itemsize * 8
    return np.where(by < bits, ufunc(a, np.minimum(by, bits - 1).astype(a.dtype)), 0).astype(a.dtype)


def same_batch(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """Broadcast the program axis of both arrays to the same length."""
    rows = max(a.shape[0], b.shape[0])
    return [np.broadcast_to(x, (rows, *x.shape[1:])) for x in (a, b)]


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
    "UMAX": _unsigned(np.maximum),
    "UMIN": _unsigned(np.minimum),
}


def _atomic_update(name: str, ty: tl.dtype) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    update = _UPDATES["U" + name if name in ("MAX", "MIN") and ty.is_int_unsigned() else name]
    return (lambda old, new: numerics.rounded(update(old, new), ty)) if ty.is_floating() else update


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def _scaled(value: Handle, scale: Handle | None, kind: Any, packed: int, along: int) -> np.ndarray:
    """Return an operand of tl.dot_scaled times its scales, each of which covers a block of elements along K."""
    data = value.data
    if kind == ir.ScaleDotElemTypeTY.E2M1:
        codes = numerics.unsigned(data)
        halves = np.stack([codes & 15, codes >> 4], axis=-1)
        axis = data.ndim + packed
        data = np.moveaxis(halves, -1, axis + 1).reshape(*data.shape[:axis], -1, *data.shape[axis + 1 :])
        data = _E2M1[data]
    if scale is None:
        return data
    factor = scale.data
    if scale.dtype.is_int():  # e8m0: the exponent of a bf16, of which 0 is 0
        bits = numerics.unsigned(scale.data).astype(np.uint32)
        factor = np.where(bits == 255, np.float32(np.nan), (bits << 23).view(np.float32))
    factor = np.repeat(factor, data.shape[along] // factor.shape[-1], axis=-1)  # (rows, K)
    return data * (factor if along == -1 else np.swapaxes(factor, -1, -2))


BUILDER = Builder()
SEMANTIC: TritonSemantic[Any] = TritonSemantic(BUILDER)

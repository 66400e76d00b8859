"""Operations on whole blocks: shapes, gathers, histograms and dot products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from tilewright.interpreter import numerics
from tilewright.interpreter.exceptions import DeviceError
from tilewright.interpreter.values import Handle, Operations, same_batch


class Blocks(Operations):
    """Shapes and dot products. Axis 0 of an array is the program axis, so all axes shift by one."""

    def _reshaped(self, value: Handle, reshape: Callable[[np.ndarray], np.ndarray]) -> Handle:
        wrapped = value.wrapped and value.wrapped.reshaped(reshape)
        out = self._make(reshape(value.data), value, value._bounds, wrapped)
        out.poison = None if value.poison is None else reshape(value.poison)
        return out

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

"""The container of a quantised weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.ops.quantized._formats import NAN_SCALE, Format, Parts, dequantize, parse, quantize_parts

BITS_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class QuantizedWeight(nn.Module):
    """The weight of a linear layer, [N, K], in a low-bit format: codes and scales, packed for the kernels.

    Made by `quantize` and `load_quantized`. It moves with `to(device)` and is saved with `state_dict` or `torch.save`,
    like any module; casts change none of its tensors. It has no gradient.
    """

    def __init__(self, format: str, shape: tuple[int, int], parts: Parts, order: Tensor | None = None):
        super().__init__()
        self.format = parse(format).name
        self.shape = torch.Size(shape)
        for name, value in parts._asdict().items():
            self.register_buffer(name, value)
        self.register_buffer("order", order)  # int64 [K]: the column of the weight that each stored column is

    @property
    def parts(self) -> Parts:
        return Parts(self.codes, self.scale, self.zero, self.levels)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.codes.device  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and zero points."""
        return sum(t.nbytes for t in self.buffers())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [N, K], computed in fp32 and rounded to the dtype, or in float64."""
        weight = dequantize(self.parts, parse(self.format), self.shape[1], dtype)
        order: Any = self.order
        return weight if order is None else torch.empty_like(weight).index_copy_(1, order, weight)

    def extra_repr(self) -> str:
        N, K = self.shape
        return f"{self.format}, {N}x{K}, {8 * self.nbytes / (N * K):.2f} bits per weight"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        """Move tensors as bits, so that `half()` or `to(torch.bfloat16)` of a whole model rounds no scale."""
        super()._apply(lambda t: fn(t.view(BITS_AS[t.element_size()])).view(t.dtype), recurse)
        return self


def quantize(weight: Tensor, format: str) -> QuantizedWeight:
    """Quantise the weight [N, K] of a linear layer to the nearest codes, and pack it for `quantized_linear`.

    Formats: "int8" and "int4" with one scale per row, or per group of columns as in "int4-g128" (32, 64, 128), each
    also with zero points as in "int4-g128-zero"; "fp8" (per row), "fp8-tensor", "fp8-block128"; "mxfp8", "mxfp4";
    "nf4"; and with activations quantised per token "int8-a8" and "fp8-a8".
    """
    fmt = parse(format)
    if type(weight) not in (Tensor, nn.Parameter):
        raise TypeError(f"quantize takes a plain tensor, not {type(weight).__name__}: pass the local or full tensor")
    if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape:
        raise ValueError(f"quantize takes a matrix of floats, not {tuple(weight.shape)} of {weight.dtype}")
    if not weight.is_meta and not bool(weight.isfinite().all()):
        raise ValueError("the weight has NaN or infinities, which no scale can represent")
    with torch.no_grad():
        return QuantizedWeight(fmt.name, tuple(weight.shape), quantize_parts(weight.detach(), fmt))  # type: ignore[arg-type]


def checked(format: str, shape: tuple[int, int], parts: Parts, order: Tensor | None = None) -> QuantizedWeight:
    """Return the container for parts from outside, after checking that they fit together."""
    fmt = parse(format)
    N, K = shape
    wanted = fmt.groups(K), fmt.scale_columns(N)
    for name, value in (("scales", parts.scale), ("zero points", parts.zero)):
        if value is not None and tuple(value.shape) != wanted:
            raise ValueError(
                f"a weight {N}x{K} with groups of {fmt.group or K} columns has {wanted[0]}x{wanted[1]} {name}, "
                f"not {'x'.join(map(str, value.shape))}"
            )
        if value is not None and not _is_finite(value, fmt):
            raise ValueError(f"the {name} have NaN or infinities: the checkpoint is damaged")
    return QuantizedWeight(fmt.name, shape, parts, order)


def _is_finite(value: Tensor, fmt: Format) -> bool:
    return bool((value != NAN_SCALE).all() if fmt.has_e8m0 else value.isfinite().all())

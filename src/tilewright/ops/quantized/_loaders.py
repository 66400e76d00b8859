"""Quantised weights from the layouts of checkpoints: GPTQ, AWQ, HQQ, bitsandbytes NF4 and compressed-tensors.

A layout is unpacked to plain codes and packed again for our kernels; no weight is rounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.quantized._formats import BIAS, GROUPS, Parts, pack, parse
from tilewright.ops.quantized._weight import QuantizedWeight, checked

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds
NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
NESTED_BLOCK = 256
BITS = (4, 8)
HQQ_NUMBERS = ("shape", "nbits", "group_size", "axis")


def load_quantized(tensors: Mapping[str, Any], layout: str) -> QuantizedWeight:
    """Convert the tensors of one linear layer in a checkpoint, by their names without the layer's.

    Layouts: "gptq" (qweight, qzeros, scales, g_idx; zero points stored less 1), "gptq-v2" (zero points stored as they
    are), "awq" (qweight, qzeros, scales), "hqq" (W_q, scale, zero, shape, nbits, group_size, axis), "bitsandbytes"
    (NF4: weight, weight.absmax, weight.quant_map, weight.quant_state.bitsandbytes__nf4, and those of double
    quantisation) and "compressed-tensors" (pack-quantized: weight_packed, weight_scale, weight_shape,
    weight_zero_point, weight_g_idx).
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: choose from {', '.join(LAYOUTS)}")
    load, needed = LAYOUTS[layout]
    if missing := [name for name in needed if name not in tensors]:
        raise ValueError(f"a layer in the layout {layout} has {', '.join(needed)}: {missing[0]} is missing")
    for name in needed:
        if name not in HQQ_NUMBERS and not isinstance(tensors[name], Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensors[name]).__name__}")
    return load(tensors)


def _require_words(tensors: Mapping[str, Any], *names: str) -> None:
    for name in names:
        words = tensors[name]
        if words.dim() != 2 or words.dtype != torch.int32:
            raise ValueError(f"{name} must be a matrix of int32, not {tuple(words.shape)} of {words.dtype}")


def _require_elements(name: str, tensor: Tensor, wanted: int, of: str) -> None:
    if tensor.numel() != wanted:
        raise ValueError(f"{name} has {tensor.numel()} elements, and {of} has {wanted}")


def unpack_words(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the codes that int32 words hold along a dimension; `order` names the code of each place in a word."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    places = (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8)
    if order is not None:
        places = places[..., torch.tensor(order, device=words.device).argsort()]
    return places.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _integer_weight(
    codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, g_idx: Tensor | None = None, is_float: bool = False
) -> QuantizedWeight:
    """Return the container for codes [N, K] of 0 to 2^bits - 1, scales and zero points [groups, N].

    Zero points count from code 0; `g_idx` names the group of each column.
    """
    (N, K), groups = codes.shape, scale.shape[0]
    name, group, order = f"int{bits}", K if not groups else -(-K // groups), None
    if groups > 1 and group not in GROUPS:
        sizes = ", ".join(map(str, GROUPS))
        raise ValueError(f"{groups} scales in a row of {K} columns are not one per {sizes} columns, or one per row")
    if g_idx is not None and bool((g_idx[1:] < g_idx[:-1]).any()):
        order = g_idx.argsort(stable=True)
        if not torch.equal(g_idx[order].long(), torch.arange(K, device=order.device) // group):
            raise ValueError(f"g_idx does not assign {group} columns to each of {groups} groups")
        codes = codes[:, order]
    name += f"-g{group}" if groups > 1 else ""
    if zero is not None:
        zero = zero.float() - BIAS[f"int{bits}"]  # exact, for fp16 too
        zero = zero.contiguous() if is_float or bool(zero.any()) else None
    if zero is not None:
        name += "-float-zero" if is_float else "-zero"
        zero = zero if is_float else zero.to(scale.dtype)
    packed = pack(codes, parse(name))
    return checked(name, (N, K), Parts(packed, scale.contiguous(), zero), order)


def _gptq(tensors: Mapping[str, Any], stored_less: int = 1) -> QuantizedWeight:
    _require_words(tensors, "qweight", "qzeros")
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    bits = 32 * qzeros.shape[1] // qweight.shape[1]
    _require_bits(bits)
    codes = unpack_words(qweight, bits, 0).t()
    zero = unpack_words(qzeros, bits, 1).int() + stored_less & (1 << bits) - 1  # a zero point of 0 wrapped around
    return _integer_weight(codes, scales, zero, bits, tensors.get("g_idx"))


def _gptq_v2(tensors: Mapping[str, Any]) -> QuantizedWeight:
    return _gptq(tensors, 0)


def _awq(tensors: Mapping[str, Any]) -> QuantizedWeight:
    _require_words(tensors, "qweight", "qzeros")
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    if scales.dim() != 2 or qweight.shape[1] * 8 != scales.shape[1]:
        raise ValueError(f"qweight {tuple(qweight.shape)} is not that of 4-bit AWQ with scales {tuple(scales.shape)}")
    codes, zero = (unpack_words(words, 4, 1, AWQ_ORDER) for words in (qweight, qzeros))
    return _integer_weight(codes.t(), scales, zero, 4)


def _hqq(tensors: Mapping[str, Any]) -> QuantizedWeight:
    bits, group, axis = (int(tensors[name]) for name in ("nbits", "group_size", "axis"))
    N, K = (int(n) for n in tensors["shape"])
    _require_bits(bits)
    if axis != 1 or group < 1 or K % group:
        raise ValueError(f"HQQ needs axis=1 and groups that divide {K} columns, not axis={axis} and groups of {group}")
    codes = tensors["W_q"].to(torch.uint8)  # [N * K / group, group]; the first half of the rows in the high nibbles
    codes = torch.cat((codes >> 4, codes & 15)) if bits == 4 else codes
    _require_elements("W_q", codes, N * K, f"a weight {N}x{K}, unpacked,")
    for name in ("scale", "zero"):
        _require_elements(name, tensors[name], N * K // group, f"a weight {N}x{K} with groups of {group} columns")
    scale, zero = (tensors[name].reshape(N, K // group).t() for name in ("scale", "zero"))
    return _integer_weight(codes.reshape(N, K), scale, zero, bits, is_float=True)


def _bitsandbytes(tensors: Mapping[str, Any]) -> QuantizedWeight:
    (N, K), block, state = _nf4_state(tensors[NF4_STATE])
    if K % block:
        raise ValueError(f"blocks of {block} weights cross the rows of {K} columns: dequantise this layer instead")
    pairs = tensors["weight"].reshape(-1).view(torch.uint8)
    _require_elements("weight", pairs, N * K // 2, f"a weight {N}x{K}, two codes in a byte,")
    _require_elements(
        "weight.absmax", tensors["weight.absmax"], N * K // block, f"a weight {N}x{K} in blocks of {block}"
    )
    _require_elements("weight.quant_map", tensors["weight.quant_map"], 16, "NF4")
    codes = torch.stack((pairs >> 4, pairs & 15), -1).view(N, K)
    absmax = tensors["weight.absmax"].reshape(-1)
    if "weight.nested_absmax" in tensors:  # double quantisation
        outer = tensors["weight.nested_absmax"].repeat_interleave(state.get("nested_blocksize", NESTED_BLOCK))
        absmax = tensors["weight.nested_quant_map"][absmax.int()] * outer[: absmax.numel()] + state["nested_offset"]
    name = f"nf4-g{block}" if block != 64 else "nf4"
    scale = absmax.float().view(N, K // block).t().contiguous()
    levels = tensors["weight.quant_map"].float().contiguous()
    return checked(name, (N, K), Parts(pack(codes, parse(name)), scale, None, levels))


def _nf4_state(state: Tensor) -> tuple[tuple[int, int], int, dict[str, Any]]:
    """Return the shape of the weight, the size of its blocks, and the whole state."""
    try:
        found = json.loads(bytes(state.cpu().tolist()))
        N, K = found["shape"]
        return (N, K), found["blocksize"], found
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{NF4_STATE} is not the JSON of a matrix's state: {error}") from None


def _compressed_tensors(tensors: Mapping[str, Any]) -> QuantizedWeight:
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    _require_words(tensors, "weight_packed")
    _require_elements("weight_shape", tensors["weight_shape"], 2, "a matrix")
    N, K = (int(n) for n in tensors["weight_shape"])
    if packed.shape[0] != N or not scale.numel() or scale.numel() % N:
        shapes = f"{tuple(packed.shape)} and {tuple(scale.shape)}"
        raise ValueError(f"weight_packed and weight_scale must have {N} rows, as weight_shape says, not {shapes}")
    bits = next((bits for bits in BITS if packed.shape[1] == -(-K * bits // 32)), 0)
    _require_bits(bits)
    codes = unpack_words(packed, bits, 1)[:, :K]
    zero = tensors.get("weight_zero_point")
    if zero is not None:  # packed along the rows, or signed
        zero = unpack_words(zero, bits, 0)[:N] if zero.dtype == torch.int32 else zero.int() + (1 << bits - 1)
        zero = zero.t()
    g_idx = tensors.get("weight_g_idx")
    g_idx = None if g_idx is None or bool((g_idx < 0).any()) else g_idx
    return _integer_weight(codes, scale.view(N, -1).t(), zero, bits, g_idx)


def _require_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"only weights of {' and '.join(map(str, BITS))} bits are supported, not {bits}")


LAYOUTS: dict[str, tuple[Callable[[Mapping[str, Any]], QuantizedWeight], tuple[str, ...]]] = {
    "gptq": (_gptq, ("qweight", "qzeros", "scales")),
    "gptq-v2": (_gptq_v2, ("qweight", "qzeros", "scales")),
    "awq": (_awq, ("qweight", "qzeros", "scales")),
    "hqq": (_hqq, ("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis")),
    "bitsandbytes": (_bitsandbytes, ("weight", "weight.absmax", "weight.quant_map", NF4_STATE)),
    "compressed-tensors": (_compressed_tensors, ("weight_packed", "weight_scale", "weight_shape")),
}

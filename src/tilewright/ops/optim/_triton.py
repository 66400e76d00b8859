"""AdamW's kernels over lists of tensors, and moments in 8 bits.

One launch takes all tensors of one kind: tables on the device hold their addresses, and another one, which depends on
sizes alone, says which part of which tensor a program takes. Addresses cost a small copy, and only when they are
new; those of gradients, which often change, lie apart.

Moments in 8 bits have one fp32 scale for 256 elements, the largest of them. The first moment is a float8_e4m3fn. Of the
second the root is kept, as the 4 lowest bits of an fp32's exponent and the 4 highest of its mantissa: it has no sign
and no zero, and what is below 2**-16 of the largest is rounded up, since a root of zero would make a step endless.

Rounding is random, and its expectation exact: a random number below one step of the code is added to the bits, and what
is less than a step is cut off. To the nearest code a moment that decays by a thousandth would always be rounded back to
where it was. What is drawn depends on the place and the step alone, so the same steps give the same.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tilewright.runtime.configs import ConfigTable
from tilewright.runtime.eligibility import is_interpreted
from tilewright.runtime.launch import Launcher

GROUP = tl.constexpr(256)  # elements that share a scale
LANES = tl.constexpr(32)
MEAN_SHIFT, ROOT_SHIFT = tl.constexpr(20), tl.constexpr(19)  # bits of fp32's mantissa that a code lacks
MEAN_TOP, ROOT_TOP = tl.constexpr(416.0), tl.constexpr(1.875)  # the largest of a group: a step below the largest code
MEAN_UNIT = tl.constexpr(2.0**120)  # by which fp32's smallest numbers differ from float8_e4m3fn's
ROOT_LEAST = tl.constexpr(0x38000000)  # the bits of 2**-15, whose code is 0
TINY = tl.constexpr(2.0**-100)  # smaller scales count as this, so that no quotient is endless
ODD, SQUARE = tl.constexpr(0x735A2D97), tl.constexpr(0x735A2D97**2 % 2**32)  # multiply hashes
COLUMNS = tl.constexpr(8)  # of the table: param, both moments, both scales, size
PIECE = tl.constexpr(32768)  # elements whose squares one program adds


@dataclass(frozen=True)
class Numbers:
    """What a step multiplies by."""

    decay: float  # 1 - lr * weight_decay
    rate: float  # lr / (1 - beta1**step)
    root: float  # 1 / sqrt(1 - beta2**step)
    eps: float
    near: float  # 1 - beta1
    beta2: float
    rest: float  # 1 - beta2
    seed: int  # of what is drawn; odd and not 1, so that Triton compiles one kernel for all

    @staticmethod
    def of(step: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Numbers:
        beta1, beta2 = betas
        rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
        return Numbers(1 - lr * weight_decay, rate, root, eps, 1 - beta1, beta2, 1 - beta2, 2 * (int(step) % 2**29) + 3)


def stepped(p: Tensor, g: Tensor, m: Tensor, v: Tensor, by: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """The new parameter and moments, in the moments' dtype, by torch."""
    g = g.to(m.dtype)
    m = m + (g - m) * by.near
    v = v * by.beta2 + g * g * by.rest
    return p.to(m.dtype) * by.decay - by.rate * (m / (v.sqrt() * by.root + by.eps)), m, v


# 8 bits, by torch


def groups(size: int) -> int:
    return -(-size // GROUP.value)


def _spread(scale: Tensor, size: int) -> Tensor:
    return scale.repeat_interleave(GROUP.value)[:size]


def decoded(mean: Tensor, root: Tensor, mean_scale: Tensor, root_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments, flat, of flat codes."""
    m = mean.view(torch.float8_e4m3fn).float() * _spread(mean_scale / MEAN_TOP.value, len(mean))
    s = (root.int() << ROOT_SHIFT.value | ROOT_LEAST.value).view(torch.float32)
    s = s * _spread(root_scale / ROOT_TOP.value, len(root))
    return m, s * s


def scale_of(x: Tensor) -> Tensor:
    """The largest of each group of a flat tensor."""
    return torch.nn.functional.pad(x.abs(), (0, -x.numel() % GROUP.value)).view(-1, GROUP.value).amax(1)


def _drawn(size: int, seed: int, device: torch.device) -> Tensor:
    """As `_hash`."""
    place = torch.arange(size, device=device)
    h = place // 4 * 0x9E3779B1 + seed * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    powers = torch.tensor([pow(ODD.value, n, 2**32) for n in (1, 2, 3, 4)], device=device)
    return (h ^ h >> 15) * powers[place % 4] & 0xFFFFFFFF


def encoded(m: Tensor, v: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of flat fp32 moments; without a seed, the nearest."""
    h = 1 << 31 if seed is None else _drawn(len(m), seed, m.device)

    def bits(x: Tensor, scale: Tensor, top: float, unit: float) -> Tensor:
        return (x * _spread(top / scale.clamp(min=TINY.value), len(x)) / unit).view(torch.int32)

    def cut(x: Tensor, shift: int) -> Tensor:
        return (x + (h >> 32 - shift)).int() >> shift

    s = v.sqrt()
    m_scale, v_scale = scale_of(m), scale_of(s)
    mean = cut(bits(m, m_scale, MEAN_TOP.value, MEAN_UNIT.value), MEAN_SHIFT.value) << MEAN_SHIFT.value
    mean = (mean.view(torch.float32) * MEAN_UNIT.value).to(torch.float8_e4m3fn).view(torch.uint8)
    root = cut(bits(s, v_scale, ROOT_TOP.value, 1.0).clamp(min=ROOT_LEAST.value), ROOT_SHIFT.value)
    return mean, (root & 255).to(torch.uint8), m_scale, v_scale


# kernels


@triton.jit
def _taken(ptr, offs, N, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(ptr + offs, mask=offs < N, other=0, eviction_policy="evict_last")
    else:
        return tl.load(ptr + offs, eviction_policy="evict_last")


@triton.jit
def _put(ptr, offs, x, N, MASKED: tl.constexpr):
    x = x.to(ptr.dtype.element_ty)
    if MASKED:
        tl.store(ptr + offs, x, mask=offs < N)
    else:
        tl.store(ptr + offs, x)


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _hash(start, offs, seed):
    """What is drawn for an element: four neighbours share a hash, times powers of a number."""
    h = (start // 4).to(tl.uint32) + offs.to(tl.uint32) // 4
    h = h * 0x9E3779B1 + seed.to(tl.uint32) * 0x85EBCA6B
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    return (h ^ (h >> 15)) * tl.where(offs % 2 == 1, SQUARE, ODD) * tl.where(offs % 4 >= 2, SQUARE, 1)


@triton.jit
def _mean_of(code, FP8: tl.constexpr):
    """The number of a float8_e4m3fn."""
    if FP8:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = code.to(tl.uint32)
        return ((code & 127) << MEAN_SHIFT | (code & 128) << 24).to(tl.float32, bitcast=True) * MEAN_UNIT


@triton.jit
def _mean_code(x, noise, FP8: tl.constexpr):
    """The float8_e4m3fn of x; its smallest numbers are evenly spaced, and so are those of fp32."""
    bits = _bits(x * (1 / MEAN_UNIT)) + (noise >> 32 - MEAN_SHIFT)
    if FP8:
        bits = bits >> MEAN_SHIFT << MEAN_SHIFT
        return (bits.to(tl.float32, bitcast=True) * MEAN_UNIT).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return (bits >> MEAN_SHIFT & 127) | (bits >> 24 & 128)


@triton.jit
def _larger(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x):
    """Of each group of x >= 0. As integers: one instruction compares all lanes, and not a number is the largest."""
    return tl.max(tl.max(tl.max(_bits(x), 3), 2), 0).to(tl.float32, bitcast=True)


@triton.jit
def _read_chunk(p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start, offs_r, offs, left, MASKED: tl.constexpr):
    """What a chunk holds, as it lies there; without scales the last two are nothing."""
    p, g = _taken(p_ptr + start, offs, left, MASKED), _taken(g_ptr + start, offs, left, MASKED)
    m, v = _taken(m_ptr + start, offs, left, MASKED), _taken(v_ptr + start, offs, left, MASKED)
    m_scale, v_scale = p, p
    if m_scale_ptr is not None:
        rows = tl.cdiv(left, GROUP)
        m_scale = _taken(m_scale_ptr + start // GROUP, offs_r, rows, MASKED)
        v_scale = _taken(v_scale_ptr + start // GROUP, offs_r, rows, MASKED)
    return p, g, m, v, m_scale, v_scale


@triton.jit
def _update_chunk(
    p,
    g,
    m,
    v,
    m_scale,
    v_scale,
    p_ptr,
    m_ptr,
    v_ptr,
    m_scale_ptr,
    v_scale_ptr,
    start,
    offs_r,
    offs,
    left,
    clip,
    decay,
    rate,
    root,
    eps,
    near,
    beta2,
    rest,
    seed,
    MAXIMIZE: tl.constexpr,
    MASKED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Writes the new parameters and moments of what was read."""
    p_ptr, m_ptr, v_ptr = p_ptr + start, m_ptr + start, v_ptr + start
    g = g.to(tl.float32) * clip
    p = p.to(tl.float32)
    if MAXIMIZE:
        g = -g
    if m_scale_ptr is not None:
        m = _mean_of(m, FP8) * (m_scale * (1 / MEAN_TOP))[None, :, None, None]
        s = (v.to(tl.uint32) << ROOT_SHIFT | ROOT_LEAST).to(tl.float32, bitcast=True)
        s *= (v_scale * (tl.sqrt(beta2) / ROOT_TOP))[None, :, None, None]
        v = s * s
    else:
        v *= beta2
    m += (g - m) * near
    v += g * g * rest
    s = tl.sqrt(v)
    _put(p_ptr, offs, p * decay - rate * libdevice.fast_dividef(m, s * root + eps), left, MASKED)
    if m_scale_ptr is None:
        _put(m_ptr, offs, m, left, MASKED)
        _put(v_ptr, offs, v, left, MASKED)
    else:
        if MASKED:  # codes that are not there have a root
            s = tl.where(offs < left, s, 0.0)
        m_scale, v_scale = _largest(tl.abs(tl.reduce(m, 3, _larger, keep_dims=True))), _largest(s)
        m_unit = libdevice.fast_dividef(MEAN_TOP, tl.maximum(m_scale, TINY))[None, :, None, None]
        v_unit = libdevice.fast_dividef(ROOT_TOP, tl.maximum(v_scale, TINY))[None, :, None, None]
        noise = _hash(start, offs, seed)
        _put(m_ptr, offs, _mean_code(m * m_unit, noise, FP8), left, MASKED)
        bits = tl.maximum(_bits(s * v_unit), ROOT_LEAST) + (noise >> 32 - ROOT_SHIFT)
        _put(v_ptr, offs, bits >> ROOT_SHIFT, left, MASKED)
        rows = tl.cdiv(left, GROUP)
        _put(m_scale_ptr + start // GROUP, offs_r, m_scale, rows, MASKED)
        _put(v_scale_ptr + start // GROUP, offs_r, v_scale, rows, MASKED)


@triton.jit
def _address(place_ptr, like_ptr, ALIGNED: tl.constexpr):
    ptr = tl.load(place_ptr).to(like_ptr.dtype)
    if ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def _adamw(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    m_scale_ptr,
    v_scale_ptr,
    clip_ptr,
    table_ptr,
    grads_ptr,
    chunks_ptr,
    N,
    decay,
    rate,
    root,
    eps,
    near,
    beta2,
    rest,
    seed,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FP8: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A program takes so many chunks. With a table, the pointers only tell what addresses point to."""
    chunk = tl.program_id(0).to(tl.int64)
    if table_ptr is not None:
        place = tl.load(chunks_ptr + chunk)
        chunk = place & 0xFFFFFFFF
        row = place >> 32
        row_ptr = table_ptr + row * COLUMNS
        p_ptr, g_ptr = _address(row_ptr, p_ptr, ALIGNED), _address(grads_ptr + row, g_ptr, ALIGNED)
        m_ptr, v_ptr = _address(row_ptr + 1, m_ptr, ALIGNED), _address(row_ptr + 2, v_ptr, ALIGNED)
        if m_scale_ptr is not None:
            m_scale_ptr = _address(row_ptr + 3, m_scale_ptr, False)
            v_scale_ptr = _address(row_ptr + 4, v_scale_ptr, False)
        N = tl.load(row_ptr + 5)
    clip = 1.0
    if clip_ptr is not None:
        clip = tl.load(clip_ptr)
    # lanes, groups, passes, neighbours: a warp takes whole groups, and a thread WIDTH neighbours of every tensor
    offs_r = tl.arange(0, BLOCK // GROUP)
    offs = tl.arange(0, LANES)[:, None, None, None] * WIDTH + offs_r[None, :, None, None] * GROUP
    offs += tl.arange(0, GROUP // LANES // WIDTH)[None, None, :, None] * (LANES * WIDTH) + tl.arange(0, WIDTH)
    start = chunk * (BLOCK * CHUNKS)
    left = tl.minimum(N - start, BLOCK * CHUNKS).to(tl.int32)
    if left == BLOCK * CHUNKS:  # without a mask the accesses stay 16 bytes wide whatever N is
        p, g, m, v, m_scale, v_scale = _read_chunk(
            p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start, offs_r, offs, BLOCK, False
        )
        for n in tl.static_range(CHUNKS):  # while one is computed, the next is on its way
            following = start + BLOCK
            if n + 1 < CHUNKS:
                next_p, next_g, next_m, next_v, next_m_scale, next_v_scale = _read_chunk(
                    p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, following, offs_r, offs, BLOCK, False
                )
            _update_chunk(
                p, g, m, v, m_scale, v_scale, p_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start, offs_r, offs, BLOCK,
                clip, decay, rate, root, eps, near, beta2, rest, seed, MAXIMIZE, False, FP8,
            )  # fmt: skip
            start = following
            if n + 1 < CHUNKS:
                p, g, m, v, m_scale, v_scale = next_p, next_g, next_m, next_v, next_m_scale, next_v_scale
    else:
        for done in range(0, left, BLOCK):
            p, g, m, v, m_scale, v_scale = _read_chunk(
                p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start + done, offs_r, offs, left - done, True
            )
            _update_chunk(
                p, g, m, v, m_scale, v_scale, p_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start + done, offs_r, offs,
                left - done, clip, decay, rate, root, eps, near, beta2, rest, seed, MAXIMIZE, True, FP8,
            )  # fmt: skip


@triton.jit
def _squares(g_ptr, part_ptr, table_ptr, grads_ptr, chunks_ptr, N, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the squares of a piece of a gradient."""
    piece = tl.program_id(0).to(tl.int64)
    if table_ptr is not None:
        place = tl.load(chunks_ptr + piece)
        piece = place & 0xFFFFFFFF
        row = place >> 32
        g_ptr = _address(grads_ptr + row, g_ptr, ALIGNED)
        N = tl.load(table_ptr + row * COLUMNS + 5)
    start = piece * PIECE
    total = tl.zeros((BLOCK,), tl.float32)
    if start + PIECE <= N:
        for n in range(start, start + PIECE, BLOCK):
            g = _taken(g_ptr, n + tl.arange(0, BLOCK), N, False).to(tl.float32)
            total += g * g
    else:
        for n in range(start, tl.cast(N, tl.int64), BLOCK):
            g = _taken(g_ptr, n + tl.arange(0, BLOCK), N, True).to(tl.float32)
            total += g * g
    tl.store(part_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def _norm(part_ptr, clip_ptr, P, largest, BLOCK: tl.constexpr):
    """What gradients are multiplied by, and their norm, from the sums of squares."""
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(0, P, BLOCK):
        total += _taken(part_ptr, n + tl.arange(0, BLOCK), P, True)
    norm = tl.sqrt(tl.sum(total))
    tl.store(clip_ptr, tl.minimum(largest / (norm + 1e-6), 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(clip_ptr + 1, norm)


def _default(form: str, bytes_: int) -> dict[str, int]:
    if form == "norm":
        return {"block": 4096, "num_warps": 8}
    wide = form == "8-bit" and bytes_ == 2
    return {"block": 1024, "chunks": 2 if form == "8-bit" else 1, "width": 8 if wide else 4, "num_warps": 4}


def _choices(form: str, bytes_: int) -> list[dict[str, int]]:
    if form == "norm":
        blocks = ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
        return [{"block": block, "num_warps": warps} for block, warps in blocks]
    blocks = [(256, 1), (512, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)]  # a warp should take whole groups
    wide = [(*block, 8) for block in blocks[:5] if bytes_ == 2]
    if form == "fp32":  # which has none
        blocks += [(256, 2), (512, 4), (1024, 8), (2048, 16)]
        wide = wide[1:3]
    found = [*[(*block, 4) for block in blocks], *wide]
    return [
        {"block": block, "chunks": chunks, "width": width, "num_warps": warps}
        for block, warps, width in found
        for chunks in ((1, 2, 4) if form == "8-bit" else (1, 2))
    ]


CONFIG = ConfigTable("adamw.json", _default, _choices)
_launch_update, _launch_squares, _launch_norm = Launcher(_adamw), Launcher(_squares), Launcher(_norm)


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    """Whether Triton converts to and from float8_e4m3fn there; the interpreter does."""
    return device.type != "cuda" or (not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9))


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it: from pinned memory of its own, which waits until it has been read."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _stream(device: torch.device) -> int:
    """What was sent on another stream may still be on its way."""
    return torch._C._cuda_getCurrentRawStream(device.index) if torch.cuda.is_initialized() else 0


@functools.lru_cache(64)
def _listed(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """On the device, and kept: an allocator gives the same addresses again and again."""
    return _sent(torch.frombuffer(array("q", numbers), dtype=torch.int64), device)


@functools.lru_cache(64)
def _chunks(sizes: tuple[int, ...], chunk: int, device: torch.device, stream: int) -> Tensor:
    """For each program the number of its tensor, in the upper half, and which chunk of it."""
    counts = torch.tensor([-(-size // chunk) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = (counts.cumsum(0) - counts)[tensor]
    return _sent(tensor << 32 | torch.arange(len(tensor)) - first, device)


class Batch:
    """Tensors of one kind, which one launch takes together: params and gradients of one dtype, moments in fp32 or codes
    with their scales, all on one device, each a run of memory, none empty. Gradients are not kept alive."""

    def __init__(self, params: list[Tensor], grads: list[Tensor], states: list[tuple[Tensor, ...]]):
        self.params, self.states = params, states
        self.sizes = tuple(p.numel() for p in params)
        self.device = params[0].device
        rows = [[t.data_ptr() for t in (p, *state)] for p, state in zip(params, states, strict=True)]
        places = [g.data_ptr() for g in grads]
        self.is_aligned = not any(address % 16 for row in (*[row[:3] for row in rows], places) for address in row)
        self._table: Tensor | None = None
        if not is_interpreted(params[0]):  # which knows no addresses: there every tensor has a launch of its own
            filled = [(*row, *[0] * (5 - len(row)), size, 0, 0) for row, size in zip(rows, self.sizes, strict=True)]
            self._table = _listed(tuple(chain.from_iterable(filled)), self.device, _stream(self.device))
        self.follow(places)

    def follow(self, places: list[int]) -> None:
        """The gradients are at these addresses now, on 16 bytes or not as before."""
        if self._table is not None:
            self._places = _listed(tuple(places), self.device, _stream(self.device))

    @property
    def pieces(self) -> int:
        return sum(-(-size // PIECE.value) for size in self.sizes)

    def update(self, grads: list[Tensor], clip: Tensor | None, by: Numbers, maximize: bool) -> None:
        """One step of all params and states. `clip` holds what gradients are multiplied by."""
        p, is_coded = self.params[0], len(self.states[0]) > 2
        config = CONFIG(p, "8-bit" if is_coded else "fp32", p.element_size())
        span = config["block"] * config["chunks"]
        numbers = (by.decay, by.rate, by.root, by.eps, by.near, by.beta2, by.rest, by.seed)
        constants = {"FP8": _has_fp8(self.device), "WIDTH": config["width"]}
        constants |= {"BLOCK": config["block"], "CHUNKS": config["chunks"]}
        constants |= {"MAXIMIZE": maximize, "num_warps": config["num_warps"]}
        none = () if is_coded else (None, None)
        if self._table is not None:
            chunks = _chunks(self.sizes, span, self.device, _stream(self.device))
            like = (p, p, *self.states[0], *none)
            args = (*like, clip, self._table, self._places, chunks, 0, *numbers)
            _launch_update((len(chunks),), *args, ALIGNED=self.is_aligned, **constants)
            return
        for p, g, state in zip(self.params, grads, self.states, strict=True):
            args = (p, g, *state, *none, clip, None, None, None, p.numel(), *numbers)
            _launch_update((-(-p.numel() // span),), *args, ALIGNED=False, **constants)

    def squares(self, grads: list[Tensor], part: Tensor) -> None:
        """The sums of the squares of pieces of all gradients."""
        like = self.params[0]
        config = CONFIG(like, "norm", like.element_size())
        constants = {"BLOCK": config["block"], "num_warps": config["num_warps"]}
        if self._table is not None:
            chunks = _chunks(self.sizes, PIECE.value, self.device, _stream(self.device))
            args = (like, part, self._table, self._places, chunks, 0)
            _launch_squares((len(chunks),), *args, ALIGNED=self.is_aligned, **constants)
            return
        for g in grads:
            count = -(-g.numel() // PIECE.value)
            _launch_squares((count,), g, part, None, None, None, g.numel(), ALIGNED=False, **constants)
            part = part[count:]


def clipping(batches: Sequence[tuple[Batch, list[Tensor]]], largest: float) -> Tensor:
    """What the gradients of these batches are multiplied by so that their norm is at most `largest`, and the norm."""
    first = batches[0][0]
    part = torch.empty(sum(batch.pieces for batch, _ in batches), device=first.device)
    done = 0
    for batch, grads in batches:
        batch.squares(grads, part[done:])
        done += batch.pieces
    clip = torch.empty(2, device=first.device)
    _launch_norm((1,), part, clip, len(part), float(largest), BLOCK=4096, num_warps=8)
    return clip


def batched(
    params: list[Tensor], grads: list[Tensor], states: list[tuple[Tensor, ...]]
) -> list[tuple[Batch, list[int]]]:
    """Tensors of one kind as a batch, those apart that do not begin on 16 bytes; with their numbers in the lists.
    Scales may begin anywhere: a warp reads few."""
    kinds: dict[bool, list[int]] = {}
    for number, tensors in enumerate(zip(params, grads, states, strict=True)):
        if params[number].numel():
            p, g, (m, v, *_) = tensors
            kinds.setdefault(any(t.data_ptr() % 16 for t in (p, g, m, v)), []).append(number)

    def some(values: list[Any], numbers: list[int]) -> list[Any]:
        return [values[n] for n in numbers]

    return [(Batch(some(params, n), some(grads, n), some(states, n)), n) for n in kinds.values()]

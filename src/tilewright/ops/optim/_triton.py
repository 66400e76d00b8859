"""AdamW's kernels over lists of tensors, and moments in 8 bits.

One launch updates all tensors of one kind: a table in device memory holds their addresses, and a second one, which
depends on sizes alone, holds the tensor and chunk of each program. New addresses cost a small copy; those of gradients,
which change often, have a table of their own.

Moments in 8 bits share one fp32 scale per 256 elements, the largest of them. The first moment is a float8_e4m3fn. The
second one is stored as its square root, as the 4 lowest bits of an fp32's exponent and the 4 highest of its mantissa,
without sign and zero: roots below 2**-16 of the largest are rounded up, since the update divides by them.

Rounding is stochastic and unbiased: a random number below one unit of the last entry is added to the bits, and the rest
is truncated. Rounding to nearest would always restore a moment that decays by a thousandth. The random numbers are a
hash of position and step, so results are deterministic.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.eligibility import is_interpreted
from tilewright.runtime.gpus import has_fp8
from tilewright.runtime.launch import Launcher
from tilewright.runtime.sizes import cdiv

GROUP = tl.constexpr(256)  # elements that share a scale
LANES = tl.constexpr(32)
MEAN_SHIFT, ROOT_SHIFT = tl.constexpr(20), tl.constexpr(19)  # low bits of fp32's mantissa that a code drops
MEAN_TOP, ROOT_TOP = tl.constexpr(416.0), tl.constexpr(1.875)  # a group's largest, scaled: one below the largest code
MEAN_UNIT = tl.constexpr(2.0**120)  # the ratio of float8_e4m3fn's subnormal numbers to fp32's
ROOT_LEAST = tl.constexpr(0x38000000)  # the bits of 2**-15, whose code is 0
TINY = tl.constexpr(2.0**-100)  # the smallest scale, so that no quotient is infinite
ODD, SQUARE = tl.constexpr(0x735A2D97), tl.constexpr(0x735A2D97**2 % 2**32)  # multipliers of the hash
COLUMNS = tl.constexpr(8)  # in the table: param, both moments, both scales, size, padding
PART = tl.constexpr(32768)  # elements whose squares one program sums


class Step(NamedTuple):
    """The numbers of a step, in the order of the kernel's parameters."""

    decay: float  # 1 - lr * weight_decay
    rate: float  # lr / (1 - beta1**step)
    root_scale: float  # 1 / sqrt(1 - beta2**step)
    eps: float
    alpha1: float  # 1 - beta1
    beta2: float
    alpha2: float  # 1 - beta2
    seed: int  # for stochastic rounding; odd and not 1, so that Triton compiles one kernel for all

    @classmethod
    def of(cls, step: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Step:
        beta1, beta2 = betas
        rate, root_scale = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
        seed = 2 * (int(step) % 2**29) + 3
        return cls(1 - lr * weight_decay, rate, root_scale, eps, 1 - beta1, beta2, 1 - beta2, seed)

    @classmethod
    def on_device(cls, step: Tensor, lr: Any, betas: tuple[Any, Any], eps: float, weight_decay: float) -> Step:
        """Return the numbers as fp64 tensors, computed where the count of steps is: a CUDA graph repeats that."""
        count = step.double()
        lr, beta1, beta2 = (_on_device(number, step.device) for number in (lr, *betas))
        rate, root_scale = lr / (1 - beta1**count), (1 - beta2**count) ** -0.5
        seed = 2 * (count.long() % 2**29) + 3
        found = 1 - lr * weight_decay, rate, root_scale, eps, 1 - beta1, beta2, 1 - beta2, seed
        return cls(*[one if isinstance(one, Tensor) else torch.full_like(count, one) for one in found])  # type: ignore[arg-type]


def _on_device(number: float | Tensor, device: torch.device) -> float | Tensor:
    """Return a number that needs no copy from the host: a tensor there is as fixed as any other number in a graph."""
    return number.double() if isinstance(number, Tensor) and number.device == device else float(number)


NO_STEP = Step(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3)  # where the kernel reads the numbers from device memory


def torch_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new parameter and moments, in the moments' dtype, by torch."""
    g = g.to(m.dtype)
    m = m + (g - m) * step.alpha1
    v = v * step.beta2 + g * g * step.alpha2
    return p.to(m.dtype) * step.decay - step.rate * (m / (v.sqrt() * step.root_scale + step.eps)), m, v


def num_groups(size: int) -> int:
    return cdiv(size, GROUP.value)


def _per_element(scale: Tensor, size: int) -> Tensor:
    return scale.repeat_interleave(GROUP.value)[:size]


def decode(mean: Tensor, root: Tensor, mean_scale: Tensor, root_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return both moments of flat codes."""
    m = mean.view(torch.float8_e4m3fn).float() * _per_element(mean_scale / MEAN_TOP.value, len(mean))
    s = (root.int() << ROOT_SHIFT.value | ROOT_LEAST.value).view(torch.float32)
    s = s * _per_element(root_scale / ROOT_TOP.value, len(root))
    return m, s * s


def group_scales(x: Tensor) -> Tensor:
    """Return the largest magnitude of each group of a flat tensor."""
    return torch.nn.functional.pad(x.abs(), (0, -x.numel() % GROUP.value)).view(-1, GROUP.value).amax(1)


def _random_bits(size: int, seed: int, device: torch.device) -> Tensor:
    """Return the random bits of `_hash`."""
    position = torch.arange(size, device=device)
    h = position // 4 * 0x9E3779B1 + seed * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    powers = torch.tensor([pow(ODD.value, n, 2**32) for n in (1, 2, 3, 4)], device=device)
    return (h ^ h >> 15) * powers[position % 4] & 0xFFFFFFFF


def encode(m: Tensor, v: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of flat fp32 moments, rounded stochastically or, without a seed, to nearest."""
    h = 1 << 31 if seed is None else _random_bits(len(m), seed, m.device)

    def bits(x: Tensor, scale: Tensor, top: float, unit: float) -> Tensor:
        return (x * _per_element(top / scale.clamp(min=TINY.value), len(x)) / unit).view(torch.int32)

    def truncate(x: Tensor, shift: int) -> Tensor:
        return (x + (h >> 32 - shift)).int() >> shift

    s = v.sqrt()
    m_scale, v_scale = group_scales(m), group_scales(s)
    mean = truncate(bits(m, m_scale, MEAN_TOP.value, MEAN_UNIT.value), MEAN_SHIFT.value) << MEAN_SHIFT.value
    mean = (mean.view(torch.float32) * MEAN_UNIT.value).to(torch.float8_e4m3fn).view(torch.uint8)
    root = truncate(bits(s, v_scale, ROOT_TOP.value, 1.0).clamp(min=ROOT_LEAST.value), ROOT_SHIFT.value)
    return mean, (root & 255).to(torch.uint8), m_scale, v_scale


@triton.jit
def _load(ptr, offs, N, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(ptr + offs, mask=offs < N, other=0, eviction_policy="evict_last")
    else:
        return tl.load(ptr + offs, eviction_policy="evict_last")


@triton.jit
def _store(ptr, offs, x, N, MASKED: tl.constexpr):
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
    """Return random bits for each element: four neighbors share a hash, multiplied by powers of an odd number."""
    h = (start // 4).to(tl.uint32) + offs.to(tl.uint32) // 4
    h = h * 0x9E3779B1 + seed.to(tl.uint32) * 0x85EBCA6B
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    return (h ^ (h >> 15)) * tl.where(offs % 2 == 1, SQUARE, ODD) * tl.where(offs % 4 >= 2, SQUARE, 1)


@triton.jit
def _decode_mean(code, FP8: tl.constexpr):
    """Return the value of a float8_e4m3fn."""
    if FP8:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = code.to(tl.uint32)
        return ((code & 127) << MEAN_SHIFT | (code & 128) << 24).to(tl.float32, bitcast=True) * MEAN_UNIT


@triton.jit
def _encode_mean(x, noise, FP8: tl.constexpr):
    """Return x as a float8_e4m3fn. Its subnormal numbers are scaled to those of fp32, which are evenly spaced too."""
    bits = _bits(x * (1 / MEAN_UNIT)) + (noise >> 32 - MEAN_SHIFT)
    if FP8:
        bits = bits >> MEAN_SHIFT << MEAN_SHIFT
        return (bits.to(tl.float32, bitcast=True) * MEAN_UNIT).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return (bits >> MEAN_SHIFT & 127) | (bits >> 24 & 128)


@triton.jit
def _larger_abs(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _group_max(x):
    """Return the maximum of each group of x >= 0; as integers, for which a warp reduces in one instruction."""
    return tl.max(tl.max(tl.max(_bits(x), 3), 2), 0).to(tl.float32, bitcast=True)


@triton.jit
def _load_chunk(p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start, offs_r, offs, left, MASKED: tl.constexpr):
    """Load a chunk of all tensors as stored; without scales the last two results are unused."""
    p, g = _load(p_ptr + start, offs, left, MASKED), _load(g_ptr + start, offs, left, MASKED)
    m, v = _load(m_ptr + start, offs, left, MASKED), _load(v_ptr + start, offs, left, MASKED)
    m_scale, v_scale = p, p
    if m_scale_ptr is not None:
        rows = tl.cdiv(left, GROUP)
        m_scale = _load(m_scale_ptr + start // GROUP, offs_r, rows, MASKED)
        v_scale = _load(v_scale_ptr + start // GROUP, offs_r, rows, MASKED)
    return p, g, m, v, m_scale, v_scale


@triton.jit
def _update_chunk(
    p, g, m, v, m_scale, v_scale, p_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start, offs_r, offs, left, clip,
    decay, rate, root_scale, eps, alpha1, beta2, alpha2, seed,
    MAXIMIZE: tl.constexpr, MASKED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Store the new parameters and moments of a loaded chunk."""
    p_ptr, m_ptr, v_ptr = p_ptr + start, m_ptr + start, v_ptr + start
    g = g.to(tl.float32) * clip
    p = p.to(tl.float32)
    if MAXIMIZE:
        g = -g
    if m_scale_ptr is not None:
        m = _decode_mean(m, FP8) * (m_scale * (1 / MEAN_TOP))[None, :, None, None]
        s = (v.to(tl.uint32) << ROOT_SHIFT | ROOT_LEAST).to(tl.float32, bitcast=True)
        s *= (v_scale * (tl.sqrt(beta2) / ROOT_TOP))[None, :, None, None]
        v = s * s
    else:
        v *= beta2
    m += (g - m) * alpha1
    v += g * g * alpha2
    s = tl.sqrt(v)
    _store(p_ptr, offs, p * decay - rate * libdevice.fast_dividef(m, s * root_scale + eps), left, MASKED)
    if m_scale_ptr is None:
        _store(m_ptr, offs, m, left, MASKED)
        _store(v_ptr, offs, v, left, MASKED)
    else:
        if MASKED:  # elements out of bounds decode to a root above 0
            s = tl.where(offs < left, s, 0.0)
        m_scale, v_scale = _group_max(tl.abs(tl.reduce(m, 3, _larger_abs, keep_dims=True))), _group_max(s)
        m_unit = libdevice.fast_dividef(MEAN_TOP, tl.maximum(m_scale, TINY))[None, :, None, None]
        v_unit = libdevice.fast_dividef(ROOT_TOP, tl.maximum(v_scale, TINY))[None, :, None, None]
        noise = _hash(start, offs, seed)
        _store(m_ptr, offs, _encode_mean(m * m_unit, noise, FP8), left, MASKED)
        bits = tl.maximum(_bits(s * v_unit), ROOT_LEAST) + (noise >> 32 - ROOT_SHIFT)
        _store(v_ptr, offs, bits >> ROOT_SHIFT, left, MASKED)
        rows = tl.cdiv(left, GROUP)
        _store(m_scale_ptr + start // GROUP, offs_r, m_scale, rows, MASKED)
        _store(v_scale_ptr + start // GROUP, offs_r, v_scale, rows, MASKED)


@triton.jit
def _address(entry_ptr, like_ptr, ALIGNED: tl.constexpr):
    ptr = tl.load(entry_ptr).to(like_ptr.dtype)
    if ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def _adamw(
    p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, clip_ptr, table_ptr, grads_ptr, chunks_ptr, numbers_ptr, N,
    decay, rate, root_scale, eps, alpha1, beta2, alpha2, seed,
    MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, FP8: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Each program updates CHUNKS chunks. With a table, the pointers only carry the element types of its addresses.

    The numbers of the step are arguments or, for a CUDA graph, in device memory.
    """
    if numbers_ptr is not None:
        decay = tl.load(numbers_ptr).to(tl.float32)
        rate = tl.load(numbers_ptr + 1).to(tl.float32)
        root_scale = tl.load(numbers_ptr + 2).to(tl.float32)
        eps = tl.load(numbers_ptr + 3).to(tl.float32)
        alpha1 = tl.load(numbers_ptr + 4).to(tl.float32)
        beta2 = tl.load(numbers_ptr + 5).to(tl.float32)
        alpha2 = tl.load(numbers_ptr + 6).to(tl.float32)
        seed = tl.load(numbers_ptr + 7).to(tl.int32)
    chunk = tl.program_id(0).to(tl.int64)
    if table_ptr is not None:
        entry = tl.load(chunks_ptr + chunk)
        chunk = entry & 0xFFFFFFFF
        row = entry >> 32
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
    # [lanes, groups, passes, neighbors]: a warp takes whole groups, a thread WIDTH neighbors of every tensor.
    offs_r = tl.arange(0, BLOCK // GROUP)
    offs = tl.arange(0, LANES)[:, None, None, None] * WIDTH + offs_r[None, :, None, None] * GROUP
    offs += tl.arange(0, GROUP // LANES // WIDTH)[None, None, :, None] * (LANES * WIDTH) + tl.arange(0, WIDTH)
    start = chunk * (BLOCK * CHUNKS)
    left = tl.minimum(N - start, BLOCK * CHUNKS).to(tl.int32)
    if left == BLOCK * CHUNKS:  # without a mask accesses stay 16 bytes wide for every N
        p, g, m, v, m_scale, v_scale = _load_chunk(
            p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start, offs_r, offs, BLOCK, False
        )
        for n in tl.static_range(CHUNKS):  # the next chunk is loaded while this one is computed
            following = start + BLOCK
            if n + 1 < CHUNKS:
                next_p, next_g, next_m, next_v, next_m_scale, next_v_scale = _load_chunk(
                    p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, following, offs_r, offs, BLOCK, False
                )
            _update_chunk(
                p, g, m, v, m_scale, v_scale, p_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start, offs_r, offs, BLOCK,
                clip, decay, rate, root_scale, eps, alpha1, beta2, alpha2, seed, MAXIMIZE, False, FP8,
            )  # fmt: skip
            start = following
            if n + 1 < CHUNKS:
                p, g, m, v, m_scale, v_scale = next_p, next_g, next_m, next_v, next_m_scale, next_v_scale
    else:
        for done in range(0, left, BLOCK):
            p, g, m, v, m_scale, v_scale = _load_chunk(
                p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start + done, offs_r, offs, left - done, True
            )
            _update_chunk(
                p, g, m, v, m_scale, v_scale, p_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, start + done, offs_r, offs,
                left - done, clip, decay, rate, root_scale, eps, alpha1, beta2, alpha2, seed, MAXIMIZE, True, FP8,
            )  # fmt: skip


@triton.jit
def _squares(g_ptr, partials_ptr, table_ptr, grads_ptr, chunks_ptr, N, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the squares of one part of a gradient."""
    part = tl.program_id(0).to(tl.int64)
    if table_ptr is not None:
        entry = tl.load(chunks_ptr + part)
        part = entry & 0xFFFFFFFF
        row = entry >> 32
        g_ptr = _address(grads_ptr + row, g_ptr, ALIGNED)
        N = tl.load(table_ptr + row * COLUMNS + 5)
    start = part * PART
    total = tl.zeros((BLOCK,), tl.float32)
    if start + PART <= N:
        for n in range(start, start + PART, BLOCK):
            g = _load(g_ptr, n + tl.arange(0, BLOCK), N, False).to(tl.float32)
            total += g * g
    else:
        for n in range(start, tl.cast(N, tl.int64), BLOCK):
            g = _load(g_ptr, n + tl.arange(0, BLOCK), N, True).to(tl.float32)
            total += g * g
    tl.store(partials_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def _norm(partials_ptr, clip_ptr, P, max_norm, BLOCK: tl.constexpr):
    """Store the factor that clips the gradients, and their norm, from the partial sums of squares."""
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(0, P, BLOCK):
        total += _load(partials_ptr, n + tl.arange(0, BLOCK), P, True)
    norm = tl.sqrt(tl.sum(total))
    tl.store(clip_ptr, tl.minimum(max_norm / (norm + 1e-6), 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(clip_ptr + 1, norm)


def _default(form: str, itemsize: int) -> Config:
    if form == "norm":
        return {"block": 4096, "num_warps": 8}
    wide = form == "8-bit" and itemsize == 2
    return {"block": 1024, "chunks": 2 if form == "8-bit" else 1, "width": 8 if wide else 4, "num_warps": 4}


def _choices(form: str, itemsize: int) -> list[Config]:
    if form == "norm":
        blocks = ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
        return [{"block": block, "num_warps": warps} for block, warps in blocks]
    blocks = [(256, 1), (512, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)]  # a warp takes whole groups
    wide = [(*block, 8) for block in blocks[:5] if itemsize == 2]
    if form == "fp32":  # without groups
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


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without synchronizing, from pinned memory, which the allocator keeps until it was read."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, which may not wait for the device or copy from the host."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    """Return the current stream, by which tables are cached: a copy on another one may still be in flight."""
    return torch._C._cuda_getCurrentRawStream(device.index) if torch.cuda.is_initialized() else 0


@functools.lru_cache(64)
def _device_table(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Return these numbers in device memory. Cached, since an allocator returns the same addresses again and again."""
    return _to_device(torch.frombuffer(array("q", numbers), dtype=torch.int64), device)


@functools.lru_cache(64)
def _chunk_table(sizes: tuple[int, ...], chunk: int, device: torch.device, stream: int) -> Tensor:
    """Return for each program the index of its tensor, in the upper 32 bits, and of its chunk."""
    counts = torch.tensor([cdiv(size, chunk) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = (counts.cumsum(0) - counts)[tensor]
    return _to_device(tensor << 32 | torch.arange(len(tensor)) - first, device)


class Batch:
    """Tensors of one kind, which one launch updates.

    Params and gradients have one dtype, moments are fp32 or codes with their scales, all are on one device, dense and
    not empty. Gradients are not kept alive.
    """

    def __init__(self, params: list[Tensor], grads: list[Tensor], states: list[tuple[Tensor, ...]]):
        self.params, self.states = params, states
        self.sizes = tuple(p.numel() for p in params)
        self.device = params[0].device
        rows = [[t.data_ptr() for t in (p, *state)] for p, state in zip(params, states, strict=True)]
        addresses = [g.data_ptr() for g in grads]
        self.is_aligned = not any(address % 16 for row in (*[row[:3] for row in rows], addresses) for address in row)
        self._table: Tensor | None = None
        if not is_interpreted(params[0]):  # there are no addresses then, and every tensor has a launch of its own
            filled = [(*row, *[0] * (5 - len(row)), size, 0, 0) for row, size in zip(rows, self.sizes, strict=True)]
            self._table = _device_table(tuple(chain.from_iterable(filled)), self.device, _stream(self.device))
        self._chunks: dict[int, Tensor] = {}  # tables by the size of a chunk
        self._captured: list[Tensor] = []  # tables that CUDA graphs read
        self.set_gradients(addresses)

    def set_gradients(self, addresses: list[int]) -> None:
        """Set new addresses of the gradients, with the same alignment as before."""
        if self._table is not None:
            self._grads = _device_table(tuple(addresses), self.device, _stream(self.device))

    @property
    def parts(self) -> int:
        return sum(cdiv(size, PART.value) for size in self.sizes)

    def _chunk_table(self, chunk: int) -> Tensor:
        """Return the table of chunks of that size; while a graph is captured, that of the step before."""
        if not is_capturing():
            self._chunks[chunk] = _chunk_table(self.sizes, chunk, self.device, _stream(self.device))
        else:
            self._captured += [self._grads, self._chunks[chunk]]
        return self._chunks[chunk]

    def update(self, grads: list[Tensor], clip: Tensor | None, step: Step, maximize: bool) -> None:
        """Update all params and states. `clip` holds the factor of the gradients."""
        p, is_coded = self.params[0], len(self.states[0]) > 2
        config = CONFIG(p, "8-bit" if is_coded else "fp32", p.element_size())
        span = config["block"] * config["chunks"]
        constants = {"FP8": has_fp8(p.get_device()), "WIDTH": config["width"], "BLOCK": config["block"]}
        constants |= {"CHUNKS": config["chunks"], "MAXIMIZE": maximize, "num_warps": config["num_warps"]}
        none = () if is_coded else (None, None)
        numbers = None
        if isinstance(step.decay, Tensor):
            numbers, step = torch.stack([one.double() for one in step]), NO_STEP  # type: ignore[union-attr]
        if self._table is not None:
            chunks = self._chunk_table(span)
            like = (p, p, *self.states[0], *none)
            args = (*like, clip, self._table, self._grads, chunks, numbers, 0, *step)
            _launch_update((len(chunks),), *args, ALIGNED=self.is_aligned, **constants)
            return
        for p, g, state in zip(self.params, grads, self.states, strict=True):
            args = (p, g, *state, *none, clip, None, None, None, numbers, p.numel(), *step)
            _launch_update((cdiv(p.numel(), span),), *args, ALIGNED=False, **constants)

    def sum_squares(self, grads: list[Tensor], partials: Tensor) -> None:
        """Fill the partial sums of squares of all gradients."""
        like = self.params[0]
        config = CONFIG(like, "norm", like.element_size())
        constants = {"BLOCK": config["block"], "num_warps": config["num_warps"]}
        if self._table is not None:
            chunks = self._chunk_table(PART.value)
            args = (like, partials, self._table, self._grads, chunks, 0)
            _launch_squares((len(chunks),), *args, ALIGNED=self.is_aligned, **constants)
            return
        for g in grads:
            parts = cdiv(g.numel(), PART.value)
            _launch_squares((parts,), g, partials, None, None, None, g.numel(), ALIGNED=False, **constants)
            partials = partials[parts:]


def clip_factor(batches: Sequence[tuple[Batch, list[Tensor]]], max_norm: float) -> Tensor:
    """Return the factor by which the gradients of these batches have at most that norm, and the norm."""
    first = batches[0][0]
    partials = torch.empty(sum(batch.parts for batch, _ in batches), device=first.device)
    done = 0
    for batch, grads in batches:
        batch.sum_squares(grads, partials[done:])
        done += batch.parts
    clip = torch.empty(2, device=first.device)
    _launch_norm((1,), partials, clip, len(partials), float(max_norm), BLOCK=4096, num_warps=8)
    return clip


def make_batches(
    params: list[Tensor], grads: list[Tensor], states: list[tuple[Tensor, ...]]
) -> list[tuple[Batch, list[int]]]:
    """Return tensors of one kind as batches, aligned ones and others, each with the indices of its tensors.

    Scales need no alignment, since a warp loads few.
    """
    kinds: dict[bool, list[int]] = {}
    for n, (p, g, (m, v, *_)) in enumerate(zip(params, grads, states, strict=True)):
        if p.numel():
            kinds.setdefault(any(t.data_ptr() % 16 for t in (p, g, m, v)), []).append(n)

    def select(values: list[Any], indices: list[int]) -> list[Any]:
        return [values[n] for n in indices]

    return [(Batch(select(params, n), select(grads, n), select(states, n)), n) for n in kinds.values()]

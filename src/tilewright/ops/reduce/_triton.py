"""The kernels of reductions: over whole rows, pieces of rows and columns, and the gradients.

HOW says how terms are put together (sum, prod, max, index, logsumexp, var; count, a maximum and how many are equal to
it; zeros, a product without its zeros, how many there are, and the product with them), TERM what is made of an element
first, LAST what is made of the result, or that it is that of a piece.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tilewright.ops._exp import LOG2_E, exp
from tilewright.runtime.pdl import await_leader, let_follow

ONCE = tl.constexpr("evict_first")  # what is read once leaves the L2 first, so that what was written may stay


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _neutral(HOW: tl.constexpr):
    """What changes no result."""
    if HOW == "prod" or HOW == "zeros":
        return 1.0
    elif HOW == "sum" or HOW == "var":
        return 0.0
    else:
        return -float("inf")


@triton.jit
def _finite(m):
    """What maxima are taken off by: an infinite one would leave NaN of what is equal to it."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def _term(x, p, TERM: tl.constexpr):
    x = x.to(tl.float32)
    if TERM == "negated":
        x *= -1.0  # free in machine code, as 0 - x, which Triton makes of -x, is not
    elif TERM == "abs":
        x = tl.abs(x)
    elif TERM == "-abs":
        x = -tl.abs(x)
    elif TERM == "square":
        x = x * x
    elif TERM == "power":
        x = libdevice.pow(tl.abs(x), p)
    elif TERM == "nonzero":
        x = tl.where(x != 0.0, 1.0, 0.0)
    return x


@triton.jit
def _step(a, b, c, x, place, inside, HOW: tl.constexpr, MASKED: tl.constexpr):
    """Put the terms x to what each lane holds: a, and b and c where one number is not enough."""
    if HOW == "sum":
        a += tl.where(inside, x, 0.0) if MASKED else x
    elif HOW == "prod":
        a *= tl.where(inside, x, 1.0) if MASKED else x
    elif HOW == "zeros":
        x = tl.where(inside, x, 1.0) if MASKED else x
        a *= tl.where(x == 0.0, 1.0, x)
        b += tl.where(x == 0.0, 1.0, 0.0)
        c *= x
    elif HOW == "var":  # the sums of distances from c, and of their squares
        apart = tl.where(inside, x - c, 0.0) if MASKED else x - c
        a += apart
        b += apart * apart
    else:
        x = tl.where(inside, x, -float("inf")) if MASKED else x
        if HOW == "max":
            a = _larger(a, x)
        elif HOW == "count":
            is_equal = (x == a) & inside if MASKED else x == a
            b = tl.where(x > a, 1.0, b + tl.where(is_equal, 1.0, 0.0))
            a = _larger(a, x)
        elif HOW == "index":  # maximum and its place; the first of equals, and NaN before all
            is_better = ~(x <= a) & (a == a)
            a = tl.where(is_better, x, a)
            b = tl.where(is_better, place, b)
        else:  # logsumexp: maximum and the sum of exp(x - maximum), by one exp an element
            apart = tl.where(x == a, 0.0, x - a)
            e = exp(-tl.abs(apart))
            b = tl.where(apart > 0.0, b * e + 1.0, b + e)
            a = tl.maximum(a, x)
    return a, b, c


@triton.jit
def _step_by_groups(a, b, c, x, place, inside, HOW: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr):
    """The same for neighbours that one thread holds, together: a lane is a group, and an index that of its first."""
    if GROUP == 1:
        return _step(a, b, c, x, place, inside, HOW, MASKED)
    else:
        x = tl.where(inside, x, -float("inf")) if MASKED else x
        x = tl.reshape(x, [1, x.shape[1] // GROUP, GROUP])
        largest = tl.reduce(x, 2, _larger)
        if HOW == "index":
            is_better = ~(largest <= a) & (a == a)
            return tl.where(is_better, largest, a), tl.where(is_better, place, b), c
        else:
            m = tl.maximum(a, largest)
            shift = _finite(m) * LOG2_E
            e = tl.sum(tl.exp2(x * LOG2_E - shift[:, :, None]), axis=2)
            return m, b * tl.exp2(a * LOG2_E - shift) + e, c


@triton.jit
def _fold(a, b, c, HOW: tl.constexpr, FARTHEST: tl.constexpr = 2**31 - 1):
    """The lanes of each row [BLOCK_M, BLOCK_N] as one. For index b is the place, for pieces of var c the count, for
    zeros c the product with them, which is not that without them times zero if that one overflows."""
    if HOW == "sum":
        a = tl.sum(a, axis=1)
        b = a
    elif HOW == "prod":
        a = tl.reduce(a, 1, _times)
        b = a
    elif HOW == "max":
        a = tl.reduce(a, 1, _larger)
        b = a
    elif HOW == "count":
        best = tl.reduce(a, 1, _larger)
        b = tl.sum(tl.where(a == best[:, None], b, 0.0), axis=1)
        a = best
    elif HOW == "zeros":
        a = tl.reduce(a, 1, _times)
        b = tl.sum(b, axis=1)
        c = tl.reduce(c, 1, _times)
    elif HOW == "index":
        best = tl.reduce(a, 1, _larger)
        is_best = (a == best[:, None]) | (a != a)
        b = tl.min(tl.where(is_best, b, FARTHEST), axis=1)
        a = best
    elif HOW == "logsumexp":
        m = tl.max(a, axis=1)
        b = tl.sum(b * tl.exp2((a - _finite(m)[:, None]) * LOG2_E), axis=1)
        a = m
    else:
        is_first = tl.arange(0, a.shape[1])[None, :] == 0
        head = tl.sum(tl.where(is_first, a, 0.0), axis=1)  # from which means differ little
        mean = head + tl.sum((a - head[:, None]) * (c / tl.sum(c, axis=1)[:, None]), axis=1)
        apart = a - mean[:, None]
        b = tl.sum(b + c * apart * apart, axis=1)
        a = mean
    return a, b, c


@triton.jit
def _near(x, first, inside, count):
    """About the mean of each row: that of some of its elements x [BLOCK_M, BLOCK_N], count of which are inside. Where
    all are equal it is just the first one."""
    return first + tl.sum(tl.where(inside, (x - first[:, None]) * (1.0 / count), 0.0), axis=1)


@triton.jit
def _moments(a, b, near, N):
    """Of N elements the mean and the sum of squared distances from it, from the sums of distances from what is near."""
    a, b = tl.sum(a, axis=1), tl.sum(b, axis=1)
    mean = a / (N + 0.0)
    apart = tl.where(b == float("inf"), b, b - a * mean)
    return near + mean, tl.where(apart < 0.0, 0.0, apart)


@triton.jit
def _place_in_group(x_ptr, starts, N, a, b, TERM: tl.constexpr, GROUP: tl.constexpr):
    """Which element of its group, whose first is b, is the extreme a: groups are read again, from the cache."""
    places = b[:, None] + tl.arange(0, GROUP)[None, :]
    x = _term(tl.load(x_ptr + starts[:, None] + places, mask=places < N, other=0.0), 0.0, TERM)
    is_it = (places < N) & ((x == a[:, None]) | (x != x))
    return tl.min(tl.where(is_it, places, 2**31 - 1), axis=1)


@triton.jit
def _keep(k_ptr, a, b, offs, mask, HOW: tl.constexpr):
    """What backward needs of a row besides its result."""
    if HOW == "var":
        tl.store(k_ptr + offs, a, mask=mask)
    elif HOW == "count":
        tl.store(k_ptr + offs, b, mask=mask)
    else:
        tl.store(k_ptr + offs * 2, a, mask=mask)
        tl.store(k_ptr + offs * 2 + 1, b, mask=mask)


@triton.jit
def _write(y_ptr, z_ptr, k_ptr, a, b, c, offs, mask, N, p, HOW: tl.constexpr, LAST: tl.constexpr):
    """Of a piece what it holds, of a whole row the result and what is kept. For var p is the correction."""
    if LAST == "piece":
        tl.store(y_ptr + offs, a, mask=mask)
        if HOW != "sum" and HOW != "prod" and HOW != "max":
            tl.store(z_ptr + offs, b, mask=mask)
        if HOW == "zeros":
            tl.store(k_ptr + offs, c, mask=mask)
    else:
        if k_ptr is not None:
            _keep(k_ptr, a, b, offs, mask, HOW)
        if HOW == "index":
            tl.store(z_ptr + offs, b, mask=mask)
        if HOW == "logsumexp":
            # For 16 bits to 2^-22 and in a fifth of the instructions, which every lane of a row repeats.
            a += libdevice.fast_logf(b) if y_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.log(b)
        if HOW == "var":
            a = b / tl.maximum((N + 0.0) - p, 0.0)
        if HOW == "zeros":
            a = c
        if LAST == "mean":
            a = a / (N + 0.0)
        elif LAST == "sqrt":
            a = tl.sqrt_rn(a)
        elif LAST == "root":
            a = libdevice.pow(a, 1.0 / p)
        elif LAST == "negated":
            a = -a
        if LAST != "none":
            tl.store(y_ptr + offs, a.to(y_ptr.dtype.element_ty), mask=mask)  # pyright: ignore[reportOptionalMemberAccess]


@triton.jit
def _reduce_tile(
    x_ptr, y_ptr, z_ptr, k_ptr, M, N, p,
    HOW: tl.constexpr, TERM: tl.constexpr, LAST: tl.constexpr, LEADS: tl.constexpr, GROUP: tl.constexpr,
    FILLED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whole rows, BLOCK_M at a time. If they are FILLED, tiles have neither rows nor columns to spare."""
    let_follow(LEADS)
    # The place of an extreme is found by a second read.
    HINT: tl.constexpr = "" if HOW == "index" else ONCE  # pyright: ignore[reportAssignmentType]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: M * N may pass 2**31
        inside = (offs_m < M)[:, None] & (offs_n < N)
        if FILLED:
            a = _term(tl.load(x_ptr + offs_m[:, None] * BLOCK_N + offs_n, eviction_policy=HINT), p, TERM)
        else:
            x = tl.load(x_ptr + offs_m[:, None] * N + offs_n, mask=inside, other=0.0, eviction_policy=HINT)
            a = tl.where(inside, _term(x, p, TERM), _neutral(HOW))
        if HOW == "index":
            a = tl.reduce(tl.reshape(a, [BLOCK_M, BLOCK_N // GROUP, GROUP]), 2, _larger)
            b = tl.arange(0, BLOCK_N // GROUP)[None, :] * GROUP + tl.zeros([BLOCK_M, BLOCK_N // GROUP], tl.int32)
        else:
            b = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        c = b
        if HOW == "count":
            b = tl.where(inside, 1.0, 0.0) + b
        elif HOW == "zeros":
            c = a
            b = tl.where(a == 0.0, 1.0, 0.0)
            a = tl.where(a == 0.0, 1.0, a)
        if HOW == "logsumexp":
            m = tl.max(a, axis=1)
            b = tl.sum(tl.exp2(a * LOG2_E - (_finite(m) * LOG2_E)[:, None]), axis=1)
            a = m
        elif HOW == "var":
            if FILLED and x_ptr.dtype.element_ty.primitive_bitwidth == 16:  # whose sums of equal elements are exact
                mean = tl.sum(a * (1.0 / BLOCK_N), axis=1)
            else:
                head = tl.load(x_ptr + offs_m * N, mask=offs_m < M, other=0.0).to(tl.float32)
                mean = _near(a, head, True if FILLED else inside, N + 0.0)
            apart = a - mean[:, None]
            apart = apart if FILLED else tl.where(inside, apart, 0.0)
            a, b = mean, tl.sum(apart * apart, axis=1)
        else:
            a, b, c = _fold(a, b, c, HOW)
        if HOW == "index":
            rows = tl.minimum(offs_m, M - 1)  # there is none to read beyond
            b = _place_in_group(x_ptr, rows * N, N, a, b, TERM, GROUP)
        _write(y_ptr, z_ptr, k_ptr, a, b, c, offs_m, offs_m < M, N, p, HOW, LAST)


@triton.jit
def _reduce_long(
    x_ptr, y_ptr, z_ptr, k_ptr, N, chunk, p,
    HOW: tl.constexpr, TERM: tl.constexpr, LAST: tl.constexpr, LEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A piece of a row, or all of it."""
    let_follow(LEADS)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    begin = row * N + piece * chunk
    end = row * N + tl.minimum((piece + 1) * chunk, N)
    # A row of any length: from the first multiple of 16 on, accesses are 16 bytes wide.
    first = tl.multiple_of((begin + 15) // 16 * 16, 16)
    rest = first + tl.maximum(end - first, 0) // BLOCK_N * BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    lanes = tl.arange(0, BLOCK_N // GROUP)[None, :] * GROUP
    a = tl.full([1, BLOCK_N // GROUP], _neutral(HOW), tl.float32)
    b = tl.zeros([1, BLOCK_N // GROUP], tl.int32 if HOW == "index" else tl.float32)
    c = tl.full([1, BLOCK_N // GROUP], 1.0 if HOW == "zeros" else 0.0, tl.float32)
    if HOW == "var":
        is_there = offs_n < end - begin
        some = _term(tl.load(x_ptr + begin + offs_n, mask=is_there, other=0.0), p, TERM)
        head = tl.load(x_ptr + begin + tl.arange(0, 1)).to(tl.float32)
        near = _near(some, head, is_there, tl.minimum(end - begin, BLOCK_N).to(tl.float32))
        c += near[:, None]
    if begin < first:
        inside = offs_n < tl.minimum(first, end) - begin
        x = tl.load(x_ptr + begin + offs_n, mask=inside, other=0.0)
        a, b, c = _step_by_groups(a, b, c, _term(x, p, TERM), lanes, inside, HOW, True, GROUP)
    for start in range(first, rest, BLOCK_N):
        x = tl.load(x_ptr + start + offs_n, eviction_policy=ONCE)
        place = (start - begin).to(tl.int32) + lanes
        a, b, c = _step_by_groups(a, b, c, _term(x, p, TERM), place, True, HOW, False, GROUP)
    if rest < end:
        inside = offs_n < end - rest
        x = tl.load(x_ptr + rest + offs_n, mask=inside, other=0.0)
        place = (rest - begin).to(tl.int32) + lanes
        a, b, c = _step_by_groups(a, b, c, _term(x, p, TERM), place, inside, HOW, True, GROUP)
    if HOW == "var":
        a, b = _moments(a, b, near, end - begin)
    else:
        a, b, c = _fold(a, b, c, HOW)
    if HOW == "index":
        b = _place_in_group(x_ptr, begin + tl.zeros([1], tl.int64), end - begin, a, b, TERM, GROUP)
    offs = row * tl.num_programs(1) + piece + tl.arange(0, 1)
    _write(y_ptr, z_ptr, k_ptr, a, b, c, offs, None, N, p, HOW, LAST)


@triton.jit
def _reduce_columns(
    x_ptr, y_ptr, z_ptr, k_ptr, N, inner, tiles, chunk, p,
    HOW: tl.constexpr, TERM: tl.constexpr, LAST: tl.constexpr, LEADS: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A piece of BLOCK_I columns of [N, inner], or all of them."""
    let_follow(LEADS)
    program = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    outer = program // tiles
    offs_i = program % tiles * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    x_ptr += outer * N * inner + offs_i[:, None]
    a = tl.full([BLOCK_I, BLOCK_N], _neutral(HOW), tl.float32)
    b = tl.zeros([BLOCK_I, BLOCK_N], tl.int32 if HOW == "index" else tl.float32)
    c = tl.full([BLOCK_I, BLOCK_N], 1.0 if HOW == "zeros" else 0.0, tl.float32)
    length = (tl.minimum((piece + 1) * chunk, N) - piece * chunk).to(tl.int32)
    x_ptr += piece * chunk * inner
    if HOW == "var":
        is_there = (offs_i < inner)[:, None] & (offs_n < length)
        some = _term(tl.load(x_ptr + offs_n.to(tl.int64) * inner, mask=is_there, other=0.0), p, TERM)
        head = tl.load(x_ptr, mask=(offs_i < inner)[:, None], other=0.0).to(tl.float32)
        near = _near(some, tl.sum(head, axis=1), is_there, tl.minimum(length, BLOCK_N).to(tl.float32))
        c += near[:, None]
    for start in range(0, length, BLOCK_N):
        n = start + offs_n
        inside = (offs_i < inner)[:, None] & (n < length)
        x = tl.load(x_ptr + n.to(tl.int64) * inner, mask=inside, other=0.0, eviction_policy=ONCE)
        a, b, c = _step(a, b, c, _term(x, p, TERM), n, inside, HOW, True)
    if HOW == "var":
        a, b = _moments(a, b, near, length)
    else:
        a, b, c = _fold(a, b, c, HOW)
    offs = (outer * inner + offs_i) * tl.num_programs(1) + piece
    _write(y_ptr, z_ptr, k_ptr, a, b, c, offs, offs_i < inner, N, p, HOW, LAST)


@triton.jit
def _reduce_pieces(
    a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, k_ptr, M, N, pieces, chunk, p,
    HOW: tl.constexpr, TWO: tl.constexpr, LAST: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What the pieces [M, pieces] of rows of N hold, put together: the rows, or larger pieces."""
    let_follow(LEADS)
    await_leader(FOLLOWS)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    offs = offs_m[:, None] * pieces + offs_n
    inside = (offs_m < M)[:, None] & (offs_n < pieces)
    begin = offs_n.to(tl.int64) * chunk
    a = tl.load(a_ptr + offs, mask=inside, other=_neutral(HOW))
    c = a
    if c_ptr is not None:
        c = tl.load(c_ptr + offs, mask=inside, other=1.0)
    elif HOW == "var":
        length = tl.where(offs_n < pieces, tl.minimum(begin + chunk, N) - begin, 0)
        c = length.to(tl.float32) + tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b = a
    if TWO:
        b = tl.load(b_ptr + offs, mask=inside, other=0)
    if HOW == "index":
        b += begin
    a, b, c = _fold(a, b, c, HOW, 2**63 - 1)
    _write(y_ptr, z_ptr, k_ptr, a, b, c, offs_m, offs_m < M, N, p, HOW, LAST)


@triton.jit
def _reduce_bwd(
    x_ptr, y_ptr, dy_ptr, k_ptr, dx_ptr, M, N, inner, tiles, p,
    KIND: tl.constexpr, FILLED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of each element of x [M, N, inner] from its row's result y, the gradient of that, and what forward
    has kept. If they are FILLED, tiles have neither rows nor columns to spare."""
    blocks = tl.cdiv(N, BLOCK_N)
    program = (tl.program_id(0) // blocks).to(tl.int64)
    offs_n = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if inner == 1:  # BLOCK_M rows
        offs_m = program * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = offs_m < M
        offs = offs_m[:, None] * N + offs_n
    else:  # BLOCK_M columns
        offs_i = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = offs_i < inner
        offs_m = program // tiles * inner + offs_i
        offs = program // tiles * N * inner + offs_n * inner + offs_i[:, None]
    if FILLED:
        x = tl.load(x_ptr + offs, eviction_policy="evict_last").to(tl.float32)
    else:
        inside = is_row[:, None] & (offs_n < N)
        x = tl.load(x_ptr + offs, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    y = tl.load(y_ptr + offs_m, mask=is_row, other=0.0).to(tl.float32)[:, None]
    dy = tl.load(dy_ptr + offs_m, mask=is_row, other=0.0).to(tl.float32)[:, None]
    sign = tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
    if KIND == "logsumexp":
        dx = dy * exp(x - y)
    elif KIND == "norm1":
        dx = dy * sign
    elif KIND == "norm2":
        dx = tl.where(y == 0.0, 0.0, x * (dy / y))
    elif KIND == "normp":
        slope = tl.where(y == 0.0, 0.0, dy / libdevice.pow(y, p - 1.0))
        dx = tl.where(x == 0.0, 0.0, sign * libdevice.pow(tl.abs(x), p - 1.0) * slope)
    elif KIND == "prod":
        product = tl.load(k_ptr + offs_m * 2, mask=is_row, other=0.0)[:, None]  # of what is not zero
        zeros = tl.load(k_ptr + offs_m * 2 + 1, mask=is_row, other=0.0)[:, None]
        only = tl.where((zeros == 1.0) & (x == 0.0), product, 0.0)
        dx = dy * tl.where(zeros == 0.0, product / tl.where(x == 0.0, 1.0, x), only)
    else:
        kept = tl.load(k_ptr + offs_m, mask=is_row, other=0.0)[:, None]
        if KIND == "var":  # kept: the mean
            dx = 2.0 * dy / (N - p) * (x - kept)
        elif KIND == "amax" or KIND == "amin":  # kept: how many are equal to the result
            dx = tl.where(x == y, dy / kept, dy * 0.0)
        else:  # the greatest or smallest norm
            dx = sign * tl.where(tl.abs(x) == y, dy / kept, dy * 0.0)
    if FILLED:
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty))
    else:
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=inside)

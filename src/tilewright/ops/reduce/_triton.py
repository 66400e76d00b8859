"""Triton kernels of reductions: over whole rows, parts of rows and columns, and their gradients.

TERM is the function of each element, COMBINE how terms are combined, FINISH the function of the result ("part": it is a
partial result). COMBINE is sum, prod, max, index, logsumexp, var, count (a maximum and how many elements equal it) or
zeros (the product of the nonzero elements, the number of zeros, and the product of all).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tilewright.ops._exp import LOG2_E, exp
from tilewright.runtime.pdl import launch_dependents, wait_for_previous

EVICT_FIRST = tl.constexpr("evict_first")  # data that is read once leaves L2 first, so that outputs may stay


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _mul(a, b):
    return a * b


@triton.jit
def _identity(COMBINE: tl.constexpr):
    """Return the identity element."""
    if COMBINE == "prod" or COMBINE == "zeros":
        return 1.0
    elif COMBINE == "sum" or COMBINE == "var":
        return 0.0
    else:
        return -float("inf")


@triton.jit
def _finite(m):
    """Return the maximum to subtract: 0 for an infinite one, since inf - inf is NaN."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def _term(x, p, TERM: tl.constexpr):
    x = x.to(tl.float32)
    if TERM == "negated":
        x *= -1.0  # a free modifier in SASS, unlike 0 - x, which Triton makes of -x
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
def _step(a, b, c, x, index, in_bounds, COMBINE: tl.constexpr, MASKED: tl.constexpr):
    """Combine the terms x with the accumulators of each lane: a, and b and c where one is not enough."""
    if COMBINE == "sum":
        a += tl.where(in_bounds, x, 0.0) if MASKED else x
    elif COMBINE == "prod":
        a *= tl.where(in_bounds, x, 1.0) if MASKED else x
    elif COMBINE == "zeros":
        x = tl.where(in_bounds, x, 1.0) if MASKED else x
        a *= tl.where(x == 0.0, 1.0, x)
        b += tl.where(x == 0.0, 1.0, 0.0)
        c *= x
    elif COMBINE == "var":  # the sums of distances from c and of their squares
        distance = tl.where(in_bounds, x - c, 0.0) if MASKED else x - c
        a += distance
        b += distance * distance
    else:
        x = tl.where(in_bounds, x, -float("inf")) if MASKED else x
        if COMBINE == "max":
            a = _max(a, x)
        elif COMBINE == "count":
            is_equal = (x == a) & in_bounds if MASKED else x == a
            b = tl.where(x > a, 1.0, b + tl.where(is_equal, 1.0, 0.0))
            a = _max(a, x)
        elif COMBINE == "index":  # maximum and its index; the first of equal elements, and a NaN wins
            is_better = ~(x <= a) & (a == a)
            a = tl.where(is_better, x, a)
            b = tl.where(is_better, index, b)
        else:  # logsumexp: maximum and the sum of exp(x - maximum), with one exp per element
            distance = tl.where(x == a, 0.0, x - a)
            e = exp(-tl.abs(distance))
            b = tl.where(distance > 0.0, b * e + 1.0, b + e)
            a = tl.maximum(a, x)
    return a, b, c


@triton.jit
def _step_by_groups(a, b, c, x, index, in_bounds, COMBINE: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr):
    """Combine GROUP neighbors of one thread at once: a lane stands for a group, an index for its first element."""
    if GROUP == 1:
        return _step(a, b, c, x, index, in_bounds, COMBINE, MASKED)
    else:
        x = tl.where(in_bounds, x, -float("inf")) if MASKED else x
        x = tl.reshape(x, [1, x.shape[1] // GROUP, GROUP])
        largest = tl.reduce(x, 2, _max)
        if COMBINE == "index":
            is_better = ~(largest <= a) & (a == a)
            return tl.where(is_better, largest, a), tl.where(is_better, index, b), c
        else:
            m = tl.maximum(a, largest)
            shift = _finite(m) * LOG2_E
            e = tl.sum(tl.exp2(x * LOG2_E - shift[:, :, None]), axis=2)
            return m, b * tl.exp2(a * LOG2_E - shift) + e, c


@triton.jit
def _combine_lanes(a, b, c, COMBINE: tl.constexpr, MAX_INDEX: tl.constexpr = 2**31 - 1):
    """Combine the lanes of each row [BLOCK_M, BLOCK_N].

    For index b is the index. For parts of var c is the count. For zeros c is the product of all elements, which is not
    zero times the other product if that one overflows.
    """
    if COMBINE == "sum":
        a = tl.sum(a, axis=1)
        b = a
    elif COMBINE == "prod":
        a = tl.reduce(a, 1, _mul)
        b = a
    elif COMBINE == "max":
        a = tl.reduce(a, 1, _max)
        b = a
    elif COMBINE == "count":
        best = tl.reduce(a, 1, _max)
        b = tl.sum(tl.where(a == best[:, None], b, 0.0), axis=1)
        a = best
    elif COMBINE == "zeros":
        a = tl.reduce(a, 1, _mul)
        b = tl.sum(b, axis=1)
        c = tl.reduce(c, 1, _mul)
    elif COMBINE == "index":
        best = tl.reduce(a, 1, _max)
        is_best = (a == best[:, None]) | (a != a)
        b = tl.min(tl.where(is_best, b, MAX_INDEX), axis=1)
        a = best
    elif COMBINE == "logsumexp":
        m = tl.max(a, axis=1)
        b = tl.sum(b * tl.exp2((a - _finite(m)[:, None]) * LOG2_E), axis=1)
        a = m
    else:
        is_first = tl.arange(0, a.shape[1])[None, :] == 0
        head = tl.sum(tl.where(is_first, a, 0.0), axis=1)  # close to all means
        mean = head + tl.sum((a - head[:, None]) * (c / tl.sum(c, axis=1)[:, None]), axis=1)
        distance = a - mean[:, None]
        b = tl.sum(b + c * distance * distance, axis=1)
        a = mean
    return a, b, c


@triton.jit
def _mean_estimate(x, first, in_bounds, count):
    """Return an estimate of each row's mean from `count` of its elements; exact where all are equal."""
    return first + tl.sum(tl.where(in_bounds, (x - first[:, None]) * (1.0 / count), 0.0), axis=1)


@triton.jit
def _moments(a, b, near, N):
    """Return the mean of N elements and the sum of squared distances from it, from sums of distances from `near`."""
    a, b = tl.sum(a, axis=1), tl.sum(b, axis=1)
    mean = a / (N + 0.0)
    distance = tl.where(b == float("inf"), b, b - a * mean)
    return near + mean, tl.where(distance < 0.0, 0.0, distance)


@triton.jit
def _index_in_group(x_ptr, starts, N, a, b, TERM: tl.constexpr, GROUP: tl.constexpr, SHIFTED: tl.constexpr = False):
    """Return the index of the extreme a in its group, which starts at b and is read again, from L1 or L2.

    SHIFTED: the first group starts before the row.
    """
    indices = b[:, None] + tl.arange(0, GROUP)[None, :]
    in_bounds = (indices >= 0) & (indices < N) if SHIFTED else indices < N
    x = _term(tl.load(x_ptr + starts[:, None] + indices, mask=in_bounds, other=0.0), 0.0, TERM)
    is_extreme = in_bounds & ((x == a[:, None]) | (x != x))
    return tl.min(tl.where(is_extreme, indices, 2**31 - 1), axis=1)


@triton.jit
def _keep(k_ptr, a, b, offs, mask, COMBINE: tl.constexpr):
    """Store what backward needs of a row besides its result."""
    if COMBINE == "var":
        tl.store(k_ptr + offs, a, mask=mask)
    elif COMBINE == "count":
        tl.store(k_ptr + offs, b, mask=mask)
    else:
        tl.store(k_ptr + offs * 2, a, mask=mask)
        tl.store(k_ptr + offs * 2 + 1, b, mask=mask)


@triton.jit
def _write(y_ptr, z_ptr, k_ptr, a, b, c, offs, mask, N, p, COMBINE: tl.constexpr, FINISH: tl.constexpr):
    """Store a partial result, or the result of a row and what is kept for backward. For var p is the correction."""
    if FINISH == "part":
        tl.store(y_ptr + offs, a, mask=mask)
        if COMBINE != "sum" and COMBINE != "prod" and COMBINE != "max":
            tl.store(z_ptr + offs, b, mask=mask)
        if k_ptr is not None:
            tl.store(k_ptr + offs, c, mask=mask)
    else:
        if k_ptr is not None:
            _keep(k_ptr, a, b, offs, mask, COMBINE)
        if COMBINE == "index":
            tl.store(z_ptr + offs, b, mask=mask)
        if COMBINE == "logsumexp":
            # Accurate to 2^-22, enough for 16-bit results, in a fifth of the instructions, which every lane repeats.
            a += libdevice.fast_logf(b) if y_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.log(b)
        if COMBINE == "var":
            a = b / tl.maximum((N + 0.0) - p, 0.0)
        if COMBINE == "zeros":
            a = c
        if FINISH == "mean":
            a = a / (N + 0.0)
        elif FINISH == "sqrt":
            a = tl.sqrt_rn(a)
        elif FINISH == "root":
            a = libdevice.pow(a, 1.0 / p)
        elif FINISH == "negated":
            a = -a
        if FINISH != "none":
            tl.store(y_ptr + offs, a.to(y_ptr.dtype.element_ty), mask=mask)  # pyright: ignore[reportOptionalMemberAccess]


@triton.jit
def _load_shifted(x_ptr, offs_m, M, N, WHOLE: tl.constexpr, VEC: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load rows that start anywhere as the vectors that they overlap; return elements, and which are in the row.

    WHOLE: the tensor's last vector is complete; otherwise it is loaded by element.
    """
    begin = tl.minimum(offs_m, M - 1) * N
    shift = (begin % VEC).to(tl.int32)  # elements of the first vector that belong to the row before
    lanes = tl.arange(0, BLOCK_N)[None, :]
    position = lanes - shift[:, None]  # [BLOCK_M, BLOCK_N]
    in_bounds = position.to(tl.uint32) < N
    mask = lanes // VEC * VEC - shift[:, None] < N  # by vectors
    offs = (begin // VEC * VEC)[:, None] + lanes
    if WHOLE:
        x = tl.load(x_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT_FIRST)
    else:
        whole = tl.cast(M, tl.int64) * N // VEC * VEC  # elements in complete vectors
        is_whole = (begin // VEC * VEC)[:, None] + lanes // VEC * VEC < whole
        x = tl.load(x_ptr + offs, mask=mask & is_whole, other=0.0, eviction_policy=EVICT_FIRST)
        rest = in_bounds & (offs >= whole)
        x = tl.where(rest, tl.load(x_ptr + offs, mask=rest, other=0.0), x)
    return x, in_bounds


@triton.jit
def _reduce_tile(
    x_ptr, y_ptr, z_ptr, k_ptr, stride_xm, M, N, p,
    COMBINE: tl.constexpr, TERM: tl.constexpr, FINISH: tl.constexpr, PDL: tl.constexpr, GROUP: tl.constexpr,
    FORM: tl.constexpr, WHOLE: tl.constexpr, VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Reduce whole rows, BLOCK_M at a time.

    FORM: "even", where tiles need no masks; "uneven", with rows of a multiple of VEC elements; "shifted", with rows
    that start anywhere, read as the aligned vectors of VEC elements that they overlap. WHOLE: the tensor is whole
    vectors. No stride: rows follow each other.
    """
    EVEN: tl.constexpr = FORM == "even"  # pyright: ignore[reportAssignmentType]
    launch_dependents(PDL)
    # The index of an extreme is found by a second read.
    HINT: tl.constexpr = "" if COMBINE == "index" else EVICT_FIRST  # pyright: ignore[reportAssignmentType]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: M * N may exceed 2**31
        in_bounds = (offs_m < M)[:, None] & (offs_n < N)
        if EVEN:
            a = _term(tl.load(x_ptr + offs_m[:, None] * BLOCK_N + offs_n, eviction_policy=HINT), p, TERM)
        elif FORM == "shifted":
            x, in_bounds = _load_shifted(x_ptr, offs_m, M, N, WHOLE, VEC, BLOCK_N)
            a = tl.where(in_bounds, _term(x, p, TERM), _identity(COMBINE))
        else:
            length = N // VEC * VEC  # so that the compiler knows
            step = length if stride_xm is None else stride_xm // VEC * VEC
            in_bounds = (offs_m < M)[:, None] & (offs_n < length)
            x = tl.load(x_ptr + offs_m[:, None] * step + offs_n, mask=in_bounds, other=0.0, eviction_policy=HINT)
            a = tl.where(in_bounds, _term(x, p, TERM), _identity(COMBINE))
        if COMBINE == "index":
            a = tl.reduce(tl.reshape(a, [BLOCK_M, BLOCK_N // GROUP, GROUP]), 2, _max)
            b = tl.arange(0, BLOCK_N // GROUP)[None, :] * GROUP + tl.zeros([BLOCK_M, BLOCK_N // GROUP], tl.int32)
            if FORM == "shifted":
                b -= ((offs_m * N) % VEC).to(tl.int32)[:, None]
        else:
            b = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        c = b
        if COMBINE == "count":
            b = tl.where(in_bounds, 1.0, 0.0) + b
        elif COMBINE == "zeros":
            c = a
            b = tl.where(a == 0.0, 1.0, 0.0)
            a = tl.where(a == 0.0, 1.0, a)
        if COMBINE == "logsumexp":
            m = tl.max(a, axis=1)
            b = tl.sum(tl.exp2(a * LOG2_E - (_finite(m) * LOG2_E)[:, None]), axis=1)
            a = m
        elif COMBINE == "var":
            if EVEN and x_ptr.dtype.element_ty.primitive_bitwidth == 16:  # sums of equal 16-bit elements are exact
                mean = tl.sum(a * (1.0 / BLOCK_N), axis=1)
            else:
                stride = N if stride_xm is None else stride_xm
                head = tl.load(x_ptr + offs_m * stride, mask=offs_m < M, other=0.0).to(tl.float32)
                mean = _mean_estimate(a, head, True if EVEN else in_bounds, N + 0.0)
            distance = a - mean[:, None]
            distance = distance if EVEN else tl.where(in_bounds, distance, 0.0)
            a, b = mean, tl.sum(distance * distance, axis=1)
        else:
            a, b, c = _combine_lanes(a, b, c, COMBINE)
        if COMBINE == "index":
            rows = tl.minimum(offs_m, M - 1)  # no read past the last row
            starts = rows * (N if stride_xm is None else stride_xm)
            b = _index_in_group(x_ptr, starts, N, a, b, TERM, GROUP, FORM == "shifted")
        _write(y_ptr, z_ptr, k_ptr, a, b, c, offs_m, offs_m < M, N, p, COMBINE, FINISH)


@triton.jit
def _reduce_long(
    x_ptr, y_ptr, z_ptr, k_ptr, stride_xm, N, part_size, p,
    COMBINE: tl.constexpr, TERM: tl.constexpr, FINISH: tl.constexpr, PDL: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Reduce a part of a row, or all of it. No stride: rows follow each other."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    stride = N if stride_xm is None else stride_xm
    begin = row * stride + part * part_size
    end = row * stride + tl.minimum((part + 1) * part_size, N)
    # Whatever the row length, accesses are 16 bytes wide from the first multiple of 16 elements on.
    first = tl.multiple_of((begin + 15) // 16 * 16, 16)
    rest = first + tl.maximum(end - first, 0) // BLOCK_N * BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    lanes = tl.arange(0, BLOCK_N // GROUP)[None, :] * GROUP
    a = tl.full([1, BLOCK_N // GROUP], _identity(COMBINE), tl.float32)
    b = tl.zeros([1, BLOCK_N // GROUP], tl.int32 if COMBINE == "index" else tl.float32)
    c = tl.full([1, BLOCK_N // GROUP], 1.0 if COMBINE == "zeros" else 0.0, tl.float32)
    if COMBINE == "var":
        exists = offs_n < end - begin
        some = _term(tl.load(x_ptr + begin + offs_n, mask=exists, other=0.0), p, TERM)
        head = tl.load(x_ptr + begin + tl.arange(0, 1)).to(tl.float32)
        near = _mean_estimate(some, head, exists, tl.minimum(end - begin, BLOCK_N).to(tl.float32))
        c += near[:, None]
    if begin < first:
        in_bounds = offs_n < tl.minimum(first, end) - begin
        x = tl.load(x_ptr + begin + offs_n, mask=in_bounds, other=0.0)
        a, b, c = _step_by_groups(a, b, c, _term(x, p, TERM), lanes, in_bounds, COMBINE, True, GROUP)
    for start in range(first, rest, BLOCK_N):
        x = tl.load(x_ptr + start + offs_n, eviction_policy=EVICT_FIRST)
        index = (start - begin).to(tl.int32) + lanes
        a, b, c = _step_by_groups(a, b, c, _term(x, p, TERM), index, True, COMBINE, False, GROUP)
    if rest < end:
        in_bounds = offs_n < end - rest
        x = tl.load(x_ptr + rest + offs_n, mask=in_bounds, other=0.0)
        index = (rest - begin).to(tl.int32) + lanes
        a, b, c = _step_by_groups(a, b, c, _term(x, p, TERM), index, in_bounds, COMBINE, True, GROUP)
    if COMBINE == "var":
        a, b = _moments(a, b, near, end - begin)
    else:
        a, b, c = _combine_lanes(a, b, c, COMBINE)
    if COMBINE == "index":
        b = _index_in_group(x_ptr, begin + tl.zeros([1], tl.int64), end - begin, a, b, TERM, GROUP)
    offs = row * tl.num_programs(1) + part + tl.arange(0, 1)
    _write(y_ptr, z_ptr, k_ptr, a, b, c, offs, None, N, p, COMBINE, FINISH)


@triton.jit
def column_vectors(program, columns_v, width_v, slice_v, WIDE: tl.constexpr, VEC: tl.constexpr, BLOCK_I: tl.constexpr):
    """Return slice, column and offset of a program's columns of all slices, and which exist: [BLOCK_I, 1].

    Sizes are given in vectors of VEC elements, so that the compiler knows that accesses are as wide. WIDE: columns do
    not fit into int32.
    """
    offs = tl.arange(0, BLOCK_I)[:, None]
    vector = program.to(tl.int64 if WIDE else tl.int32) * (BLOCK_I // VEC) + offs // VEC
    outer = vector // width_v
    column = vector % width_v * VEC + offs % VEC
    offs_i = (outer.to(tl.int64) * slice_v + vector % width_v) * VEC + offs % VEC
    return outer, column, offs_i, vector < columns_v


@triton.jit
def _reduce_columns(
    x_ptr, y_ptr, z_ptr, k_ptr, columns_v, rows, width_v, stride_v, slice_v, tail, inner, R, part_size, N, p,
    COMBINE: tl.constexpr, TERM: tl.constexpr, FINISH: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
    VEC: tl.constexpr, FORM: tl.constexpr, FOLD: tl.constexpr, UNROLL: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Reduce a part of the columns of [rows, width], or all of them, in every slice of memory.

    A row is FOLD rows of `inner` elements, so that it is a multiple of VEC elements; `tail` elements follow the last
    one. Columns, width of rows and strides are counted in vectors. Results are [inner / R]: R neighboring columns are
    reduced too. FORM: "columns", with FOLD = R = 1; "folded", where the partial results of FOLD x R columns are
    combined later; "span", where a program takes all R columns of a result. UNROLL loads are in flight per thread. A
    warp reads whole rows, so that threads exchange little.
    """
    launch_dependents(PDL)
    SPAN: tl.constexpr = FORM == "span"  # pyright: ignore[reportAssignmentType]
    part = tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(1) if FINISH == "part" else 1
    stride = tl.cast(stride_v, tl.int64) * VEC
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    if SPAN:
        span = tl.program_id(0).to(tl.int64)
        outer = span // (inner // R)
        column = tl.arange(0, BLOCK_I)[:, None]
        offs_i = (outer * slice_v + span % (inner // R) * (R // VEC)) * VEC + column
        size = R // VEC * VEC
        exists = column < size
    else:
        outer, column, offs_i, exists = column_vectors(
            tl.program_id(0), columns_v, width_v, slice_v, WIDE, VEC, BLOCK_I
        )
        size = BLOCK_I
    begin = part * part_size
    length = (tl.minimum(begin + part_size, rows) - begin).to(tl.int32)
    x_ptrs = x_ptr + begin * stride + offs_n * stride + offs_i
    a = tl.full([BLOCK_I, BLOCK_N], _identity(COMBINE), tl.float32)
    b = tl.zeros([BLOCK_I, BLOCK_N], tl.int32 if COMBINE == "index" else tl.float32)
    c = tl.full([BLOCK_I, BLOCK_N], 1.0 if COMBINE == "zeros" else 0.0, tl.float32)
    if COMBINE == "var":
        is_head = (offs_n == 0) & (column == 0) if SPAN else exists & (offs_n == 0)
        head = tl.sum(tl.load(x_ptrs, mask=is_head, other=0.0).to(tl.float32), axis=1)
        head = tl.sum(head, axis=0) + tl.zeros([BLOCK_I], tl.float32) if SPAN else head
        weight = 1.0 / (tl.minimum(length, UNROLL * BLOCK_N) * (tl.minimum(size, BLOCK_I) if SPAN else 1))
        for u in tl.static_range(UNROLL):
            some = exists & (u * BLOCK_N + offs_n < length)
            first = tl.load(x_ptrs + u * BLOCK_N * stride, mask=some, other=0.0).to(tl.float32)
            c += tl.where(some, (first - head[:, None]) * weight, 0.0)
        near = tl.sum(c, axis=1)
        near = head + (tl.sum(near, axis=0) if SPAN else near)
        c = tl.zeros([BLOCK_I, BLOCK_N], tl.float32) + near[:, None]
    STEP: tl.constexpr = UNROLL * BLOCK_N
    full = length // STEP * STEP
    for start in range(0, size, BLOCK_I):
        ptrs = x_ptrs + start
        if SPAN:
            exists = start + column < size
        for n in range(0, full, STEP):
            xs = ()
            for u in tl.static_range(UNROLL):
                x = tl.load(ptrs + u * BLOCK_N * stride, mask=exists, other=0.0, eviction_policy=EVICT_FIRST)
                xs = xs + (x,)  # noqa: RUF005
            for u in tl.static_range(UNROLL):
                index = n + u * BLOCK_N + offs_n
                a, b, c = _step(a, b, c, _term(xs[u], p, TERM), index, exists, COMBINE, SPAN)
            ptrs += STEP * stride
        if full < length:
            xs = ()
            for u in tl.static_range(UNROLL):
                in_bounds = exists & (full + u * BLOCK_N + offs_n < length)
                x = tl.load(ptrs + u * BLOCK_N * stride, mask=in_bounds, other=0.0, eviction_policy=EVICT_FIRST)
                xs = xs + (x,)  # noqa: RUF005
            for u in tl.static_range(UNROLL):
                index = full + u * BLOCK_N + offs_n
                in_bounds = exists & (index < length)
                a, b, c = _step(a, b, c, _term(xs[u], p, TERM), index, in_bounds, COMBINE, True)
    has_tail = (tail > 0) & (part == parts - 1)
    if has_tail:
        in_bounds = exists & (column < tail) & (offs_n == 0)
        x = tl.load(x_ptrs + length * stride, mask=in_bounds, other=0.0)
        a, b, c = _step(a, b, c, _term(x, p, TERM), length + offs_n, in_bounds, COMBINE, True)
    if SPAN:
        a = tl.reshape(a, [1, BLOCK_I * BLOCK_N])
        b = tl.reshape(b, [1, BLOCK_I * BLOCK_N])
        c = tl.reshape(c, [1, BLOCK_I * BLOCK_N])
        mask = None
        offs = span * parts + part + tl.arange(0, 1)[:, None]
        number = tl.zeros([1], tl.float32) + length.to(tl.float32) * size
        fold = 0
        if COMBINE == "var":
            near = tl.max(near, axis=0)
    else:
        mask = exists
        if FORM == "columns":
            fold = 0
            offs = outer.to(tl.int64) * width_v * VEC + column
            offs = offs * parts + part if FINISH == "part" else offs
        else:
            fold = column // inner
            row = outer.to(tl.int64) * (inner // R) + column % inner // R
            offs = (row * parts + part) * (FOLD * R) + fold * R + column % R
        number = length.to(tl.float32) + tl.where((column < tail) & has_tail, 1.0, 0.0)
        number = tl.reshape(number, [BLOCK_I])
    if COMBINE == "var":
        a, b = _moments(a, b, near, number)
        c = number
    else:
        a, b, c = _combine_lanes(a, b, c, COMBINE)
    a = a[:, None]
    b = b[:, None]
    if COMBINE == "index":
        b = (begin + b) * FOLD + fold
    if COMBINE == "var" or COMBINE == "zeros":
        c = c[:, None]
    _write(y_ptr, z_ptr, k_ptr, a, b, c, offs, mask, N, p, COMBINE, FINISH)


@triton.jit
def _combine_parts(
    a_ptr, b_ptr, c_ptr, y_ptr, z_ptr, k_ptr, M, N, parts, part_size, p,
    COMBINE: tl.constexpr, TWO: tl.constexpr, FINISH: tl.constexpr, PDL: tl.constexpr, WAITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Combine the partial results [M, parts] of rows of N into those of the rows, or of larger parts."""
    launch_dependents(PDL)
    wait_for_previous(WAITS)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    offs = offs_m[:, None] * parts + offs_n
    in_bounds = (offs_m < M)[:, None] & (offs_n < parts)
    begin = offs_n.to(tl.int64) * part_size
    a = tl.load(a_ptr + offs, mask=in_bounds, other=_identity(COMBINE))
    c = a
    if c_ptr is not None:
        c = tl.load(c_ptr + offs, mask=in_bounds, other=1.0 if COMBINE == "zeros" else 0.0)
    elif COMBINE == "var":
        length = tl.where(offs_n < parts, tl.minimum(begin + part_size, N) - begin, 0)
        c = length.to(tl.float32) + tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b = a
    if TWO:
        b = tl.load(b_ptr + offs, mask=in_bounds, other=0)
    if COMBINE == "index":
        b += begin
    a, b, c = _combine_lanes(a, b, c, COMBINE, 2**63 - 1)
    _write(y_ptr, z_ptr, k_ptr, a, b, c, offs_m, offs_m < M, N, p, COMBINE, FINISH)


@triton.jit
def _gradient(x, y, dy, kept, zeros, N, p, KIND: tl.constexpr):
    """Return the gradient of x from the result y of its row, the gradient of y and what forward kept."""
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
    elif KIND == "prod":  # kept: the product of the nonzero elements, and the number of zeros
        only = tl.where((zeros == 1.0) & (x == 0.0), kept, 0.0)
        dx = dy * tl.where(zeros == 0.0, kept / tl.where(x == 0.0, 1.0, x), only)
    elif KIND == "var":  # kept: the mean
        dx = 2.0 * dy / (N - p) * (x - kept)
    elif KIND == "amax" or KIND == "amin":  # kept: how many elements equal the result
        dx = tl.where(x == y, dy / kept, dy * 0.0)
    else:  # the inf or -inf norm
        dx = sign * tl.where(tl.abs(x) == y, dy / kept, dy * 0.0)
    return dx


@triton.jit
def _of_rows(y_ptr, dy_ptr, k_ptr, rows, mask, KIND: tl.constexpr):
    """Load the results of rows, their gradients and what forward kept, two values for prod."""
    y = tl.load(y_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    kept = y
    zeros = y
    if KIND == "prod":
        kept = tl.load(k_ptr + rows * 2, mask=mask, other=0.0)
        zeros = tl.load(k_ptr + rows * 2 + 1, mask=mask, other=0.0)
    elif k_ptr is not None:
        kept = tl.load(k_ptr + rows, mask=mask, other=0.0)
    return y, dy, kept, zeros


@triton.jit
def _reduce_bwd(
    x_ptr, y_ptr, dy_ptr, k_ptr, dx_ptr, M, N, p,
    KIND: tl.constexpr, EVEN: tl.constexpr, VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x [M, N] from the results y, their gradients and what forward kept.

    EVEN: tiles need no masks. N is a multiple of VEC."""
    blocks = tl.cdiv(N, BLOCK_N)
    program = (tl.program_id(0) // blocks).to(tl.int64)
    offs_n = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_m = program * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = offs_m < M
    if EVEN:
        offs = offs_m[:, None] * N + offs_n
        x = tl.load(x_ptr + offs, eviction_policy="evict_last").to(tl.float32)
    else:
        length = N // VEC * VEC  # as the compiler then knows, accesses are VEC elements wide
        offs = offs_m[:, None] * length + offs_n
        in_bounds = is_row[:, None] & (offs_n < length)
        x = tl.load(x_ptr + offs, mask=in_bounds, other=0.0, eviction_policy="evict_last").to(tl.float32)
    y, dy, kept, zeros = _of_rows(y_ptr, dy_ptr, k_ptr, offs_m, is_row, KIND)
    dx = _gradient(x, y[:, None], dy[:, None], kept[:, None], zeros[:, None], N, p, KIND)
    if EVEN:
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty))
    else:
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=in_bounds)


@triton.jit
def _flat_block_bwd(
    x_ptr, y_ptr, dy_ptr, k_ptr, dx_ptr, begin, M, N, p,
    KIND: tl.constexpr, MASKED: tl.constexpr, SHORT: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = begin // N
    at = (begin - row * N).to(tl.int32) + tl.arange(0, BLOCK // VEC)[:, None] * VEC
    lane = tl.arange(0, VEC)[None, :]
    offs = begin + tl.arange(0, BLOCK // VEC)[:, None] * VEC + lane
    mask = offs < tl.cast(M, tl.int64) * N if MASKED else None
    x = tl.load(x_ptr + offs, mask=mask, eviction_policy="evict_last").to(tl.float32)
    if SHORT:
        rows = row + (at + lane) // N
        y, dy, kept, zeros = _of_rows(y_ptr, dy_ptr, k_ptr, rows, rows < M, KIND)
    else:  # a vector has elements of one row, or of two
        rows = row + at // N
        y, dy, kept, zeros = _of_rows(y_ptr, dy_ptr, k_ptr, rows, rows < M, KIND)
        next_y, next_dy, next_kept, next_zeros = _of_rows(y_ptr, dy_ptr, k_ptr, rows + 1, rows + 1 < M, KIND)
        is_next = at % N + lane >= N
        y = tl.where(is_next, next_y, y)
        dy = tl.where(is_next, next_dy, dy)
        kept = tl.where(is_next, next_kept, kept)
        zeros = tl.where(is_next, next_zeros, zeros)
    dx = _gradient(x, y, dy, kept, zeros, N, p, KIND)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _reduce_flat_bwd(
    x_ptr, y_ptr, dy_ptr, k_ptr, dx_ptr, M, N, p,
    KIND: tl.constexpr, SHORT: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of rows that start anywhere, in blocks that start at multiples of VEC elements.

    SHORT: rows are shorter than that.
    """
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    total = tl.cast(M, tl.int64) * N
    if begin + BLOCK <= total:
        _flat_block_bwd(x_ptr, y_ptr, dy_ptr, k_ptr, dx_ptr, begin, M, N, p, KIND, False, SHORT, VEC, BLOCK)
    else:
        _flat_block_bwd(x_ptr, y_ptr, dy_ptr, k_ptr, dx_ptr, begin, M, N, p, KIND, True, SHORT, VEC, BLOCK)


@triton.jit
def _reduce_columns_bwd(
    x_ptr, y_ptr, dy_ptr, k_ptr, dx_ptr, columns_v, rows, width_v, stride_v, slice_v, tail, inner, R, N, p,
    KIND: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of BLOCK_N rows of BLOCK_I columns; the sizes are those of the forward kernel."""
    blocks = tl.cdiv(rows, BLOCK_N)
    block = tl.program_id(0) % blocks
    outer, column, offs_i, exists = column_vectors(
        tl.program_id(0) // blocks, columns_v, width_v, slice_v, WIDE, VEC, BLOCK_I
    )
    row = outer * (inner // R) + column % inner // R
    y, dy, kept, zeros = _of_rows(y_ptr, dy_ptr, k_ptr, row, exists, KIND)
    stride = tl.cast(stride_v, tl.int64) * VEC
    offs_n = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs = offs_n * stride + offs_i
    in_bounds = exists & (offs_n < rows)
    x = tl.load(x_ptr + offs, mask=in_bounds, other=0.0, eviction_policy="evict_last").to(tl.float32)
    dx = _gradient(x, y, dy, kept, zeros, N, p, KIND)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=in_bounds)
    if (tail > 0) & (block == blocks - 1):
        tail_offs = rows * stride + offs_i  # [BLOCK_I, 1]
        in_tail = exists & (column < tail)
        tail_x = tl.load(x_ptr + tail_offs, mask=in_tail, other=0.0).to(tl.float32)
        tail_dx = _gradient(tail_x, y, dy, kept, zeros, N, p, KIND)
        tl.store(dx_ptr + tail_offs, tail_dx.to(dx_ptr.dtype.element_ty), mask=in_tail)

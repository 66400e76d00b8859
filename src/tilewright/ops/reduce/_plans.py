"""Launch plans of reductions.

A reduction is a term of each element, a way to combine terms, and a function of the result: a norm is the root of a sum
of squares. Reading the input once is all the work, so what matters is that every multiprocessor always has loads in
flight. Short rows: several per program, as a tile. Few long rows: each is split into parts, whose partial results a
second kernel combines (and a third, where there are very many). Dimensions that are not the last are reduced in
columns, without a copy. There are no atomics and shapes alone fix the order, so results are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.reduce._triton import (
    _combine_parts,
    _reduce_bwd,
    _reduce_columns,
    _reduce_columns_bwd,
    _reduce_flat_bwd,
    _reduce_long,
    _reduce_tile,
)
from tilewright.runtime.configs import Config, ConfigTable
from tilewright.runtime.gpus import GPUFacts, gpu_facts
from tilewright.runtime.launch import Launcher, PreparedLaunch
from tilewright.runtime.pdl import dependent_launch, has_pdl
from tilewright.runtime.sizes import cdiv, next_power_of_2, rows_per_program

PROGRAMS_PER_SM = 32  # at most, at a time
MAX_ROUNDS = 4  # a row is split over at most this many times the programs that run at a time
ROWS_PER_SM = 8  # enough to fill the GPU; fewer rows are split
MAX_TILE = 8192  # elements of a row that one program takes at once
UNLIMITED = 2**31 - 1  # programs: one per tile
MAX_PARTS, PARTS_PER_STEP = 24576, 256  # one program combines the parts of a row; more are first combined in steps
COLUMN_PROGRAMS_PER_SM = 16
MIN_SPAN = 256  # neighboring columns from which one program reduces them to one result
MIN_ACCESS = 8  # bytes of a load; rows that do not allow it are read by other kernels
MAX_ODD_TILE = 4096  # bytes of such a row that one program takes at once
MAX_SHIFTED = 256  # length from which a row that is not a multiple of a vector is read element by element
MAX_FOLDS = 64  # rows that are read as one, so that its columns fill warps
WELL_FILLED = 0.85
WARP = 32  # threads
VECTOR = 16  # bytes
MAX_KEY = 65536  # elements: longer rows share a configuration
GROUPED = ("index", "logsumexp")  # whose steps cost more than a load unless they take neighbors together
GRADIENT_TILE = 2048  # elements of a gradient that one program writes
COLUMN_GRADIENT_TILE = 4096  # elements of a gradient in columns that one program writes
MAX_FLAT_ROW = 2**30  # elements: positions in a row fit into int32


class Kind(NamedTuple):
    """A reduction as its kernels know it."""

    combine: str  # how terms are combined: sum, prod, max, index, logsumexp, var, count, zeros
    term: str = "x"  # each element's
    finish: str = "x"  # applied to the result

    @property
    def has_two_values(self) -> bool:
        """Return whether a partial result takes two values."""
        return self.combine not in ("sum", "prod", "max")


KINDS = {
    "sum": Kind("sum"),
    "mean": Kind("sum", finish="mean"),
    "prod": Kind("prod"),
    "amax": Kind("max"),
    "amin": Kind("max", "negated", "negated"),
    "argmax": Kind("index", finish="none"),
    "argmin": Kind("index", "negated", "none"),
    "max": Kind("index"),  # with its index
    "min": Kind("index", "negated", "negated"),
    "norm0": Kind("sum", "nonzero"),
    "norm1": Kind("sum", "abs"),
    "norm2": Kind("sum", "square", "sqrt"),
    "normp": Kind("sum", "power", "root"),
    "norminf": Kind("max", "abs"),
    "norm-inf": Kind("max", "-abs", "negated"),
    "logsumexp": Kind("logsumexp"),
    "var": Kind("var"),
}
KEPT_FOR_BACKWARD = {  # how terms are combined where backward needs more of a row than its result
    "amax": "count",
    "amin": "count",
    "norminf": "count",
    "norm-inf": "count",
    "prod": "zeros",
    "var": "var",
}
NESTABLE = (
    "sum",
    "mean",
    "logsumexp",
    "norm1",
    "norm2",
    "normp",
)  # reducing groups, then their results, gives the same value and gradient


class Layout(NamedTuple):
    """A tensor as [outer, N, K, R], reduced over N and R; rows are [outer, N, 1, 1].

    It is contiguous, except that `stride` elements may lie between the starts of the rows of a matrix: of N elements if
    K = R = 1, or else of K elements, and R = 1.
    """

    outer: int
    N: int
    K: int
    R: int
    stride: int | None = None

    @classmethod
    def of(cls, shape: Sequence[int], dims: Collection[int], stride: int | None = None) -> Layout | None:
        """Return the layout of a reduction over these dimensions; None if they alternate more often."""
        groups: list[tuple[bool, int]] = []  # neighboring dimensions that are all reduced, or all kept
        for d, size in enumerate(shape):
            if size != 1 and groups and groups[-1][0] == (d in dims):
                groups[-1] = d in dims, groups[-1][1] * size
            elif size != 1:
                groups.append((d in dims, size))
        outer = groups.pop(0)[1] if groups and not groups[0][0] else 1
        if len(groups) > 3:
            return None
        return cls(outer, *[size for _, size in groups], *[1] * (3 - len(groups)), stride)

    @property
    def rows(self) -> int:
        return self.outer * self.K

    @property
    def reduced(self) -> int:
        return self.N * self.R


def max_programs(gpu: GPUFacts) -> int:
    return PROGRAMS_PER_SM * gpu.sms


def column_programs(gpu: GPUFacts) -> int:
    return COLUMN_PROGRAMS_PER_SM * gpu.sms


def max_parts(gpu: GPUFacts) -> int:
    """Return how many parts of a row one program combines: those of as many programs as a row may be split over."""
    return min(MAX_PARTS, MAX_ROUNDS * max_programs(gpu))


def many_rows(gpu: GPUFacts) -> int:
    return ROWS_PER_SM * gpu.sms


def split(M: int, N: int, block: int, device: int, programs: int | None = None) -> tuple[int, int]:
    """Return the length of the parts into which a row of N is split, and their number.

    Shapes and the GPU alone decide, so the order of summation is fixed and results are deterministic.
    """
    gpu = gpu_facts(device)
    if many_rows(gpu) <= M:
        return N, 1
    blocks = cdiv(N, block)
    blocks_per_part = cdiv(M * blocks, programs or max_programs(gpu))
    return blocks_per_part * block, cdiv(blocks, blocks_per_part)


def _warps(elements: int, per_thread: int) -> int:
    return min(32, max(4, next_power_of_2(elements) // (32 * per_thread)))


def _tile_default(gpu: GPUFacts, form: str, combine: str, itemsize: int, block: int) -> Config:
    if form != "tile":
        warps = 4 if block <= 4096 else 8
        return {"BLOCK_M": max(1, 4096 // block), "BLOCK_N": block, "programs": UNLIMITED, "num_warps": warps}
    rows = max(1, 8192 // block) if block < 1024 else max(1, 4096 // block)
    return {"BLOCK_M": rows, "BLOCK_N": block, "programs": UNLIMITED, "num_warps": 8}


def _tile_choices(gpu: GPUFacts, form: str, combine: str, itemsize: int, block: int) -> list[Config]:
    found = {}
    for tile in (4096, 8192, 16384):
        rows = max(1, tile // block)
        for per_thread in (16, 32, 64):
            for programs in (max_programs(gpu), UNLIMITED):
                warps = _warps(rows * block, per_thread)
                config = {"BLOCK_M": rows, "BLOCK_N": block, "programs": programs, "num_warps": warps}
                found[rows, warps, programs] = config
    return list(found.values())


def _long_default(gpu: GPUFacts, form: str, combine: str, itemsize: int, length: int) -> Config:
    if form == "anywhere":  # small blocks, since those at the ends of a row are read by element
        return (
            {"BLOCK_N": 1024 // itemsize, "num_warps": 2} if length <= MAX_TILE else {"BLOCK_N": 2048, "num_warps": 4}
        )
    if length < 16384:
        found = {"BLOCK_N": length // 4, "num_warps": max(1, length // 2048)}
    else:
        found = {"BLOCK_N": 4096 if Kind(combine).has_two_values else 8192, "num_warps": 8}
    return found | ({"programs": max_programs(gpu)} if form == "pieces" else {})


def _long_choices(gpu: GPUFacts, form: str, combine: str, itemsize: int, length: int) -> list[Config]:
    blocks = [n for n in (512, 1024, 2048, 4096, 8192, 16384) if n <= length // 2]
    found = [(n, n // (32 * per_thread)) for n in blocks for per_thread in (4, 8, 16, 32)]
    configs = [{"BLOCK_N": n, "num_warps": warps} for n, warps in found if 1 <= warps <= 16]
    if form != "pieces":
        return configs
    limits = [n * max_programs(gpu) for n in (1, 2, MAX_ROUNDS)]
    return [config | {"programs": n} for config in configs if config["BLOCK_N"] >= 2048 for n in limits]


def _columns_default(form: str, combine: str, itemsize: int) -> Config:
    return {"UNROLL": 16 if combine in ("var", "logsumexp") else 8, "num_warps": 1}


def _columns_choices(form: str, combine: str, itemsize: int) -> list[Config]:
    return [{"UNROLL": unroll, "num_warps": warps} for unroll in (4, 8, 16) for warps in (1, 2, 4)]


TILE = ConfigTable("reduce.json", _tile_default, _tile_choices, takes_gpu=True)
LONG = ConfigTable("reduce.json", _long_default, _long_choices, takes_gpu=True)
COLUMNS = ConfigTable("reduce.json", _columns_default, _columns_choices)

_tile_launch = Launcher(_reduce_tile)
_long_launch = Launcher(_reduce_long)
_columns_launch = Launcher(_reduce_columns)
_combine_launch = Launcher(_combine_parts)
_bwd_launch = Launcher(_reduce_bwd)
_flat_bwd_launch = Launcher(_reduce_flat_bwd)
_columns_bwd_launch = Launcher(_reduce_columns_bwd)
Launch = Callable[..., None]  # takes x, y, index and what is kept for backward


def plan_reduction(layout: Layout, dtype: torch.dtype, device: int, kind: Kind, p: float) -> Launch:
    """Return the launch that takes x, y, the index where there is one, and what is kept for backward, or None."""
    if layout.K * layout.R > 1:
        return _reduce_by_columns(layout, dtype, device, kind, p)
    (outer, N, *_), itemsize, stride = layout, dtype.itemsize, layout.stride
    flags: Config = {"COMBINE": kind.combine, "TERM": kind.term}
    group = VECTOR // itemsize if kind.combine in GROUPED else 1  # elements of one vector load
    is_odd = math.gcd(N, stride or 0) * itemsize % MIN_ACCESS != 0
    longest = MAX_ODD_TILE // itemsize if is_odd else MAX_TILE
    if longest >= N or (stride is None and _splits_into_tiles(kind.combine, outer, N, device)):
        part = min(N, MAX_TILE)
        parts = N // part
        rows = outer * parts
        form, size = _tile_form(kind.combine, itemsize, part, stride)
        config = dict(TILE(device, form, kind.combine, itemsize, max(group, next_power_of_2(size))))
        config["BLOCK_M"] = rows_per_program(rows, config, device)
        programs = min(config.pop("programs"), cdiv(rows, config["BLOCK_M"]))
        is_even = stride is None and config["BLOCK_N"] == part and rows % config["BLOCK_M"] == 0
        vector = VECTOR // itemsize
        flags |= {"GROUP": group, "FORM": "even" if is_even else "shifted" if form == "shifted" else "uneven"}
        flags |= {
            "WHOLE": outer * N % vector == 0,
            "VEC": vector if form == "shifted" else math.gcd(vector, part, stride or 0),
        }
        launcher, grid, given = _tile_launch, (programs,), (stride, rows, part, p)
    else:
        form = "anywhere" if is_odd else "long" if outer >= many_rows(gpu_facts(device)) else "pieces"
        config = dict(LONG(device, form, kind.combine, itemsize, min(MAX_KEY, next_power_of_2(N))))
        flags["GROUP"] = group
        part, parts = split(outer, N, config["BLOCK_N"], device, config.pop("programs", None))
        launcher, grid, given = _long_launch, (outer, parts), (stride, N, part, p)
    if parts == 1:
        return launcher.prepare(grid, *given, **flags, FINISH=kind.finish, PDL=False, **config)
    first = launcher.prepare(grid, *given, **flags, FINISH="part", PDL=has_pdl(device), **config)
    return _split_reduction(first, outer, N, parts, part, kind, p, device)


def _tile_form(combine: str, itemsize: int, N: int, stride: int | None) -> tuple[str, int]:
    """Return how a tile reads rows of N, and how many elements it then holds of each."""
    vector = VECTOR // itemsize
    if math.gcd(N, stride or 0) * itemsize % MIN_ACCESS == 0:
        return "tile", N
    if stride is None and (combine in GROUPED or itemsize == 4 or N < MAX_SHIFTED):
        return "shifted", cdiv(N + vector - 1, vector) * vector
    return "scalar", N  # one element per load: cheaper than masks of each element of a vector


def _folds(layout: Layout, vector: int, programs: int = 0, most_parts: int = 0) -> int:
    """Return how many rows of K x R elements are read as one, so that it is a multiple of a vector and fills warps.

    One where that does not align them. `programs` run, and leave a partial result for each row that they fold, but no
    more than `most_parts`.
    """
    outer, N, K, R, stride = layout
    inner, lanes = K * R, WARP * vector
    fewest = vector // math.gcd(inner, vector)
    if stride is not None or fewest > N or (outer > 1 and N * inner % vector):
        return 1
    if outer > 1:  # slices of any number of columns fill a warp
        return fewest
    filled = {}
    for folds in range(fewest, min(N, MAX_FOLDS) + 1, fewest):
        block = min(lanes, next_power_of_2(folds * inner))
        tiles = cdiv(folds * inner, block)
        if folds == fewest or cdiv(programs, tiles) * folds * R <= most_parts:
            filled[folds] = folds * inner / (tiles * block)
    return next((folds for folds, share in filled.items() if share > WELL_FILLED), max(filled, key=filled.__getitem__))


def column_sizes(layout: Layout, folds: int, vector: int) -> tuple[int, ...]:
    """Return columns, rows, the width and stride of rows, the stride of slices, and the elements after the rows.

    All but rows and elements are in vectors.
    """
    outer, N, K, R, stride = layout
    width = folds * K * R
    stride = stride or width
    slices = N // folds * stride + N % folds * K * R if outer > 1 else 0
    return outer * width // vector, N // folds, width // vector, stride // vector, slices // vector, N % folds * K * R


def _reduce_by_columns(layout: Layout, dtype: torch.dtype, device: int, kind: Kind, p: float) -> Launch:
    outer, N, K, R, stride = layout
    inner, vector = K * R, VECTOR // dtype.itemsize
    gpu = gpu_facts(device)
    most, most_parts = column_programs(gpu), max_parts(gpu)
    folds = _folds(layout, vector, most, most_parts)
    programs = cdiv(outer * folds * inner, WARP * vector)
    takes_span = R >= MIN_SPAN or (R > 1 and most * folds * R > most_parts * programs)
    folds = 1 if takes_span else folds
    width = folds * inner
    vector = math.gcd(vector, R if takes_span else width, stride or 0, N * inner if outer > 1 else 0)
    form = "span" if takes_span else "folded" if folds * R > 1 else "columns"
    config = dict(COLUMNS(device, form, kind.combine, dtype.itemsize))
    lanes = WARP * vector * config["num_warps"]  # elements of one load
    columns = R if takes_span else outer * width
    config["BLOCK_I"] = min(lanes, max(vector, next_power_of_2(columns)))
    config["BLOCK_N"] = lanes // config["BLOCK_I"]
    programs = layout.rows if takes_span else cdiv(columns, config["BLOCK_I"])
    rows = N // folds
    config["UNROLL"] = min(config["UNROLL"], next_power_of_2(rows))
    part, parts = split_columns(programs, rows, config["BLOCK_N"] * config["UNROLL"], most)
    given = *column_sizes(layout, folds, vector), inner, R, part, layout.reduced, p
    flags = {"COMBINE": kind.combine, "TERM": kind.term, "WIDE": columns >= 2**31, "VEC": vector}
    flags |= {"FORM": form, "FOLD": folds}
    grid, partials = (programs, parts), parts * (1 if takes_span else folds * R)
    if partials == 1:
        return _columns_launch.prepare(grid, *given, **flags, FINISH=kind.finish, PDL=False, **config)
    first = _columns_launch.prepare(grid, *given, **flags, FINISH="part", PDL=has_pdl(device), **config)
    # Partial results of columns hold their own indices and counts.
    return _split_reduction(first, layout.rows, layout.reduced, partials, 0, kind, p, device)


def plan_part_sums(
    layout: Layout, part: int, parts: int, dtype: torch.dtype, device: int
) -> Callable[[Tensor], Tensor]:
    """Return the function from x to the sums [rows, parts] of the parts of its columns."""
    outer, N, K, *_ = layout
    vector = math.gcd(K, VECTOR // dtype.itemsize)
    config = dict(COLUMNS(device, "columns", "sum", dtype.itemsize))
    block = WARP * vector * config["num_warps"]
    launch = _columns_launch.prepare(
        (cdiv(outer * K, block), parts), *column_sizes(layout, 1, vector), K, 1, part, N, 0.0,
        COMBINE="sum", TERM="x", FINISH="part", PDL=False, WIDE=outer * K >= 2**31, VEC=vector, FORM="columns", FOLD=1,
        **config, BLOCK_I=block, BLOCK_N=1,
    )  # fmt: skip

    def run(x: Tensor) -> Tensor:
        sums = torch.empty(layout.rows, parts, dtype=torch.float32, device=x.device)
        launch(x, sums, sums, None)
        return sums

    return run


def split_columns(programs: int, rows: int, block: int, most: int) -> tuple[int, int]:
    """Return the length of the parts into which rows are split, and their number, so that about `most` programs run."""
    blocks = cdiv(rows, block)
    blocks_per_part = blocks if programs >= most else cdiv(programs * blocks, most)
    return blocks_per_part * block, cdiv(blocks, blocks_per_part)


def _splits_into_tiles(combine: str, outer: int, N: int, device: int) -> bool:
    """Return whether long rows are split into whole tiles: where there are few, and a step of a loop is costly."""
    return combine in ("logsumexp", "var") and outer < many_rows(gpu_facts(device)) and N % MAX_TILE == 0


def _split_reduction(
    first: PreparedLaunch, M: int, N: int, parts: int, part: int, kind: Kind, p: float, device: int
) -> Launch:
    """Return the launches over M rows that are split into parts; very many parts are combined in several steps.

    `part` is the length of the parts of rows; 0 for columns, whose partial results hold their own counts.
    """
    number = M * parts
    steps: list[tuple[int, PreparedLaunch]] = []
    most = max_parts(gpu_facts(device))
    while part and parts > most and N % (part * PARTS_PER_STEP) == 0:
        parts, larger = parts // PARTS_PER_STEP, part * PARTS_PER_STEP
        partial = kind._replace(finish="part")
        steps.append((M * parts, _combine(M * parts, larger, PARTS_PER_STEP, part, partial, p, device)))
        part = larger
    final = _combine(M, N, parts, part, kind, p, device)

    def partials(number: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        a = torch.empty(number, dtype=torch.float32, device=x.device)
        b = a
        if kind.has_two_values:
            b = torch.empty(number, dtype=torch.int64 if kind.combine == "index" else torch.float32, device=x.device)
        has_three = kind.combine == "zeros" or (kind.combine == "var" and not part)
        return a, b, torch.empty_like(a) if has_three else None

    def launch(x: Tensor, y: Tensor, index: Tensor, kept: Tensor | None) -> None:
        found = partials(number, x)
        first(x, *found)
        for fewer, step in steps:
            combined = partials(fewer, x)
            step(*found, *combined)
            found = combined
        final(*found, y, index, kept)

    return launch


def _combine(M: int, N: int, parts: int, part: int, kind: Kind, p: float, device: int) -> PreparedLaunch:
    block = next_power_of_2(parts)
    rows = max(1, 4096 // block)
    return _combine_launch.prepare(
        (cdiv(M, rows),), M, N, parts, part, p,
        COMBINE=kind.combine, TWO=kind.has_two_values, FINISH=kind.finish,
        PDL=kind.finish == "part" and has_pdl(device),
        BLOCK_M=rows, BLOCK_N=block, num_warps=_warps(rows * block, 16), **dependent_launch(device),
    )  # fmt: skip


def plan_row_sums(M: int, parts: int, device: int) -> Launch:
    """Return the launch that sums the rows of a [M, parts] into y [M]; each must fit one program."""
    launch = _combine(M, parts, parts, 1, KINDS["sum"], 0.0, device)
    return lambda a, y: launch(a, a, None, y, y, None)


def plan_gradient(layout: Layout, dtype: torch.dtype, device: int, kind: str, p: float) -> Launch:
    """Return the launch that takes x, y, dy, what forward kept, and dx."""
    outer, N, K, R, _ = layout
    vector = VECTOR // dtype.itemsize
    if K * R > 1:
        folds = _folds(layout, vector)
        columns = outer * folds * K * R
        vector = math.gcd(vector, folds * K * R, N * K * R if outer > 1 else 0)
        block = min(WARP * vector, max(vector, next_power_of_2(columns)))
        blocks = {"BLOCK_I": block, "BLOCK_N": COLUMN_GRADIENT_TILE // block, "num_warps": 4}
        grid = (cdiv(columns, block) * cdiv(N // folds, blocks["BLOCK_N"]),)
        given = *column_sizes(layout, folds, vector), K * R, R, layout.reduced, p
        return _columns_bwd_launch.prepare(grid, *given, KIND=kind, WIDE=columns >= 2**31, VEC=vector, **blocks)
    if N % vector and N < MAX_FLAT_ROW:
        grid = (cdiv(outer * N, GRADIENT_TILE),)
        return _flat_bwd_launch.prepare(
            grid, outer, N, p, KIND=kind, SHORT=vector > N, VEC=vector, BLOCK=GRADIENT_TILE, num_warps=4
        )
    block = min(GRADIENT_TILE, next_power_of_2(N))
    width = GRADIENT_TILE // block
    grid = (cdiv(outer, width) * cdiv(N, block),)  # one axis: the y axis is limited to 65535
    even = N % block == 0 and outer % width == 0
    blocks = {"EVEN": even, "VEC": math.gcd(N, vector), "BLOCK_M": width, "BLOCK_N": block, "num_warps": 4}
    return _bwd_launch.prepare(grid, outer, N, p, KIND=kind, **blocks)

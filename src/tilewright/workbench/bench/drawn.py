"""Draw cases at random from the shapes that models and people use, for `bench --random`.

The total size is log-uniform from 1 KiB to 4 GiB. The Op says which of its sizes is of which kind (`Op.draws`), and the
size that grows fills up the total. Modes take the values that the Op checks and times. Ops that reduce dimensions are
drawn over other dimensions too (`Op.variants`).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewright.errors import NothingFits, NothingToDraw
from tilewright.spec import KINDS, Case, Op, Value
from tilewright.workbench.check.cases import CheckCase
from tilewright.worker.memory import with_layout

MODELS = Path(__file__).parent / "model_shapes.json"
MIN_TOTAL, MAX_TOTAL = 10, 32  # powers of two, bytes of inputs and results
MAX_ODD = 20_000
MAX_DIMENSION = 13  # power of two
LAYOUTS = {"contiguous": 12, "offset": 2, "padded": 2, "transposed": 2, "sliced": 1, "expanded": 1}  # with weights
ROWS = (1, 16, 64, 256)  # rows of a small case, as in decoding
DTYPES = {"bfloat16": 3, "float16": 1, "float32": 2}
VARIANTS = 0.4  # the share of cases drawn from the variants of an Op
ALIGNMENT = 16  # bytes
TRIES = 200  # per case, before drawing gives up
# A case needs its inputs in two sets of values and three slots, the results, and references and budgets in float64.
COPIES, WIDE_COPIES = 6, 4


@dataclass(frozen=True)
class DrawnCase:
    """A case of an Op, or of one of its variants, and the layout of its tensors."""

    op: Op
    case: Case
    layout: str

    def __str__(self) -> str:
        return f"{self.case} {self.case.dtype} {self.layout}"

    @property
    def check_case(self) -> CheckCase:
        return CheckCase(self.case, "repeated" if self.layout == "expanded" else "normal", self.layout)

    def arguments(self) -> list[Any]:
        """Return the arguments without memory, with the layout of those that are timed."""
        made = self.op.make(self.case, "meta")
        contiguous = self.op.mutates(*made) if self.layout == "expanded" else ()
        layouts = ["contiguous" if n in contiguous else self.layout for n in range(len(made))]
        return [with_layout(a, at) if isinstance(a, Tensor) else a for a, at in zip(made, layouts, strict=True)]

    @property
    def is_aligned(self) -> bool:
        """Return whether every row of every tensor starts on a 16-byte boundary."""
        return all(_is_aligned(a) for a in self.arguments() if isinstance(a, Tensor) and a.dim())


@functools.cache
def model_sizes(kind: str) -> tuple[int, ...]:
    """Return the sizes of public models of a kind: hidden, intermediate, vocabulary, or row for any of them."""
    models = json.loads(MODELS.read_text())["models"]
    return tuple(sorted({model[name] for model in models for name in (KINDS if kind == "row" else (kind,))}))


def draw_from(
    ops: Sequence[Op], count: int, seed: int, *, memory: int | None = None, small: bool = False
) -> tuple[list[DrawnCase], list[str]]:
    """Return about `count` cases of several operations in turn, and why any of these have none.

    It raises if no operation has a case.
    """
    able = [op for op in ops if _grows(op)]
    if not able:
        raise NothingToDraw(ops[0].name)
    chosen = random.Random(seed).sample(able, min(count, len(able)))
    found, too_large = [], []
    for n, op in enumerate(chosen):
        try:
            found.append(draw(op, count // len(chosen) + (n < count % len(chosen)), seed, memory=memory, small=small))
        except NothingFits as failure:
            if len(chosen) == len(too_large) + 1:
                raise
            too_large.append(failure.op)
    fixed = [op.name for op in ops if not _grows(op)]
    reasons = {"no size of theirs can grow by itself": fixed, "no drawn case of theirs fits into memory": too_large}
    turns = itertools.zip_longest(*found)
    left_out = [f"without {', '.join(names)}: {reason}" for reason, names in reasons.items() if names]
    return [one for turn in turns for one in turn if one], left_out


def draw(op: Op, count: int, seed: int, *, memory: int | None = None, small: bool = False) -> list[DrawnCase]:
    """Return up to `count` cases that fit into `memory` bytes, if given; the same seed draws the same cases.

    With `small`, they are contiguous and have the rows of a decoding step. There are fewer where a case that fits is
    rarely drawn; it raises if there is none.
    """
    if not _grows(op):
        raise NothingToDraw(op.name)
    rng = random.Random(f"{op.name} {seed}")
    found: dict[str, DrawnCase] = {}
    tried = 0
    while len(found) < count and tried < TRIES * count:
        tried += 1
        chosen = rng.choice(op.variants) if op.variants and not small and rng.random() < VARIANTS else op
        one = _draw_one(chosen, rng, small)
        if one is None:
            continue
        if memory is None or needed_bytes(one) <= memory:
            found[str(one)] = one
    if not found:
        raise NothingFits(op.name, seed, memory or 2**MAX_TOTAL)
    return list(found.values())


def _grows(op: Op) -> str:
    """Return the size that fills up the total; an empty string if there is none."""
    return op.grows or op.batch or ""


def _draw_one(op: Op, rng: random.Random, small: bool) -> DrawnCase | None:
    """Return a random case; None if its sizes do not go together."""
    grows = _grows(op)
    like = op.bench[0]
    point = tuple((name, _value(op, name, value, rng)) for name, value in like.point)
    dtypes = [dtype for dtype in DTYPES if dtype in op.dtypes] or list(op.dtypes)
    dtype = rng.choices(dtypes, [DTYPES.get(dtype, 1) for dtype in dtypes])[0]
    case = Case(point, dtype).with_size(grows, 1)
    total = 2 ** rng.uniform(MIN_TOTAL, MAX_TOTAL)
    layout = "contiguous" if small else rng.choices([*LAYOUTS], [*LAYOUTS.values()])[0]
    keeps_power = rng.random() < 0.5
    try:
        base = moved_bytes(op, case)
        each = moved_bytes(op, case.with_size(grows, 2)) - base
        length = max(1, round(1 + (total - base) / max(1, each)))
        length = 2 ** round(math.log2(length)) if keeps_power else length
        if small:
            has_rows = sum(type(value) is int for _, value in point) > 1
            length = rng.choice(ROWS) * (1 if has_rows else rng.choice(model_sizes("hidden")))
        case = case.with_size(grows, length)
        if not op.takes(case) or moved_bytes(op, case) > 2**MAX_TOTAL:
            return None
    except Exception:  # a reference may raise anything for sizes that do not fit together
        return None
    return DrawnCase(op, case, layout)


def _value(op: Op, name: str, value: Value, rng: random.Random) -> Value:
    kind = op.draws.get(name)
    if kind is not None:
        return _size(kind, rng)
    cases = op.bench if rng.random() < 0.7 or not isinstance(value, str | bool) else op.check
    return rng.choice([case[name] for case in cases])


def _size(kind: str, rng: random.Random) -> int:
    """Return a size of a kind: mostly that of a model, else a power of two, a multiple of 8, odd or prime.

    A "dimension" of a tensor of several is log-uniform.
    """
    if kind == "dimension":
        size = 2 ** rng.uniform(0, MAX_DIMENSION)
        return 2 ** round(math.log2(size)) if rng.random() < 0.5 else round(size)
    way = rng.choices(("model", "power", "multiple", "odd", "prime"), (8, 3, 3, 3, 3))[0]
    if way == "model":
        return rng.choice(model_sizes(kind))
    if way == "power":
        return 2 ** rng.randint(5, 17)
    if way == "multiple":
        return 8 * rng.randint(4, MAX_ODD // 8)
    odd = 2 * rng.randint(8, MAX_ODD // 2) + 1
    return odd if way == "odd" else next(n for n in range(odd, 2 * odd, 2) if _is_prime(n))


def _is_aligned(tensor: Tensor) -> bool:
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    strides = sorted(stride for stride, size in sizes if size > 1 and stride) or [1]
    steps = (tensor.storage_offset(), *strides[1:])
    return strides[0] == 1 and all(step * tensor.itemsize % ALIGNMENT == 0 for step in steps)


def _is_prime(n: int) -> bool:
    return n % 2 == 1 and all(n % d for d in range(3, math.isqrt(n) + 1, 2))


def moved_bytes(op: Op, case: Case) -> int:
    """Return the bytes of inputs and results."""
    return sum(t.nbytes for t in _tensors(op, case))


def needed_bytes(one: DrawnCase) -> int:
    """Return about how much GPU memory it takes to check and time a case."""
    tensors = list(_tensors(one.op, one.case))
    return sum(COPIES * t.nbytes + WIDE_COPIES * 8 * t.numel() for t in tensors)


def _tensors(op: Op, case: Case) -> Iterator[Tensor]:
    args = op.make(case, "meta")
    results = op.reference(*args)
    moved: Sequence[object] = (*args, *(results if isinstance(results, tuple) else (results,)))
    return (t for t in moved if isinstance(t, Tensor))

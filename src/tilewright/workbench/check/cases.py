"""Which questions to ask a kernel: cases beyond the Op's own, numbers of other kinds, tensors that lie otherwise."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from tilewright.spec import VALUES, Case, Op
from tilewright.worker.execute import COMPILED, OPERATORS, PLAIN, flat

SIZES = (1, 2, 3, 7, 13, 31, 61, 127, 251, 1021)  # odd, prime and 1: what blocks do not divide
LAYOUTS = ("transposed", "sliced", "offset", "expanded")
DRAWN = {"once": 0, "quick": 1, "default": 3, "full": 12}  # by depth: cases of a dtype beyond the Op's own
SMALL = 2**15  # elements of a case whose variants are quick


@dataclass(frozen=True)
class Trial:
    """A case, what its numbers look like, how its tensors lie in memory, and how the kernel is called."""

    case: Case
    values: str = "normal"
    layout: str = "contiguous"
    again: bool = False  # repeat it, with the same and with other values
    how: str = PLAIN
    only: int | None = None  # the one argument that needs a gradient; else all that can have one
    silent: int | None = None  # the one result that no gradient comes for
    repeat: int = 1  # so many times longer than the case, along the Op's batch

    def __str__(self) -> str:
        kinds = [text for text, usual in ((self.values, "normal"), (self.layout, "contiguous")) if text != usual]
        kinds += [self.how] if self.how else []
        kinds += [f"gradient of argument {self.only + 1} alone"] if self.only is not None else []
        kinds += [f"no gradient for output {self.silent}"] if self.silent is not None else []
        kinds += [f"{self.repeat} times as long"] if self.repeat > 1 else []
        return " ".join([str(self.case), *(f"({kind})" for kind in kinds)]).strip()


def plan(
    op: Op, cases: Sequence[Case] | None, dtypes: Sequence[str], depth: str, seed: int, device: str = "cpu"
) -> list[Trial]:
    """All trials of a depth: once (each case as it is), quick, default or full. Only small cases have variants."""
    own = list(cases or op.check)
    if depth == "once":
        return [Trial(case.with_dtype(dtype)) for dtype in dtypes for case in own]
    small = [case for case in own if 1 < elements(op, case) <= SMALL] if op.is_varied else own
    hosts = small if depth == "full" else sorted(small, key=lambda case: elements(op, case))[-1:]
    wanted: list[Trial] = []
    for number, dtype in enumerate(dtypes):
        asked = own if depth != "quick" or cases else [own[0], *hosts, own[-1]]
        wanted += [Trial(case.with_dtype(dtype), again=case in (hosts or own[:1])) for case in dict.fromkeys(asked)]
        for host in (case.with_dtype(dtype) for case in hosts):
            # Not in full: each variant in one of the dtypes, all of them in turn.
            variants = _variants(op, host, depth)
            wanted += [v for i, v in enumerate(variants) if depth == "full" or i % len(dtypes) == number]
        if not cases and op.is_varied:
            others = drawn(op, own[0], DRAWN[depth], f"{seed} {dtype}")
            wanted += [Trial(case.with_dtype(dtype)) for case in others]
    if device == "cuda" and depth != "quick" and not cases and op.is_varied:
        wanted += _beyond_int32(op, small)
    return sorted(dict.fromkeys(wanted), key=lambda trial: trial.how == OPERATORS)  # last, since looking may disturb


def _variants(op: Op, host: Case, depth: str) -> list[Trial]:
    if not op.is_varied:
        return []
    found = [Trial(host, values) for values in VALUES[1:-1]]
    found += [Trial(host, "repeated" if kind == "expanded" else "normal", kind) for kind in LAYOUTS]
    if depth != "quick":
        found += [Trial(host, how=COMPILED)]
        leaves, outputs = differentiable(op, host)
        if op.backward_cost is not None:
            found += [Trial(host, only=number) for number in leaves if len(leaves) > 1]
            found += [Trial(host, silent=number) for number in range(outputs) if outputs > 1]
        found += [Trial(host, how=OPERATORS)]
    return found


def differentiable(op: Op, case: Case) -> tuple[list[int], int]:
    """Which arguments can have a gradient, and how many results."""
    args = op.make(case, device="meta")
    floats = [n for n, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]
    leaves = [n for n in floats if n not in op.constants]
    return leaves, sum(t.is_floating_point() for t in flat(op.reference(*args)))


def _beyond_int32(op: Op, small: list[Case]) -> list[Trial]:
    """A case whose first argument has more elements than an int32 can count."""
    case = small[-1].with_dtype(op.bench_dtype) if small else None
    if case is None:
        return []
    if op.batch is None:
        sizes = {name: value for name, value in case.point if isinstance(value, int) and not isinstance(value, bool)}
        longest = max(sizes, key=sizes.__getitem__)
        point = tuple((name, 2**31 + 11 if name == longest else value) for name, value in case.point)
        return [Trial(Case(point, case.dtype))]
    first = next(a for a in op.make(case, device="meta") if isinstance(a, Tensor))
    return [Trial(case, repeat=-(-(2**31 + 2**20) // first.numel()))]


def drawn(op: Op, like: Case, count: int, seed: str) -> Iterator[Case]:
    """Cases that the Op takes and does not list, with sizes of SIZES and, but for the first, now and then an empty one:
    a quick check draws no other, and of nothing everything is right."""
    listed, wanted = {case.point for case in op.check}, count
    generator = random.Random(seed)
    for _ in range(20 * count):
        if count == 0:
            return
        point = [(name, _size(value, generator)) for name, value in like.point]
        case = Case(tuple(point), like.dtype)
        is_new = case.point not in listed and (count < wanted or 0 not in dict(point).values())
        if is_new and _is_taken(op, case) and elements(op, case) <= SMALL:
            count -= 1
            yield case


def _size(value: object, generator: random.Random) -> int | bool | str:
    if isinstance(value, bool):
        return generator.random() < 0.5
    if not isinstance(value, int):
        return value  # type: ignore[return-value]
    return 0 if generator.random() < 0.05 else generator.choice(SIZES)


def _is_taken(op: Op, case: Case) -> bool:
    try:
        if not op.takes(case):
            return False
        op.reference(*op.make(case, device="meta"))
    except Exception:  # whatever a reference says of sizes that do not go together
        return False
    return True


def elements(op: Op, case: Case) -> int:
    return sum(a.numel() for a in op.make(case, device="meta") if isinstance(a, Tensor))

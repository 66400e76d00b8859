"""Plan the cases of a check: sizes beyond the Op's own, other values, memory layouts and ways to call a kernel."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.spec import FAR_BELOW, HALVES, VALUES, Case, Op
from tilewright.variants import PROBLEM_VALUES
from tilewright.worker.execute import COMPILED, OPCHECK, PLAIN, flatten

SIZES = (1, 2, 3, 7, 13, 31, 61, 127, 251, 1021)  # odd, prime and 1: no block size divides them
LAYOUTS = ("transposed", "sliced", "offset", "expanded")
RANDOM_CASES = {"once": 0, "quick": 1, "default": 3, "full": 12}  # per dtype, by depth
SMALL_ELEMENTS = 2**15  # in all inputs of a case that is checked in many variants
MAX_INT32 = 2**31 - 1
UNEVEN = 16
MEDIUM_ELEMENTS = 2**24  # the same, if a user's operation has no smaller case
CPU_ELEMENTS = 2**21  # without a GPU, a case with more elements in its inputs would take minutes
QUICK_PROBLEM_VALUES = PROBLEM_VALUES[:-2]


@dataclass(frozen=True)
class CheckCase:
    """A case with the kind of its input values, the layout of its tensors, and the way the kernel is called."""

    case: Case
    values: str = "normal"
    layout: str = "contiguous"
    rerun: bool = False  # call again with the same and with other values
    mode: str = PLAIN
    grad_only_of: int | None = None  # the one argument that requires a gradient; None: all that can
    no_grad_output: int | None = None  # the one output that gets no incoming gradient
    repeat: int = 1  # repetitions of the case along the Op's batch dimension
    is_long: bool = False  # rows longer than an int32 can count: forward alone, since the truth fills the memory

    def __str__(self) -> str:
        kinds = [text for text, default in ((self.values, "normal"), (self.layout, "contiguous")) if text != default]
        kinds += [self.mode] if self.mode else []
        kinds += [f"gradient of argument {self.grad_only_of + 1} alone"] if self.grad_only_of is not None else []
        kinds += [f"no gradient for output {self.no_grad_output}"] if self.no_grad_output is not None else []
        kinds += [f"{self.repeat} times as long"] if self.repeat > 1 else []
        return " ".join([str(self.case), *(f"({kind})" for kind in kinds)]).strip()


def is_plain(case: CheckCase) -> bool:
    """Return whether a case is none of the variants of another one."""
    return replace(case, rerun=False) == CheckCase(case.case)


def plan_cases(
    op: Op,
    cases: Sequence[Case] | None,
    dtypes: Sequence[str],
    depth: str,
    seed: int,
    device: str = "cpu",
    is_problem: bool = False,
) -> list[CheckCase]:
    """Return all cases of a depth: once (each case as it is), quick, default or full.

    Only small cases have variants; those of a third-party problem vary in their values alone.
    """
    own = list(cases or op.check)
    if depth == "once":
        return [CheckCase(case.with_dtype(dtype)) for dtype in dtypes for case in own]
    small = [case for case in own if 1 < element_count(op, case) <= SMALL_ELEMENTS] if op.is_varied else own
    if not small and (op.file or not cases):
        smallest = min(own, key=lambda case: element_count(op, case))
        small = [smallest] if element_count(op, smallest) <= MEDIUM_ELEMENTS else []
    if is_problem and device == "cpu":  # a variant of a case that is left out would be left out, too
        small = [case for case in small if element_count(op, case) <= CPU_ELEMENTS] or small
    hosts = small if depth == "full" else sorted(small, key=lambda case: element_count(op, case))[-1:]
    planned: list[CheckCase] = []
    for number, dtype in enumerate(dtypes):
        selected = own if depth != "quick" or cases else [own[0], *hosts, own[-1]]
        reruns = hosts or own[:1]
        planned += [CheckCase(case.with_dtype(dtype), rerun=case in reruns) for case in dict.fromkeys(selected)]
        for host in (case.with_dtype(dtype) for case in hosts):
            # Unless the depth is full, each variant is checked in one dtype, and the dtypes take turns.
            variants = [] if is_problem else _variants(op, host, depth)
            variants += _problem_variants(host, depth) if op.file or not op.is_varied else []
            variants += [CheckCase(host, HALVES)] if op.file and op.is_varied else []
            planned += [v for i, v in enumerate(variants) if depth == "full" or i % len(dtypes) == number]
        others = [] if depth == "quick" or is_problem else _other_sizes(op, small, hosts)
        planned += [replace(v, case=v.case.with_dtype(dtype)) for v in others[number :: len(dtypes)]]
        if not cases and op.is_varied:
            others = draw_cases(op, own, RANDOM_CASES[depth], f"{seed} {dtype}")
            planned += [CheckCase(case.with_dtype(dtype)) for case in others]
    if device == "cuda" and depth != "quick" and not cases and op.is_varied:
        planned += _beyond_int32(op, small) + _long_rows(op, small)
    return list(dict.fromkeys(planned))


def _other_sizes(op: Op, small: Sequence[Case], hosts: Sequence[Case]) -> list[CheckCase]:
    """Return other values in cases that have no variants, since a kernel may have a path for their sizes alone.

    In all of them a maximum that starts at 0 shows; and in one whose last block is not full, if that of the hosts may
    be, everything that a masked element may do.
    """
    others = [case for case in small if case not in hosts]
    uneven = [] if any(map(_is_uneven, hosts)) else [case for case in others if _is_uneven(case)]
    last = max(uneven, key=lambda case: element_count(op, case), default=None)
    found = [CheckCase(case, values=FAR_BELOW) for case in others]
    return found + [CheckCase(last, values=values) for values in VALUES[1:-1] if last and op.is_varied]


def _is_uneven(case: Case) -> bool:
    """Return whether no block of 16 or more elements divides one of the sizes."""
    return any(isinstance(size, int) and size > UNEVEN and size % UNEVEN for _, size in case.point)


def _problem_variants(host: Case, depth: str) -> list[CheckCase]:
    return [CheckCase(host, values) for values in (QUICK_PROBLEM_VALUES if depth == "quick" else PROBLEM_VALUES)]


def _variants(op: Op, host: Case, depth: str) -> list[CheckCase]:
    if not op.is_varied:
        return []
    base = CheckCase(host)
    found = [replace(base, values=values) for values in VALUES[1:-1]]
    found += [CheckCase(host, "repeated" if layout == "expanded" else "normal", layout) for layout in LAYOUTS]
    if depth != "quick":
        found += [replace(base, mode=COMPILED)]
        inputs, outputs = differentiable_arguments(op, host)
        if op.backward_cost is not None:
            found += [replace(base, grad_only_of=number) for number in inputs if len(inputs) > 1]
            found += [replace(base, no_grad_output=number) for number in range(outputs) if outputs > 1]
        found += [replace(base, mode=OPCHECK)]
    if not op.file:  # the values of a user's operation are varied further
        found += [replace(base, values=FAR_BELOW)]
    return found


def differentiable_arguments(op: Op, case: Case) -> tuple[list[int], int]:
    """Return which arguments can require a gradient, and the number of floating-point outputs."""
    args = op.make(case, device="meta")
    floats = [n for n, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]
    inputs = [n for n in floats if n not in op.constants]
    return inputs, sum(t.is_floating_point() for t in output_shapes(op, case))


def output_shapes(op: Op, case: Case) -> list[Tensor]:
    """Return the outputs of the reference without values."""
    try:
        return flatten(op.reference(*op.make(case, device="meta")))
    except Exception:  # the shapes of a user's reference may depend on values
        with torch.no_grad():
            return [output.to("meta") for output in flatten(op.reference(*op.make(case)))]


def _beyond_int32(op: Op, small: list[Case]) -> list[CheckCase]:
    """Return a case whose first argument has more elements than an int32 can index."""
    case = small[-1].with_dtype(op.bench_dtype) if small else None
    if case is None:
        return []
    first = next(a for a in op.make(case, device="meta") if isinstance(a, Tensor))
    if op.batch is not None:
        return [CheckCase(case, repeat=-(-(MAX_INT32 + 2**20) // first.numel()))]
    sizes = {name: value for name, value in case.point if isinstance(value, int) and not isinstance(value, bool)}
    if not sizes or op.file:  # a user's reference may need any amount of memory
        return []
    name = op.grows or max(sizes, key=sizes.__getitem__)
    return [CheckCase(case.with_size(name, -(-(MAX_INT32 + 12) * sizes[name] // first.numel())))]


def _long_rows(op: Op, small: list[Case]) -> list[CheckCase]:
    """Return a case of one row with more elements than an int32 can count, in the dtype that is timed."""
    if op.length is None or op.file or not small:
        return []
    case = small[-1].with_dtype(op.bench_dtype).with_size(op.length, MAX_INT32 + 12)
    for name in (op.batch, op.grows):
        case = case.with_size(name, 1) if name not in (None, op.length) else case
    return [CheckCase(case, is_long=True)] if op.takes(case) else []


def draw_cases(op: Op, likes: Sequence[Case], count: int, seed: str) -> Iterator[Case]:
    """Yield random cases that the Op accepts and does not list, with sizes from SIZES and sometimes 0.

    Modes that have names are those of one of the given cases. The first case is never empty: it is the only one of a
    quick check, and an empty output is always right.
    """
    listed, requested = {case.point for case in op.check}, count
    generator, modes = random.Random(seed), random.Random(f"{seed} modes")
    for _ in range(20 * count):
        if count == 0:
            return
        like = modes.choice(likes)
        point = [(name, _random_size(value, generator)) for name, value in like.point]
        case = Case(tuple(point), like.dtype)
        is_new = case.point not in listed and (count < requested or 0 not in dict(point).values())
        if is_new and _is_accepted(op, case) and element_count(op, case) <= SMALL_ELEMENTS:
            count -= 1
            yield case


def _random_size(value: object, generator: random.Random) -> int | bool | str:
    if isinstance(value, bool):
        return generator.random() < 0.5
    if not isinstance(value, int):
        return value  # type: ignore[return-value]
    return 0 if generator.random() < 0.05 else generator.choice(SIZES)


def _is_accepted(op: Op, case: Case) -> bool:
    try:
        if not op.takes(case):
            return False
        op.reference(*op.make(case, device="meta"))
    except Exception:  # a reference may raise anything for sizes that do not fit together
        return False
    return True


def element_count(op: Op, case: Case) -> int:
    return sum(a.numel() for a in op.make(case, device="meta") if isinstance(a, Tensor))

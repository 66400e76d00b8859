"""Shrink the sizes of a problem until a machine can check it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from tilewright.spec import Case, value_text
from tilewright.worker.operators import Mode

# A call that takes a CPU tens of milliseconds: a check makes about a hundred, some of them in float64.
CPU_ELEMENTS, CPU_FLOPS = 2**19, 2**27
# Sizes stay at least as large as the first that suffices: one of 1 hides a wrong index or a missing sum.
FLOORS = (4, 2, 1)
MAX_OPERATORS = 5000  # that a call may use until it is stopped
USEFUL = 0.97  # a smaller size must leave at most this share of the load
Atom = tuple[str, int | None]  # the name of a size, and a number if it is a tuple


@dataclass(frozen=True)
class Work:
    """The elements of a call's inputs, parameters and intermediate results, and its floating-point operations."""

    elements: int
    flops: int
    is_estimate: bool = False  # from the inputs alone, or of a call that was stopped

    @property
    def cpu_load(self) -> float:
        """Relative to the work that a CPU can check."""
        return max(self.elements / CPU_ELEMENTS, self.flops / CPU_FLOPS)

    def share_of(self, whole: Work) -> float:
        return max(self.elements / max(1, whole.elements), self.flops / max(1, whole.flops))


class EmptyResult(Exception):
    """An operator returned an empty tensor from tensors that are not."""


class TooMuchWork(Exception):
    """A call has done as much work as was allowed."""


class WorkCounter(Mode):
    """Counts the work of torch's operators. Raises EmptyResult, since sizes that shrink too far lead to it.

    Raises TooMuchWork when the load on a CPU exceeds a limit, or after MAX_OPERATORS, which take seconds even without
    values.
    """

    def __init__(self, limit: float = inf) -> None:
        super().__init__()
        self.elements, self.flops, self._count, self._limit = 0, 0, 0, limit

    @property
    def work(self) -> Work:
        return Work(self.elements, self.flops)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        tensors = [t for t in pytree.tree_leaves(returned) if isinstance(t, Tensor)]
        given = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
        if given and not all(t.numel() for t in tensors[:1]) and all(t.numel() for t in given):
            raise EmptyResult  # a convolution larger than its input raises only where it has values
        self.elements += 0 if func.is_view else sum(t.numel() for t in tensors)
        if count := flop_registry.get(func._overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=returned)
        self._count += 1
        if self._count > MAX_OPERATORS or self.work.cpu_load > self._limit:
            raise TooMuchWork
        return returned


def shrink(
    case: Case, measure: Callable[[Case], Work | None], load: Callable[[Work], float]
) -> tuple[Case, Work] | None:
    """Return the case with sizes divided by two until its load is at most 1 or nothing helps; None if it is invalid.

    `measure` returns None for sizes that do not fit together. Sizes that cannot shrink alone shrink with those of the
    same value, or with one other.
    """
    work = measure(case)
    if work is None:
        return None
    for floor in FLOORS:
        useless: set[tuple[Atom, ...]] = set()
        while load(work) > 1:
            for atoms in _groups(case, 2 * floor):
                if atoms in useless:
                    continue
                smaller, found = _divided(case, atoms, measure, by=4 if load(work) > 16 else 2, floor=floor)
                if found is not None and (load(found) < USEFUL * load(work) or work.is_estimate):
                    case, work = smaller, found
                    break
                useless.add(atoms)
            else:
                break
    return case, work


def _divided(
    case: Case, atoms: tuple[Atom, ...], measure: Callable[[Case], Work | None], by: int, floor: int
) -> tuple[Case, Work | None]:
    for divisor in dict.fromkeys((by, 2)):
        smaller = case
        for name, number in atoms:
            value: Any = smaller[name]
            if number is None:
                smaller = smaller.with_size(name, max(floor, value // divisor))
            else:
                changed = (*value[:number], max(floor, value[number] // divisor), *value[number + 1 :])
                smaller = smaller.with_size(name, changed)  # type: ignore[arg-type]
        if (found := measure(smaller)) is not None:
            return smaller, found
    return case, None


def _groups(case: Case, smallest: int) -> Iterator[tuple[Atom, ...]]:
    """Yield the sizes to divide together: the largest first, then those of the same value, then pairs."""
    values = {atom: value for atom, value in _atoms(case) if value >= smallest}
    atoms = sorted(values, key=lambda atom: -values[atom])
    yield from ((atom,) for atom in atoms)
    for value in dict.fromkeys(values[atom] for atom in atoms):
        if len(same := tuple(atom for atom in atoms if values[atom] == value)) > 1:
            yield same
    yield from combinations(atoms, 2)


def _atoms(case: Case) -> Iterator[tuple[Atom, int]]:
    for name, value in case.point:
        if type(value) is int:
            yield (name, None), value
        elif isinstance(value, tuple):
            yield from (((name, number), item) for number, item in enumerate(value) if type(item) is int)


def changes(before: Case, after: Case) -> str:
    """Return the sizes that differ, as text."""
    pairs = zip(before.point, after.point, strict=True)
    return ", ".join(f"{Case((new,))} instead of {value_text(old[1])}" for old, new in pairs if old != new)

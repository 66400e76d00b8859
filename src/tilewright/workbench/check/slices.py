"""Expected outputs by rows, for calls whose truth in float64 would take too much memory.

Rows may be computed apart only if that changes nothing: the reference's own output, computed at once, has to pass
against the truth of its first and of its last rows. A normalisation over the batch, for example, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.workbench.check.budget import ExpectedTensor, Mismatch, SlicedTensor, compare, expect
from tilewright.worker.execute import flatten, forward

MAX_BYTES = 2**34  # that computing expected outputs at once may take
Refine = Callable[[ExpectedTensor], ExpectedTensor]


@dataclass(frozen=True)
class Rows:
    """How to cut a call into rows: the arguments that have them, their number, and the number at a time."""

    arguments: tuple[int, ...]
    count: int
    step: int

    def ranges(self) -> list[slice]:
        return [slice(start, min(start + self.step, self.count)) for start in range(0, self.count, self.step)]

    def of(self, args: Sequence[Any], rows: slice) -> list[Any]:
        return [a[rows] if number in self.arguments else a for number, a in enumerate(args)]


def candidates(args: Sequence[Any], outputs: Sequence[Any]) -> list[Rows]:
    """Return the ways in which a call may be cut; none if its truth takes little memory or has no common rows.

    The arguments and outputs need no values.
    """
    tensors = [(number, a) for number, a in enumerate(args) if isinstance(a, Tensor)]
    # Truth, error, sensitivity, perturbed truth, its change and the budget; the arguments, and perturbed ones.
    peak = 8 * (6 * _elements(outputs) + 2 * _elements(a for _, a in tensors))
    is_cut = peak > MAX_BYTES and all(isinstance(o, Tensor) and o.dim() for o in outputs)
    if not is_cut or len({o.shape[0] for o in outputs}) != 1:
        return []
    count = outputs[0].shape[0]
    step = max(1, count // -(-peak // MAX_BYTES))
    with_rows = tuple(number for number, a in tensors if a.dim() and a.shape[0] == count)
    ways = [with_rows, with_rows[:1]] if len(with_rows) > 1 else [with_rows] if with_rows else []
    return [Rows(way, count, step) for way in ways if step < count]


def expect_rows(
    reference: Callable[..., Any],
    args: Sequence[Any],
    rows: Rows,
    *,
    refine: Refine = lambda expected: expected,
    zeros_scale: float = 0.0,
    destinations: Sequence[Tensor] = (),
    is_proven: bool = False,
) -> list[SlicedTensor] | None:
    """Return the expected outputs, or None if the rows depend on each other. `is_proven` says that they do not."""
    _, returned = forward(reference, args, [])
    outputs = flatten(returned)

    def pieces(number: int, ranges: Sequence[slice]) -> Iterator[tuple[slice, ExpectedTensor]]:
        for each in ranges:
            yield each, refine(expect(reference, rows.of(args, each), zeros_scale=zeros_scale)[number])

    found = []
    for number, output in enumerate(outputs):
        ends = [rows.ranges()[0], rows.ranges()[-1]]
        if not is_proven and not _passes(output, pieces(number, ends)):
            return None
        name = "output" if len(outputs) == 1 else f"output {number}"
        shape, dtype = tuple(output.shape), output.dtype
        others = tuple(
            (tuple(b.shape), b.dtype) for b in destinations if (b.numel(), b.dtype) == (output.numel(), dtype)
        )
        non_finite = sum(int((~part.double().isfinite()).sum()) for part in output.split(rows.step))
        every = lambda number=number: pieces(number, rows.ranges())
        found.append(SlicedTensor(name, shape, dtype, non_finite, every, others))
    return found


def _passes(output: Tensor, pieces: Iterator[tuple[slice, ExpectedTensor]]) -> bool:
    try:
        return not any(isinstance(compare(output[each], piece), Mismatch) for each, piece in pieces)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception:  # a reference may raise anything if only some of its arguments are cut
        return False


def _elements(tensors: Any) -> int:
    return sum(t.numel() for t in tensors if isinstance(t, Tensor) and t.is_floating_point())

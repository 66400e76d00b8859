"""The lanes of one memory operation by the argument that they access, and the sectors that they touch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.interpreter.arguments import Argument
from tilewright.interpreter.exceptions import Location
from tilewright.interpreter.results import SECTOR


@dataclass
class Part:
    """The lanes of one operation that access one argument."""

    argument: Argument
    offsets: np.ndarray  # in bytes from the start of the storage
    mask: np.ndarray | None  # active lanes, in the shape of `offsets`; None: all
    rows: np.ndarray | None  # row of the batch, broadcast over `offsets`; None: every program makes this access
    lanes: np.ndarray | None = None  # indices of these lanes in the operation; None: all, in their shape

    def select(self, per_lane: np.ndarray) -> np.ndarray:
        """Return the values of the active lanes from an array over the operation's lanes."""
        part = per_lane.reshape(-1)[self.lanes] if self.lanes is not None else per_lane
        return part[self.mask] if self.mask is not None else part.reshape(-1)


@dataclass
class Access:
    """One operation's accesses to one argument, as flat arrays over the active lanes."""

    kind: str  # load, store or atomic
    argument: Argument
    itemsize: int
    offsets: np.ndarray  # in bytes from the start of the storage
    programs: np.ndarray | None  # program index per lane; None: every program of the batch made this access
    location: Location
    lanes: int  # active and masked
    sectors: int
    changed: np.ndarray | None = None  # lanes of a store or an atomic that changed the value in memory
    order: Any = None  # memory order of an atomic
    scope: Any = None  # synchronization scope of an atomic
    volatile: bool = False


def sectors(offsets: np.ndarray, mask: np.ndarray | None, itemsize: int) -> int:
    """Estimate the 32-byte sectors that the warps of a program request.

    Assumes Triton's usual layout: neighbouring lanes along the dimension with the smallest stride, up to 16 contiguous
    bytes per lane.
    """
    if not offsets.size:
        return 0
    if offsets.ndim == 1:  # lanes of several arguments, or one lane per program: nothing is known of their neighbours
        return int(offsets.size if mask is None else mask.sum())
    steps = {}
    for dim in range(1, offsets.ndim):
        if offsets.shape[dim] > 1:
            pair = offsets[(0,) * dim + (slice(0, 2),) + (0,) * (offsets.ndim - dim - 1)]
            steps[dim] = abs(int(pair[1]) - int(pair[0]))
    order = sorted(range(1, offsets.ndim), key=lambda dim: (-(steps.get(dim) or 2**62), dim))
    ordered = offsets.transpose(0, *order).reshape(offsets.shape[0], -1)
    step = steps.get(order[-1], itemsize) or itemsize
    vector = 1
    while vector * itemsize < 16 and step == itemsize and int(ordered[0, 0]) % (2 * vector * itemsize) == 0:
        vector *= 2
    width = min(32 * vector, ordered.shape[1])
    sector = ordered.reshape(-1, width) // SECTOR
    if mask is not None:
        sector = np.where(mask.transpose(0, *order).reshape(-1, width), sector, -1)
    if (sector[:, 1:] < sector[:, :-1]).any():
        sector = np.sort(sector, axis=1)
    new = sector[:, 1:] != sector[:, :-1]
    return int(new.sum()) + len(sector) - (int((sector == -1).any(axis=1).sum()) if mask is not None else 0)

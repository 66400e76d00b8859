"""Bank conflicts of shared memory, predicted: how often the banks must be asked for one access of a warp.

Shared memory has 32 banks, each of which gives or takes one word of 4 bytes at a time. Words of an access that stand in
one bank come one after the other, in so many wavefronts; several lanes at one word share it. At best there is one for
every 128 bytes. The addresses are those that the PTX computes, so Triton's layouts and CUDA C++ are seen alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.workbench.inspect.compiling import Compiled
from tilewright.workbench.inspect.listing import Line, Place, listing
from tilewright.workbench.inspect.ptx_sim import WARP, Access, shared_accesses

BANKS = 32
WORD = 4  # bytes
OFF = np.iinfo(np.int64).min  # in place of the word of a lane that takes no part
NOBODY = (0.0, 0.0)  # wavefronts where no thread takes part
STAND_INS = (2**20, 2**20 + 48)  # for sizes and pointers that are not known: what differs between the two is not known


@dataclass(frozen=True)
class SharedAccess:
    """Accesses of one kind and width on one line of the source."""

    kind: str  # load, store or async copy
    width: int  # bytes a thread
    place: Place
    count: int  # instructions
    wavefronts: float | None  # of a warp's access, on average; None: its addresses are not known
    ideal: float | None


def shared_memory(made: Compiled, arguments: Sequence[int | None] = ()) -> list[SharedAccess] | None:
    """What the accesses of a kernel come to, in the order of its code; None where there is no PTX. `arguments` are
    the whole numbers that it is launched with, by place."""
    if "ptx" not in made.texts:
        return None
    lines = kernel_lines(listing(made, "ptx"), made.symbol)
    together: dict[tuple[str, int, Place], list[tuple[float, float] | None]] = {}
    ways = [shared_accesses(lines, made.threads, arguments, stand_in) for stand_in in STAND_INS]
    for one, other in zip(*ways, strict=True):
        found = _average(one)
        group = together.setdefault((one.kind, one.width, one.place), [])
        if found != NOBODY:
            group.append(found if found == _average(other) else None)
    return [SharedAccess(*key, len(found), *_mean(found)) for key, found in together.items() if found]


def kernel_lines(lines: Sequence[Line], symbol: str) -> Sequence[Line]:
    """A file of CUDA C++ may hold several."""
    starts = [n for n, line in enumerate(lines) if re.search(rf"\.entry {re.escape(symbol)}\(", line.code)]
    rest = lines[starts[0] :] if starts else lines
    return rest[: next((n for n, line in enumerate(rest) if line.code.startswith("}")), len(rest))]


def _average(access: Access) -> tuple[float, float] | None:
    """Wavefronts and the least of them, over the warps that take part."""
    if not access.active.any():
        return NOBODY
    if access.addresses is None:
        return None
    counts = wavefronts(access.addresses, access.active, access.width)
    made, least = counts[counts[:, 1] > 0].mean(axis=0)
    return float(made), float(least)


def wavefronts(addresses: NDArray[np.int64], active: NDArray[np.bool_], width: int) -> NDArray[np.int64]:
    """Of each warp's access, and the least that so many lanes can have. Wide accesses go by halves or quarters."""
    missing = -len(addresses) % WARP
    groups = max(1, width // WORD) * -(-len(addresses) // WARP)  # each of as many lanes as there are banks for
    words = np.pad(addresses, (0, missing))[:, None] // WORD + np.arange(max(1, width // WORD))
    words = np.where(np.pad(active, (0, missing))[:, None], words, OFF).reshape(groups, -1)
    words.sort(axis=1)
    asked = (words != OFF) & (np.diff(words, axis=1, prepend=OFF) != 0)  # each word once
    banks = words % BANKS + BANKS * np.arange(groups)[:, None]
    made = np.bincount(banks[asked], minlength=groups * BANKS).reshape(groups, BANKS).max(axis=1)
    return np.stack([made, made > 0], axis=1).reshape(-1, max(1, width // WORD), 2).sum(axis=1)


def _mean(found: list[tuple[float, float] | None]) -> tuple[float | None, float | None]:
    if None in found:
        return None, None
    made, least = np.mean([pair for pair in found if pair], axis=0)
    return float(made), float(least)


def typical(accesses: Sequence[SharedAccess], kind: str) -> tuple[float, float] | None:
    """Wavefronts and the least of them over all accesses of a kind, each counted once; None where one is not known."""
    chosen = [(one.wavefronts, one.ideal, one.count) for one in accesses if one.kind == kind]
    if not chosen or any(made is None for made, _, _ in chosen):
        return None
    made, least, counts = np.array(chosen, float).T
    return float(np.average(made, weights=counts)), float(np.average(least, weights=counts))

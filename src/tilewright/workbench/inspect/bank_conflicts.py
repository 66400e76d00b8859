"""Predict the bank conflicts of shared memory: the wavefronts per warp access.

Shared memory has 32 banks, each of which serves one 4-byte word per wavefront. Different words in the same bank take
one wavefront each; lanes that access the same word share it. The ideal is one wavefront per 128 bytes. Addresses come
from simulating the PTX, so Triton layouts and CUDA C++ are handled alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.workbench.inspect.compiler import CompiledKernel
from tilewright.workbench.inspect.line_info import CodeLine, SourceLine, code_lines
from tilewright.workbench.inspect.ptx_sim import WARP, Access, shared_accesses

BANKS = 32
WORD = 4  # bytes
INACTIVE = np.iinfo(np.int64).min  # the word of an inactive lane
NO_WAVEFRONTS = (0.0, 0.0)  # no thread is active
# Substituted for unknown sizes and pointers. Wavefronts that differ between the two depend on an unknown value.
PLACEHOLDERS = (2**20, 2**20 + 48)


@dataclass(frozen=True)
class SharedAccess:
    """All accesses of one kind and width on one source line."""

    kind: str  # load, store or async copy
    width: int  # bytes per thread
    source_line: SourceLine
    count: int  # instructions
    wavefronts: float | None  # per warp access, on average; None if the addresses are unknown
    ideal: float | None


def shared_memory_accesses(compiled: CompiledKernel, arguments: Sequence[int | None] = ()) -> list[SharedAccess] | None:
    """Return the shared memory accesses of a kernel in code order, or None without PTX.

    `arguments` are the integer launch arguments by position.
    """
    if "ptx" not in compiled.texts:
        return None
    lines = kernel_lines(code_lines(compiled, "ptx"), compiled.symbol)
    groups: dict[tuple[str, int, SourceLine], list[tuple[float, float] | None]] = {}
    runs = [shared_accesses(lines, compiled.threads, arguments, placeholder) for placeholder in PLACEHOLDERS]
    for access, other in zip(*runs, strict=True):
        found = _average(access)
        group = groups.setdefault((access.kind, access.width, access.source_line), [])
        if found != NO_WAVEFRONTS:
            group.append(found if found == _average(other) else None)
    return [SharedAccess(*key, len(found), *_mean(found)) for key, found in groups.items() if found]


def kernel_lines(lines: Sequence[CodeLine], symbol: str) -> Sequence[CodeLine]:
    """Return the lines of one kernel; a CUDA C++ file may define several."""
    starts = [n for n, line in enumerate(lines) if re.search(rf"\.entry {re.escape(symbol)}\(", line.code)]
    rest = lines[starts[0] :] if starts else lines
    return rest[: next((n for n, line in enumerate(rest) if line.code.startswith("}")), len(rest))]


def _average(access: Access) -> tuple[float, float] | None:
    """Return the mean and the ideal wavefronts over the active warps."""
    if not access.active.any():
        return NO_WAVEFRONTS
    if access.addresses is None:
        return None
    counts = wavefronts(access.addresses, access.active, access.width)
    actual, ideal = counts[counts[:, 1] > 0].mean(axis=0)
    return float(actual), float(ideal)


def wavefronts(addresses: NDArray[np.int64], active: NDArray[np.bool_], width: int) -> NDArray[np.int64]:
    """Return the actual and the ideal wavefronts per warp. Accesses wider than 4 bytes go by half or quarter warps."""
    missing = -len(addresses) % WARP
    groups = max(1, width // WORD) * -(-len(addresses) // WARP)  # 32 words each
    words = np.pad(addresses, (0, missing))[:, None] // WORD + np.arange(max(1, width // WORD))
    words = np.where(np.pad(active, (0, missing))[:, None], words, INACTIVE).reshape(groups, -1)
    words.sort(axis=1)
    distinct = (words != INACTIVE) & (np.diff(words, axis=1, prepend=INACTIVE) != 0)
    banks = words % BANKS + BANKS * np.arange(groups)[:, None]
    actual = np.bincount(banks[distinct], minlength=groups * BANKS).reshape(groups, BANKS).max(axis=1)
    return np.stack([actual, actual > 0], axis=1).reshape(-1, max(1, width // WORD), 2).sum(axis=1)


def _mean(found: list[tuple[float, float] | None]) -> tuple[float | None, float | None]:
    if None in found:
        return None, None
    actual, ideal = np.mean([pair for pair in found if pair], axis=0)
    return float(actual), float(ideal)


def mean_wavefronts(accesses: Sequence[SharedAccess], kind: str) -> tuple[float, float] | None:
    """Return the mean actual and ideal wavefronts of all instructions of a kind; None if any is unknown."""
    chosen = [(one.wavefronts, one.ideal, one.count) for one in accesses if one.kind == kind]
    if not chosen or any(actual is None for actual, _, _ in chosen):
        return None
    actual, ideal, counts = np.array(chosen, float).T
    return float(np.average(actual, weights=counts)), float(np.average(ideal, weights=counts))

"""A disk cache for the output of compilers and disassemblers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from tilewright import files, settings


def cached(key: bytes, suffix: str, compute: Callable[[], bytes]) -> bytes:
    """Return the cached output, computing it on a miss. `key` must hold everything the output depends on."""
    folder = settings.cache_dir() / "inspect"
    path = folder / f"{hashlib.sha256(key).hexdigest()[:32]}.{suffix}"
    if path.exists():
        return path.read_bytes()
    output = compute()
    files.replace(path, output)
    return output

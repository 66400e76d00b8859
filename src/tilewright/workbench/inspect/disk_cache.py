"""A disk cache for the output of compilers and disassemblers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from tilewright import settings


def cached(key: bytes, suffix: str, compute: Callable[[], bytes]) -> bytes:
    """Return the cached output, computing it on a miss. `key` must hold everything the output depends on."""
    folder = settings.cache_dir() / "inspect"
    path = folder / f"{hashlib.sha256(key).hexdigest()[:32]}.{suffix}"
    if path.exists():
        return path.read_bytes()
    output = compute()
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")  # renamed when complete: another process may be reading
    part.write_bytes(output)
    part.replace(path)
    return output

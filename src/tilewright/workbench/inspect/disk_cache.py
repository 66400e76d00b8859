"""What a compiler's tool said, kept on disk by what it was asked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from tilewright import settings


def kept(question: bytes, ending: str, answer: Callable[[], bytes]) -> bytes:
    """The answer, worked out once. `question` must hold all that it depends on."""
    folder = settings.cache_dir() / "inspect"
    path = folder / f"{hashlib.sha256(question).hexdigest()[:32]}.{ending}"
    if path.exists():
        return path.read_bytes()
    found = answer()
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")  # whole or not at all: another process may be reading
    part.write_bytes(found)
    part.replace(path)
    return found

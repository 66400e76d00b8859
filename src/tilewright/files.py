"""Files that several processes read and write at once."""

from __future__ import annotations

import uuid
from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """Write a file in one step: other processes see the old content or the new, and may write it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

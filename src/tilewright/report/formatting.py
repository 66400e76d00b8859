"""Where, when and with what records were made: a line for each combination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def provenance(said: str, records: Iterable[Mapping[str, Any]], *libraries: str, end: str = ".") -> list[str]:
    """`Counted on NVIDIA H200, 2026-01-02, triton 3.6.0.`, each once. A verdict may be of a machine without a GPU."""
    lines = (
        ", ".join(
            [
                f"{said} {r['device'].get('name', 'a machine without a GPU')}",
                r["date"][:10],
                *(f"{library} {r['versions'][library]}" for library in libraries),
            ]
        )
        for r in records
    )
    return list(dict.fromkeys(line + end for line in lines))

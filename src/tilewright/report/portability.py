"""The resources that each kernel uses on each GPU, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.cost import size
from tilewright.hardware import datasheet
from tilewright.report import formatting

CAPTION = "Each cell: registers per thread / shared memory per block / occupancy (what limits it)."


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Render one row per kernel and one column per GPU."""
    gpus = list(dict.fromkeys(gpu for r in records for gpu in r["gpus"]))
    columns = ("kernel", *(f"{gpu}, {datasheet(gpu).arch}" for gpu in gpus))
    lines = [
        (f"[`{r['kernel']}`](../{r['file']})", *(_cell(r["gpus"].get(gpu)) for gpu in gpus))
        for r in sorted(records, key=lambda r: (r["file"], r["kernel"]))
    ]
    dates: dict[str, list[str]] = {}
    for r in records:
        dates.setdefault(r["versions"]["triton"], []).append(r["date"][:10])
    where = [f"Compiled {formatting.date_range(days)} by triton {triton}." for triton, days in dates.items()]
    return "\n".join([CAPTION, "", formatting.table(columns, lines), "", *where]) + "\n"


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    limit = f" ({found['limiter']})" if found["limiter"] else ""
    spilled = f", {size(found['spills'])} spilled" if found["spills"] else ""
    return f"{found['registers']} / {size(found['shared'])} / {found['occupancy']:.0%}{limit}{spilled}"

"""What each kernel takes of each GPU: records as Markdown, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.cost import size
from tilewright.hardware import datasheet


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A line a kernel, a column a GPU: registers of a thread, shared memory of a block, occupancy, what limits it."""
    gpus = list(dict.fromkeys(gpu for r in records for gpu in r["gpus"]))
    heads = [f"{gpu}, {datasheet(gpu).arch}" for gpu in gpus]
    lines = [f"| kernel | {' | '.join(heads)} |", "|---|" + "---|" * len(gpus)]
    for r in sorted(records, key=lambda r: (r["file"], r["kernel"])):
        cells = [_cell(r["gpus"].get(gpu)) for gpu in gpus]
        lines.append(f"| [`{r['kernel']}`](../{r['file']}) | {' | '.join(cells)} |")
    where = dict.fromkeys(f"Compiled {r['date'][:10]} by triton {r['versions']['triton']}." for r in records)
    return "\n".join([*lines, "", *where]) + "\n"


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    limit = f" ({found['limiter']})" if found["limiter"] else ""
    spilled = f", {size(found['spills'])} spilled" if found["spills"] else ""
    return f"{found['registers']}, {size(found['shared'])}, {found['occupancy']:.0%}{limit}{spilled}"

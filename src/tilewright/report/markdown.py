"""Tables from records inside Markdown pages, between markers, so that no number is typed by hand.

<!-- records: softmax forward -->
…replaced…
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from tilewright.report.rows import Row, rows

BLOCK = re.compile(r"(<!-- records: (?P<what>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
BASELINES = ("eager", "compile")


def fill(page: str, records: list[dict[str, Any]]) -> str:
    """The page with every marked block made anew. A block names an op, or `summary`, and a direction."""

    def block(found: re.Match[str]) -> str:
        what, direction = found["what"].split()
        chosen = [r for r in records if r["direction"] == direction and what in (r["op"], "summary")]
        table = _summary(list(rows(chosen))) if what == "summary" else _all_kernels(list(rows(chosen)))
        return f"{found[1]}{table}\n{_provenance(chosen)}\n{found[3]}"

    return BLOCK.sub(block, page)


def _summary(found: Sequence[Row]) -> str:
    """One line a case: the two baselines, the fastest of the others, and its share of the ceiling."""
    lines = ["| op | case | eager | compile | fastest other | time | of ceiling | vs best baseline |"]
    lines.append("|---|---|--:|--:|---|--:|--:|--:|")
    for (op, case), group in groupby(found, key=lambda r: (r.op, r.case)):
        timed = {row.kernel: row for row in group if row.us}
        others = [row for name, row in timed.items() if name not in BASELINES]
        if not others:
            continue
        best = min(others, key=lambda row: row.us or 0)
        base = min(timed[name].us or 0 for name in BASELINES if name in timed)
        cells = [_us(timed[name]) if name in timed else "" for name in BASELINES]
        share = f"{best.share:.0%}" if best.share else ""
        name = f"{best.kernel}{' (stale)' if best.is_stale else ''}"
        lines.append(
            f"| {op} | {case} | {' | '.join(cells)} | {name} | {_us(best)} | {share} | {base / (best.us or 1):.2f}x |"
        )
    return "\n".join(lines)


def _all_kernels(found: Sequence[Row]) -> str:
    """One line a case, one column a kernel: time and share of the ceiling."""
    kernels = list(dict.fromkeys(row.kernel for row in sorted(found, key=lambda r: r.kernel)))
    lines = [f"| case | {' | '.join(kernels)} |", "|---|" + "--:|" * len(kernels)]
    for case, group in groupby(found, key=lambda r: r.case):
        by_kernel = {row.kernel: row for row in group}
        cells = [_cell(by_kernel.get(kernel)) for kernel in kernels]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None or not row.us or not row.share:
        return ""
    text = f"{_us(row)}, {row.share:.0%}{', stale' if row.is_stale else ''}"
    return f"**{text}**" if row.is_fastest else text


def _us(row: Row) -> str:
    return f"{row.us:.1f} us"


def _provenance(records: Sequence[dict[str, Any]]) -> str:
    """Where, when and with what: one line a combination."""
    seen = dict.fromkeys(
        f"{r['device']['name']}, {r['date'][:10]}, torch {r['versions']['torch']}, triton {r['versions']['triton']}, "
        f"{r['dtype']}"
        for r in records
    )
    return "\n" + "\n".join(f"Measured on {line}." for line in seen) if seen else "\nNo records yet."

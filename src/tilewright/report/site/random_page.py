"""Results on shapes drawn at random, by `bench --random`."""

from __future__ import annotations

from html import escape
from typing import Any

from tilewright.report.drawn import ALL, WORST, Summary, notes, row, summaries
from tilewright.report.site.components import Page

COLUMNS = ("operation", "case", "direction", "ours", "best baseline", "ours (µs)", "best (µs)", "ours / best")
NUMBERS = {5, 6, 7}  # positions of the right-aligned columns


def page(records: list[dict[str, Any]], raw: str) -> Page:
    """Return the page of all records of kind "random"; `raw` is the file that holds them."""
    body = [
        "<header><h1>Random shapes</h1>",
        "<p>Cases drawn from the sizes of public models, powers of two, odd and prime numbers, from 1 KiB to 4 GiB, "
        "over any dimensions and in several layouts. Our public function beside the fastest of eager PyTorch, "
        "torch.compile and the installed peers; the worst cases first. "
        f'<a href="{escape(raw)}">Records</a></p></header>',
        *(_section(summary) for summary in summaries(records)),
    ]
    return Page("Random shapes", "Random shapes · Tilewright", "\n".join(body))


def _section(summary: Summary) -> str:
    lines = "".join(f'<p class="note">{escape(note)}.</p>' for note in notes(summary))
    return (
        f"<section><h2>{escape(summary.title)}</h2><p>{escape(summary.sentence())}.</p>{lines}"
        f"{_table(summary) if summary.results else ''}</section>"
    )


def _table(summary: Summary) -> str:
    shown = summary.results[:WORST] if summary.op == ALL else summary.results

    def cells(values: tuple[str, ...], tag: str) -> str:
        kinds = (' class="number"' if n in NUMBERS else "" for n in range(len(values)))
        return "".join(f"<{tag}{kind}>{escape(value)}</{tag}>" for kind, value in zip(kinds, values, strict=True))

    rows = "".join(f"<tr>{cells(row(one), 'td')}</tr>" for one in shown)
    return f'<div class="wide"><table><thead><tr>{cells(COLUMNS, "th")}</tr></thead><tbody>{rows}</tbody></table></div>'

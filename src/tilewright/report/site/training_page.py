"""Whole training steps, by `train-step`: speed, MFU, memory, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from tilewright.record import is_stale
from tilewright.report.formatting import STALE_NOTE, digits
from tilewright.report.site.components import Page
from tilewright.report.training import IDLE, MS, Rows, TrainingJob, by_kind, jobs
from tilewright.workbench.train.kinds import kinds

NOTE = """<p class="note">A bar is the time of one step. MFU divides the model's FLOPs by the time and the measured peak
of the GPU, HFU the FLOPs that the hardware performs. Intervals are 95 % bootstrap intervals; speedups are over the
first variant of the same run.</p>"""


def page(records: Sequence[dict[str, Any]], raw: str) -> Page:
    """Return the page of all records of kind "train_step"; `raw` is the file that holds them."""
    body = [
        "<header><h1>Training steps</h1>",
        "<p>One step of training a whole model with random weights: forward, backward and optimizer, with torch's "
        f'kernels, other libraries\' and ours. <a href="{escape(raw)}">Records</a></p></header>',
        *map(_section, jobs(records)),
        *_not_measured(records),
    ]
    return Page("Training", "Training steps · Tilewright", "\n".join(body))


def _section(job: TrainingJob) -> str:
    stale = f'<p class="note">{STALE_NOTE}</p>' if any(map(is_stale, job.records)) else ""
    tables = "".join(map(_table, (job.speeds(), job.memory(), job.times())))
    return (
        f"<section><h2>{escape(job.title)}, on {escape(job.gpu)}</h2>{_bars(job)}{NOTE}{tables}{stale}"
        f"<h3>What limits each</h3>{''.join(map(_diagnosis, job.records))}</section>"
    )


def _bars(job: TrainingJob) -> str:
    """Draw where the time of each variant goes, on one scale."""
    of_each = [by_kind(r) for r in job.records]
    longest = max(sum(one.values()) for one in of_each)
    named = [name for name in (*kinds(), IDLE) if any(one.get(name, 0.0) > longest / 500 for one in of_each)]
    legend = "".join(f'<li><i class="{_css(name)}"></i>{escape(name)}' for name in named)
    lines = []
    for r, one in zip(job.records, of_each, strict=True):
        parts = "".join(
            f'<i class="{_css(name)}" style="width:{100 * us / longest:.2f}%" '
            f'title="{escape(name)}: {digits(us / MS)} ms"></i>'
            for name in named
            if (us := one.get(name, 0.0))
        )
        time = f"{digits(r['median_us'] / MS)} ms"
        lines.append(f"<tr><th>{escape(r['kernel'])}<td>{time}<td><span>{parts}</span>")
    return f'<table class="stacked">{"".join(lines)}</table><ul class="legend">{legend}</ul>'


def _css(kind: str) -> str:
    return f"part-{kind.replace(' ', '-').lower()}"


def _table(rows: Rows) -> str:
    last = len(rows.columns) - rows.texts

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="number"' if 0 < n < last else "" for n in range(len(cells)))
        return f"<tr>{''.join(f'<{tag}{kind}>{escape(cell)}' for kind, cell in zip(kinds, cells, strict=True))}"

    body = "".join(line(cells, "td") for cells in rows.cells)
    return f'<div class="wide"><table><thead>{line(rows.columns, "th")}</thead><tbody>{body}</table></div>'


def _diagnosis(r: dict[str, Any]) -> str:
    found = r["diagnosis"]
    lines = "".join(f"<li>{escape(line)}" for line in found["evidence"])
    return (
        f'<p><b>{escape(r["kernel"])}</b>: {escape(found["limit"])}</p><ul class="evidence">{lines}'
        f"<li>Next: {escape(found['next'])}</ul>"
    )


def _not_measured(records: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"<li><b>{escape(r['kernel'])}</b> on {escape(r['op'])}: {escape(r['reason'])}" for r in records if r["reason"]
    ]
    return [f"<section><h2>Not measured</h2><ul>{''.join(lines)}</ul></section>"] if lines else []

"""The report of many solutions: KernelBench's `fast_p`, and a row per solution, as Markdown and as HTML.

fast_p is the share of problems with a right solution that is more than p times as fast as the reference; fast_0 is the
share with a right solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tilewright.workbench.check.batch import Outcome

THRESHOLDS = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0, 4.0)
NOT_MEASURED = "not measured"
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#1a1a1a}"
    "table{border-collapse:collapse;margin:1rem 0;width:100%}th,td{padding:.3rem .6rem;text-align:left;"
    "border-bottom:1px solid #ddd;vertical-align:top;overflow-wrap:anywhere}th{white-space:nowrap}"
    ".right{color:#067a2e}.bad{color:#b3261e}"
)


def fast_p(outcomes: Sequence[Outcome], p: float) -> float | None:
    """Return the share of problems whose best right solution is more than `p` times as fast; None if not measured."""
    best: dict[str, float] = {}
    for outcome in outcomes:
        is_right = outcome.verdict == "right"
        if is_right and outcome.speedup is None and p > 0:
            return None
        value = (outcome.speedup or 1.0) if is_right else 0.0
        best[outcome.problem] = max(value, best.get(outcome.problem, 0.0))
    return sum(value > p for value in best.values()) / len(best) if best else None


def summary(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a table: a row per folder of problems and one for all, a column per threshold."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.problem.rpartition("/")[0], []).append(outcome)
    rows = [(name or "all", group) for name, group in groups.items()]
    if len(rows) > 1:
        rows.append(("all", list(outcomes)))
    header = ["problems", "count", "right", *(f"fast_{p:g}" for p in THRESHOLDS)]
    return [header, *([name, *_counts(group), *(_share(fast_p(group, p)) for p in THRESHOLDS)] for name, group in rows)]


def details(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a table with a row per solution."""
    header = ["problem", "solution", "verdict", "cases", "speedup", "evidence"]
    return [header, *map(_row, outcomes)]


def markdown(outcomes: Sequence[Outcome], title: str) -> str:
    parts = [f"# {title}", *(_markdown_table(table) for table in (summary(outcomes), details(outcomes)))]
    return "\n\n".join(parts) + "\n"


def html(outcomes: Sequence[Outcome], title: str) -> str:
    body = "".join(_html_table(table) for table in (summary(outcomes), details(outcomes)))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )


def _row(outcome: Outcome) -> list[str]:
    name = outcome.solution.rpartition("/")[2]
    cases = f"{outcome.right_cases}/{outcome.cases}" if outcome.cases else ""
    speedup = "" if outcome.verdict != "right" else f"{outcome.speedup:.2f}" if outcome.speedup else NOT_MEASURED
    return [outcome.problem, name, outcome.verdict, cases, speedup, outcome.reason or "; ".join(outcome.labels)]


def _counts(group: Sequence[Outcome]) -> list[str]:
    right = {outcome.problem for outcome in group if outcome.verdict == "right"}
    return [str(len({outcome.problem for outcome in group})), str(len(right))]


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{100 * value:.1f} %"


def _markdown_table(table: Sequence[Sequence[str]]) -> str:
    header, *rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in table]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _html_table(table: Sequence[Sequence[str]]) -> str:
    header, *rows = table
    head = "".join(f"<th>{escape(cell)}" for cell in header)
    body = "".join("<tr>" + "".join(_cell(cell, name) for cell, name in zip(row, header, strict=True)) for row in rows)
    return f"<table><tr>{head}{body}</table>"


def _cell(cell: str, column: str) -> str:
    kind = "" if column != "verdict" else ' class="right"' if cell == "right" else ' class="bad"'
    return f"<td{kind}>{escape(cell)}"

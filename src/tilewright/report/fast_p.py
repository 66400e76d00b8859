"""The report of many solutions: KernelBench's `fast_p`, and a row per solution, as Markdown and as HTML.

fast_p is the share of problems with a right solution that is more than p times as fast as the reference; fast_0 is the
share with a right solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tilewright.workbench.check.batch import MISSING, PENDING, Outcome

THRESHOLDS = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0, 4.0)
NOT_MEASURED = "not measured"
NAMES = ("problem", "solution", "problems")
NUMBERS = ("count", "right", "cases", "seconds", "speedup", *(f"fast_{p:g}" for p in THRESHOLDS))
STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:80rem;padding:0 1rem}"
    "div{overflow-x:auto;margin:1rem 0}table{border-collapse:collapse;width:100%}"
    "th,td{padding:.3rem .6rem;text-align:left;border-bottom:1px solid #8884;vertical-align:top;white-space:nowrap}"
    ".number{text-align:right;font-variant-numeric:tabular-nums}.name{white-space:normal}"
    ".evidence{white-space:normal;overflow-wrap:anywhere;min-width:18rem}"
    ".right{color:#067a2e}.bad{color:#b3261e}.unknown{color:#666}h1{line-height:1.2}"
    "@media (prefers-color-scheme:dark){.right{color:#7cc9a0}.bad{color:#ff8a80}.unknown{color:#9aa2ad}}"
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
    header = ["problem", "verdict", "cases", "seconds", "speedup", "solution", "evidence"]
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
    seconds = f"{outcome.seconds:.1f}" if outcome.seconds else ""
    evidence = outcome.reason or "; ".join(outcome.labels)
    return [outcome.problem, outcome.verdict, cases, seconds, speedup, name, evidence]


def _counts(group: Sequence[Outcome]) -> list[str]:
    right = {outcome.problem for outcome in group if outcome.verdict == "right"}
    return [str(len({outcome.problem for outcome in group})), str(len(right))]


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{100 * value:.1f} %"


def _markdown_table(table: Sequence[Sequence[str]]) -> str:
    as_text = lambda cell: escape(cell, quote=False).replace("|", "\\|").replace("\n", " ")
    header, *rows = [[as_text(cell) for cell in row] for row in table]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _html_table(table: Sequence[Sequence[str]]) -> str:
    header, *rows = table
    head = "".join(_cell("th", name, name) for name in header)
    body = "".join(
        "<tr>" + "".join(_cell("td", cell, name) for cell, name in zip(row, header, strict=True)) for row in rows
    )
    return f"<div><table><tr>{head}{body}</table></div>"


def _cell(tag: str, cell: str, column: str) -> str:
    kind = "number" if column in NUMBERS else "name" if column in NAMES else column
    if column == "verdict" and tag == "td":
        kind = "right" if cell == "right" else "unknown" if cell in (MISSING, PENDING) else "bad"
    text = escape(cell)
    return f'<{tag} class="{kind}">{text.replace("_", "_<wbr>") if column in NAMES else text}'

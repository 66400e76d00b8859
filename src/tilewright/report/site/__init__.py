"""The results as an HTML site that needs no network: a page per op, the roofline, and the records as JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from tilewright.errors import MissingPackage
from tilewright.record import TRAIN_STEP
from tilewright.report.site import index_page, op_page, random_page, roofline_page, training_page
from tilewright.report.site.components import Page
from tilewright.report.timings import timing_rows

_TEMPLATES = Path(__file__).parent
_SHARED = "plotly.min.js"


def build(records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write the site and return its files. Files of the same name are overwritten, others stay."""
    timings = [r for r in records if r["kind"] == "timing"]
    by_op: dict[str, list[dict[str, Any]]] = {}
    for r in timings:
        by_op.setdefault(r["op"], []).append(r)
    pages = dict(zip(by_op, _file_names(by_op), strict=True))
    styles = op_page.LineStyles(timings)
    found = {name: list(timing_rows(of_op)) for name, of_op in by_op.items()}
    links = {"index.html": "Results", **{f"{page}.html": name for name, page in pages.items()}}
    links |= {"roofline.html": "Roofline"}
    drawn = [r for r in records if r["kind"] == "random"]
    if drawn:
        links["random.html"] = "Random shapes"
    trained = [r for r in records if r["kind"] == TRAIN_STEP]
    if trained:
        links["training.html"] = "Training"

    files = {_SHARED: _plotly()}
    files["index.html"] = _render(index_page.page(timings, found, pages), links)
    for name, page in pages.items():
        raw = f"raw/{page}.jsonl"
        files[raw] = _json_lines(by_op[name])
        files[f"{page}.html"] = _render(op_page.page(by_op[name], found[name], styles, raw), links)
    every_row = [row for of_op in found.values() for row in of_op]
    files["roofline.html"] = _render(roofline_page.page(records, every_row), links)
    if drawn:
        files["raw/random.jsonl"] = _json_lines(drawn)
        files["random.html"] = _render(random_page.page(drawn, "raw/random.jsonl"), links)
    if trained:
        files["raw/training.jsonl"] = _json_lines(trained)
        files["training.html"] = _render(training_page.page(trained, "raw/training.jsonl"), links)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def single_op(records: list[dict[str, Any]], path: Path) -> None:
    """Write the page of an op, or of several, as one file that includes the records."""
    timings = [r for r in records if r["kind"] == "timing"]
    page = op_page.page(timings, list(timing_rows(timings)), op_page.LineStyles(timings), "#raw")
    path.write_text(_render_alone(page, timings, "timings.jsonl"), encoding="utf-8")


def single_roofline(records: list[dict[str, Any]], path: Path) -> None:
    """Write the roofline as one file that includes the records."""
    used = [r for r in records if r["kind"] in ("timing", "sweep")]
    timings = [r for r in used if r["kind"] == "timing"]
    page = roofline_page.page(used, list(timing_rows(timings)))
    path.write_text(_render_alone(page, used, "roofline.jsonl"), encoding="utf-8")


def _render(page: Page, links: dict[str, str]) -> str:
    here = [
        f'<a href="{file}"{" aria-current=page" * (name == page.name)}>{escape(name)}</a>'
        for file, name in links.items()
    ]
    script = f'<script src="{_SHARED}"></script>' if page.data else ""
    return _filled(page, f"<nav>{''.join(here)}</nav>", script)


def _render_alone(page: Page, records: list[dict[str, Any]], file_name: str) -> str:
    raw = f'<p id="raw"><a download="{file_name}" href="#raw">Download the records</a> (JSON lines)</p>'
    lines = f'<script type="application/json" id="lines">{_in_script(_json_lines(records))}</script>'
    return _filled(page, "", f"{raw}{lines}<script>{_plotly()}</script>")


def _filled(page: Page, navigation: str, scripts: str) -> str:
    template, css, js = ((_TEMPLATES / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    if page.data:
        scripts += f'<script type="application/json" id="data">{_in_script(json.dumps(page.data))}</script>'
        scripts += f"<script>\n{js}</script>"
    parts = {"title": escape(page.title), "style": css, "navigation": navigation, "body": page.body, "scripts": scripts}
    return re.sub(r"<!-- (\w+) -->", lambda found: parts[found[1]], template)


def _in_script(text: str) -> str:
    """Return JSON in which no string can close the script element or open a comment."""
    return text.replace("<", "\\u003c")


def _json_lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(r) + "\n" for r in records)


def _file_names(names: Iterable[str]) -> list[str]:
    """Return a portable and unique file name for each op."""
    taken = ["index", "roofline", "random", "training"]
    first = len(taken)
    for name in (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "op" for name in names):
        tries = [name, *(f"{name}-{n}" for n in range(2, len(taken) + 3))]
        taken.append(next(free for free in tries if free.lower() not in map(str.lower, taken)))
    return taken[first:]


def _plotly() -> str:
    try:
        package = resources.files("plotly")
    except ModuleNotFoundError:
        raise MissingPackage("the report", "plotly") from None
    return (package / "package_data" / "plotly.min.js").read_text(encoding="utf-8")

"""The report site, rendered in a real browser."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urldefrag

import pytest

from browser import chromium
from sample_records import timing_record
from tilewright import record
from tilewright.cli import main
from tilewright.errors import MissingPackage
from tilewright.report import site
from tilewright.report.formatting import digits
from tilewright.report.site.op_page import LineStyles
from tilewright.report.site.roofline_page import turning_point
from tilewright.report.timings import timing_rows

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

pytestmark = pytest.mark.xdist_group("browser")  # one browser, in one process

HOSTILE = "<script>document.title='taken'</script>&\"'"
SIZES = (256, 1024, 4096)
CEILINGS = {"copy": 4e12, "read": 4.4e12, "fp32": 5e13, "special": 4e12, "tensor.bfloat16": 7e14, "tensor.int8": 1.4e15}


def timing(kernel: str, us: float | None, case: dict[str, Any], **more: Any) -> dict[str, Any]:
    elements = case.get("M", 1) * case.get("N", 1024)
    content = {
        "cost": {"read": 2 * elements, "written": 2 * elements, "flops": {"fp32": 4 * elements, "special": elements}},
        "interval_us": [us * 0.98, us * 1.04] if us else None,
        "ceilings": CEILINGS,
        "dtype": "bfloat16",
    }
    return timing_record(kernel, us, case=case, **content | more)


def softmax() -> list[dict[str, Any]]:
    """A win at 256, a tie at 1024, a loss at 4096; backward in two dtypes; another GPU; one stale, one throttled, one
    that runs torch."""
    made = []
    for n, triton_us in zip(SIZES, (20.0, 50.0, 220.0), strict=True):
        case = {"M": 65536, "N": n}
        against = {"kernel": "eager", "ratio": 1.5, "interval": [1.45, 1.55]}
        made += [
            timing("triton", triton_us, case, against=against),
            timing("eager", 50.5 if n == 1024 else 100.0, case, host_us=7.5, extra_bytes=2048),
            timing("cuda", 2 * triton_us, case, state={"throttled": ["power cap"]} if n == 256 else {}),
            timing("triton-online", None, case, verdict="unsupported", reason="does not fit <this>"),
        ]
    made[0]["source"] = "another"
    for dtype in ("bfloat16", "float32"):
        made += [timing("triton", 30.0 + n, {"M": 64, "N": n}, direction="backward", dtype=dtype) for n in SIZES[:2]]
    made += [timing("triton", 4.0, {"M": 8, "N": 256}, gpu="l4", calls=16, interval_us=None, is_torchs=True)]
    return made


def hostile() -> list[dict[str, Any]]:
    """Names that contain markup, and cases that no single size distinguishes."""
    cases = [{"N": 64, HOSTILE: HOSTILE}, {"N": 64, HOSTILE: "none"}]
    return [timing(HOSTILE, 9.0, case) | {"op": HOSTILE, "is_baseline": False} for case in cases]


def sweep() -> dict[str, Any]:
    points = []
    for k in (1, 8, 64):
        us = 10.0 * max(1, k / 6.25)
        points.append(
            {"k": k, "us": us, "interval_us": [us * 0.99, us * 1.01], "bytes": 40_000_000, "flops": k * 10**7}
        )
    like = timing("triton", 1.0, {"N": 1})
    about = {name: like[name] for name in ("ceilings", "device", "versions")}
    return record.stamp("sweep", "sweep", "triton", "old", elements=10**7, points=points, **about)


def everything() -> list[dict[str, Any]]:
    bare = timing("triton", 5.0, {"N": 64}, gpu="a100-80gb", ceilings={}) | {"op": "bare"}
    return [*softmax(), *hostile(), bare, sweep(), record.stamp("verdict", "softmax", "triton", "x")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    (made / "foreign.txt").write_text("unchanged")
    (made / "index.html").write_text("old")
    written = site.build(everything(), made)
    assert all(path.is_file() for path in written)
    site.single_op(softmax(), made / "single.html")
    site.single_roofline(everything(), made / "single-roofline.html")
    return made


class Browser:
    def __init__(self, driver: WebDriver, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        self.seen: tuple[str, int, str] | None = None  # the open page, its width and colour scheme

    def open(self, page: str, width: int = 1280, scheme: str = "light") -> Browser:
        """Load the page unless it is open: without requests to other hosts, console messages, or horizontal
        scrolling."""
        if self.seen == (page, width, scheme):
            return self
        self.seen = page, width, scheme
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get_log("browser")  # discard messages of the previous page
        self.driver.get_log("performance")
        self.driver.get((self.folder / page).as_uri())
        self.requests = self._requested()
        own = {(self.folder / name).as_uri() for name in (page, "plotly.min.js")}
        assert {url for url in self.requests if not url.startswith(("data:", "blob:"))} <= own
        assert self.driver.get_log("browser") == []
        assert self.script("return document.documentElement.scrollWidth <= innerWidth")
        return self

    def _requested(self) -> set[str]:
        log = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in log if event["method"] == "Network.requestWillBeSent"]
        return {one["request"]["url"] for one in sent if not one["documentURL"].startswith("chrome:")}

    def script(self, text: str, *arguments: Any) -> Any:
        return self.driver.execute_script(text, *arguments)

    def choose(self, **choices: str) -> None:
        self.seen = None
        for name, text in choices.items():
            self.script(CHOOSE, name, text)

    def options(self, name: str) -> list[str]:
        return self.script("return [...document.querySelector(`[name=${arguments[0]}]`)].map((o) => o.text)", name)

    def drawn(self, chart: str = "chart") -> dict[str, Any]:
        return self.script(DRAWN, chart)

    def when(self, text: str) -> Any:
        """Return the value of an expression as soon as it has a length."""
        look = f"const look = () => {{ const found = {text}; found.length ? done(found) : setTimeout(look, 20) }}"
        return self.driver.execute_async_script(f"const [done] = arguments; {look}; look()")

    def text(self, selector: str = "body") -> str:
        return self.driver.find_element("css selector", selector).text


CHOOSE = """
const [name, text] = arguments;
const select = document.querySelector(`.choices [name=${name}]`);
select.value = [...select].find((option) => option.text === text).value;
select.dispatchEvent(new Event("change", { bubbles: true }));
"""
DRAWN = """
const chart = document.getElementById(arguments[0]);
const count = (selector) => chart.querySelectorAll(selector).length;
return {
  traces: chart.data.map(({ name, xaxis, mode, x, y, error_y, line, marker, text }) =>
    ({ name, xaxis, mode, x, y, dash: line?.dash, color: marker?.color, symbol: marker?.symbol, text,
       high: error_y?.visible ? error_y.array : null, low: error_y?.visible ? error_y.arrayminus : null })),
  titles: [chart.layout.xaxis?.title.text, chart.layout.xaxis2?.title.text],
  scale: chart._fullLayout.xaxis.type,
  points: count(".scatterlayer .point"), bars: count("path.yerror"),
  legend: [...chart.querySelectorAll(".legendtext")].map((one) => one.textContent),
  width: chart.clientWidth, height: chart.querySelector(".main-svg").clientHeight, room: chart.clientHeight,
};
"""


@pytest.fixture(scope="module")
def browser(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as session:
        yield Browser(session, folder)


def hostile_page(folder: Path) -> str:
    (page,) = (path.name for path in folder.glob("*.html") if path.name.startswith("script"))
    return page


def test_a_page_requests_only_the_plotting_library_next_to_it(browser, folder):
    assert browser.open("softmax.html").requests >= {
        (folder / name).as_uri() for name in ("softmax.html", "plotly.min.js")
    }


def test_each_kernel_has_a_line_with_points_and_error_bars(browser):
    drawn = browser.open("softmax.html").drawn()
    assert [(trace["name"], trace["xaxis"]) for trace in drawn["traces"]] == [
        (name, axis) for name in ("eager", "triton", "cuda") for axis in (None, "x2")
    ]
    assert all(trace["x"] == list(SIZES) for trace in drawn["traces"])
    assert (drawn["points"], drawn["bars"]) == (18, 18)
    time, share = drawn["traces"][2:4]
    assert time["y"] == [20.0, 50.0, 220.0]
    assert time["high"] == pytest.approx([0.8, 2.0, 8.8])
    assert time["low"] == pytest.approx([0.4, 1.0, 4.4])
    least = 4 * 65536 * 256 / 4e12 * 1e6
    assert share["y"][0] == pytest.approx(least / 20.0)
    assert share["y"][0] + share["high"][0] == pytest.approx(least / 19.6)
    assert (drawn["titles"], drawn["scale"]) == (["N", "N"], "log")
    assert drawn["legend"] == ["eager", "triton", "cuda"]
    assert drawn["room"] >= drawn["height"] > 400


def test_baselines_are_dashed_and_grey_and_stale_marks_hollow(browser):
    eager, triton, cuda = browser.open("softmax.html").drawn()["traces"][::2]
    assert eager["dash"] != "solid" == triton["dash"] == cuda["dash"]
    red, green, blue = (int(eager["color"][at : at + 2], 16) for at in (1, 3, 5))
    assert max(red, green, blue) - min(red, green, blue) < 32
    assert triton["color"] != cuda["color"]
    assert [symbol.endswith("-open") for symbol in triton["symbol"]] == [True, False, False]
    assert len({triton["symbol"][1], cuda["symbol"][0], eager["symbol"][0]}) == 3, "distinguishable without colour"


def test_the_tooltip_has_the_case_time_rate_and_result(browser):
    from selenium.webdriver import ActionChains

    browser.open("softmax.html")
    place = "const box = document.querySelectorAll('#chart .points')[1].children[0].getBoundingClientRect();"
    browser.script("document.querySelector('#chart').scrollIntoView()")
    x, y = browser.script(f"{place} return [box.x + box.width / 2, box.y + box.height / 2]")
    ActionChains(browser.driver, duration=0).move_by_offset(0, 0).perform()
    mouse = ActionChains(browser.driver, duration=0)
    mouse.w3c_actions.pointer_action.move_to_location(int(x), int(y))
    mouse.perform()
    text = browser.when("document.querySelector('.hovertext')?.textContent ?? ''")
    for word in ("triton", "M=65536, N=256", "20.0 µs (19.6 – 20.8)", "GB/s", "right", "stale", "wins"):
        assert word in text


def test_the_table_has_every_timing(browser):
    browser.open("softmax.html")
    tables = browser.driver.find_elements("css selector", "table.timings")
    assert len(tables) == 4, "forward and backward, two dtypes, two GPUs"
    browser.script("arguments[0].scrollIntoView()", tables[0])
    text = tables[0].text
    for words in (
        "M=65536, N=256",
        "19.6 – 20.8",
        "Speedup over eager",
        "1.45 – 1.55",
        "0.00205",
        "7.50",
        "loses to eager",
    ):
        assert words in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("triton", "cuda"))}
    assert "loses to" in lines["triton"], "the last one, at 4096"
    assert [mark.text for mark in tables[0].find_elements("css selector", "mark")] == ["stale", "throttled: power cap"]
    browser.script("arguments[0].scrollIntoView()", tables[-1])
    assert "16 calls back to back" in browser.text("#timings")
    assert "runs torch" in browser.text("#timings")
    below = browser.text(".untimed")
    assert "triton-online unsupported: does not fit <this>" in below
    assert "3 cases" in below


def test_the_header_has_wins_and_losses_each_in_its_colour(browser):
    header = browser.open("softmax.html").text("header")
    assert "Our fastest kernel: 1 win, 1 tie, 1 loss; no baseline in 5 cases" in header
    assert "M=65536, N=4096: triton loses to eager, 220 µs against 100 µs (speedup 0.455)" in header
    assert "1 stale" in header
    assert_results_have_colours(browser, ".verdict")


def assert_results_have_colours(browser, parent):
    """Green wins and red losses, also where both stand in one line."""
    for name, is_expected in (("wins", lambda r, g, b: g > r), ("loses", lambda r, g, b: r > g)):
        script = f"return getComputedStyle(document.querySelector('{parent} .{name}')).color"
        red, green, blue = map(int, re.findall(r"\d+", browser.script(script))[:3])
        assert is_expected(red, green, blue), (name, red, green, blue)


def labels(browser):
    """The labels along the horizontal axis of both charts."""
    ticks = "[...document.querySelectorAll('#chart .xtick text, #chart .x2tick text')]"
    return browser.script(f"return {ticks}.map((tick) => tick.textContent)")


def test_a_size_that_changes_along_the_axis_is_named_at_the_tick(browser):
    cases = [{"M": m, "N": n} for m, n in ((1024, 256), (1024, 1024), (64, 4096))]
    site.single_op([timing("triton", 5.0, case) for case in cases], browser.folder / "changing.html")
    browser.open("changing.html")
    assert labels(browser) == ["256 (M=1024)", "1,024 (M=1024)", "4,096 (M=64)"] * 2
    browser.choose(x="case")
    assert labels(browser) == ["1024, 256", "1024, 1024", "64, 4096"] * 2


def test_ticks_of_cases_are_short(browser):
    cases = [
        {"N": 2**26, "clips": clips, "coded": coded} for clips, coded in ((False, False), (True, False), (True, True))
    ]
    site.single_op(
        [timing("triton", 5.0, case) for case in (*cases, cases[0] | {"N": 100})], browser.folder / "flags.html"
    )
    browser.open("flags.html")
    assert labels(browser) == ["64 Mi", "64 Mi, clips", "64 Mi, clips, coded", "100"] * 2


def test_a_name_in_the_legend_hides_its_lines(browser):
    browser.open("softmax.html")
    for event in ("mousedown", "mouseup"):
        browser.script(
            "document.querySelector('#chart .legendtoggle').dispatchEvent(new MouseEvent(arguments[0]))", event
        )
    hidden = browser.when("chart._fullData.filter((t) => t.visible === 'legendonly').map((t) => t.name)")
    assert hidden == ["eager", "eager"], "in both charts"


def test_choices_change_the_charts(browser):
    browser.open("softmax.html")
    assert browser.options("gpu") == ["NVIDIA H200", "NVIDIA L4"]
    assert browser.options("x") == ["N", "minimum bytes", "case"]
    browser.choose(x="minimum bytes")
    drawn = browser.drawn()
    assert drawn["traces"][0]["x"] == [4 * 65536 * n for n in SIZES]
    browser.choose(x="case")
    assert browser.drawn()["scale"] == "category"
    browser.choose(direction="backward", dtype="float32")
    drawn = browser.drawn()
    assert [trace["name"] for trace in drawn["traces"]] == ["triton"] * 2
    assert drawn["traces"][0]["y"] == [30.0 + n for n in SIZES[:2]]
    assert drawn["points"] == 4
    browser.choose(gpu="NVIDIA L4")
    assert browser.drawn()["traces"] == []
    assert "No timings for this selection" in browser.text("#chart")
    browser.choose(direction="forward", dtype="bfloat16")
    drawn = browser.drawn()
    assert (drawn["points"], drawn["bars"]) == (2, 0), "that record has no interval"


def test_the_first_page_has_outcomes_environment_and_ceilings(browser):
    text = browser.open("index.html").text()
    assert "triton loses to eager, 220 µs against 100 µs (speedup 0.455)" in text
    assert "0.45 to 5.00: 1 win, 1 tie, 1 loss" in text
    assert_results_have_colours(browser, ".summary td")
    for words in ("NVIDIA H200", "NVIDIA L4", "torch 2.11.0", "1 stale", "copy 4,000 GB/s 4,800 GB/s 83"):
        assert words in text
    links = browser.script("return [...document.querySelectorAll('nav a')].map((a) => a.textContent)")
    assert links == ["Results", "softmax", HOSTILE, "bare", "Roofline"]


@pytest.mark.parametrize("page", ["softmax.html", "hostile"])
def test_links_lead_to_the_records(folder, page):
    page = hostile_page(folder) if page == "hostile" else page
    records = hostile() if page.startswith("script") else softmax()
    text = (folder / page).read_text()
    links = re.findall(r'<a href="(raw/[^"]+)">(\d+)</a>', text)
    assert sorted(int(line) for _, line in links) == list(range(1, len(records) + 1))
    (file,) = {unescape(urldefrag(link)[0]) for link, _ in links}
    lines = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    undated = [{name: value for name, value in r.items() if name != "date"} for r in lines]
    assert undated == [{name: value for name, value in r.items() if name != "date"} for r in records]


def test_a_row_links_the_line_of_its_own_record(folder):
    text = (folder / "softmax.html").read_text()
    lines = (folder / "raw" / "softmax.jsonl").read_text().splitlines()
    found = re.findall(r'scope="row"><code>(\w+)</code><td>([\d.,]+)<td>.*?<a href="raw/softmax.jsonl">(\d+)</a>', text)
    assert len(found) == 14
    for kernel, us, number in found:
        named = json.loads(lines[int(number) - 1])
        assert (named["kernel"], digits(named["median_us"])) == (kernel, us)


def test_names_are_never_markup(browser, folder):
    browser.open(hostile_page(folder))
    assert browser.driver.title == f"{HOSTILE} · Tilewright"
    assert browser.text("h1") == HOSTILE
    drawn = browser.drawn()
    assert drawn["scale"] == "category", "N does not distinguish the cases"
    assert drawn["legend"] == [HOSTILE]
    assert HOSTILE in browser.text("#chart")
    scripts = browser.script("return document.querySelectorAll('script:not([type])').length")
    assert scripts == 2, "the plotting library and the script of the page"
    browser.open("roofline.html")
    assert HOSTILE in browser.options("op")


def test_the_sweep_shows_where_it_becomes_compute_bound(browser):
    browser.open("roofline.html")
    text = browser.text("#sweep")
    assert turning_point(sweep()) in text
    assert "stale" in text
    drawn = browser.drawn("sweep-chart")
    assert [trace["xaxis"] for trace in drawn["traces"]] == ["x", "x2", "x3"]
    assert drawn["traces"][0]["y"] == [10.0, 12.8, 102.4]
    assert drawn["traces"][1]["y"] == pytest.approx([4000, 3125, 390.625])
    assert drawn["bars"] == 3


def test_the_roofline_has_ceilings_and_a_mark_per_kernel(browser):
    drawn = browser.open("roofline.html").drawn()
    ceilings = [trace for trace in drawn["traces"] if trace["mode"] == "lines"]
    assert len(ceilings) == 10, "copy and four units, measured and from the datasheet"
    slope = next(trace for trace in ceilings if trace["dash"] is None)
    assert slope["y"][0] / slope["x"][0] == pytest.approx(slope["y"][1] / slope["x"][1]) == pytest.approx(4.0)
    assert slope["y"][1] == pytest.approx(1400)
    marks = [trace for trace in drawn["traces"] if trace["mode"] == "markers"]
    assert sum(len(trace["x"]) for trace in marks) == drawn["points"] == 15, "all timings on this GPU"
    own = next(trace for trace in marks if trace["name"] == "softmax" and not trace["symbol"].endswith("-open"))
    elements = 65536 * 256
    assert own["x"][0] == pytest.approx(0.25), "special takes longer than fp32 here"
    assert own["y"][0] == pytest.approx(elements / 20.0 / 1e6)
    browser.choose(gpu="NVIDIA L4")
    assert browser.drawn()["points"] == 1
    browser.choose(gpu="NVIDIA A100-80GB")
    drawn = browser.drawn()
    assert len([trace for trace in drawn["traces"] if trace["mode"] == "lines"]) == 7, "no ceiling was measured there"
    assert "tensor" in browser.text("#chart")


def test_turning_point():
    found = turning_point(sweep())
    assert found == (
        "triton on NVIDIA H200: memory-bound up to k = 8 (3,125 GB/s, 78 % of the copy ceiling), "
        "compute-bound from k = 64 (6.2 TFLOP/s, 25 % of half the fp32 ceiling at k = 64)."
    )
    only_memory = sweep() | {"points": sweep()["points"][:1]}
    assert turning_point(only_memory).endswith("memory-bound up to k = 1 (4,000 GB/s, 100 % of the copy ceiling).")
    unknown = sweep() | {"ceilings": {}, "device": {"gpu": "unheard-of"}}
    assert turning_point(unknown) == ""


@pytest.mark.parametrize("page", ["single.html", "single-roofline.html"])
def test_a_single_file_page_has_charts_and_its_records(browser, page):
    browser.open(page)
    assert browser.drawn()["points"] > 0
    text = browser.script("return document.getElementById('lines').textContent")
    href, name = browser.script("const a = document.querySelector('#raw a'); return [a.href, a.download]")
    assert href.startswith("blob:")
    assert name.endswith(".jsonl")
    kinds = [json.loads(line)["kind"] for line in text.splitlines()]
    assert kinds == ["timing"] * len(softmax()) if page == "single.html" else kinds.count("sweep") == 1


@pytest.mark.parametrize("page", ["index.html", "softmax.html", "roofline.html"])
def test_pages_fit_a_phone_in_the_dark_theme(browser, page):
    browser.open(page, 390, "dark")
    assert browser.script("return document.documentElement.scrollWidth") == 390
    wide = "return [...document.querySelectorAll('header, section, .chart, .main-svg, select, h1')]"
    assert browser.script(f"{wide}.filter((e) => e.getBoundingClientRect().right > 390.5).length") == 0
    style = browser.script(
        "const [body, title] = ['body', '.xtitle'].map((one) => document.querySelector(one)).map((one) => "
        "one && getComputedStyle(one)); return [body.backgroundColor, body.color, title?.fill]"
    )
    ground, ink, title = (sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 if colour else None for colour in style)
    assert ground < 40
    assert ink > 200
    assert title is None or title > 200
    if page != "index.html":
        drawn = browser.drawn()
        assert drawn["width"] <= 358
        assert drawn["room"] >= drawn["height"]


def test_charts_follow_the_colour_scheme(browser):
    light = browser.open("softmax.html").drawn()["traces"][2]["color"]
    browser.seen = None
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert browser.drawn()["traces"][2]["color"] != light


def test_files_of_the_site_are_overwritten_and_others_stay(folder):
    assert (folder / "foreign.txt").read_text() == "unchanged"
    assert (folder / "index.html").read_text() != "old"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"index.html", "softmax.html", "roofline.html", "plotly.min.js", "raw/softmax.jsonl"} <= names


def test_ops_never_overwrite_other_pages(tmp_path):
    names = ("index", "a b", "a/b", "..", "Roofline")
    records = [timing("triton", 1.0, {"N": 1}) | {"op": name} for name in names]
    written = site.build(records, tmp_path)
    assert len({str(path).lower() for path in written}) == len(written) == 3 + 2 * len(names)
    assert all(path.resolve().is_relative_to(tmp_path.resolve()) for path in written)


def test_a_kernel_has_one_line_style_on_every_page_and_shares_it_with_none():
    few = [timing(kernel, 1.0, {"N": 1}) for kernel in ("eager", "triton", "cuda")]
    many = few + [timing(f"mine-{n}.py", 1.0, {"N": 1}) for n in range(12)]
    styles = LineStyles(many)
    on_one_page, on_another = styles.of(list(timing_rows(few))), styles.of(list(timing_rows(many)))
    assert [style["name"] for style in on_one_page] == ["eager", "triton", "cuda"]
    assert all(style in on_another for style in on_one_page)
    assert len({(style["baseline"], style["slot"]) for style in on_another}) == len(many)


def test_a_site_without_records_says_so(tmp_path):
    site.build([], tmp_path)
    assert "no records yet" in (tmp_path / "index.html").read_text()
    assert "No timings" in (tmp_path / "roofline.html").read_text()
    site.single_op([], tmp_path / "single.html")
    assert "No records" in (tmp_path / "single.html").read_text()


def test_a_missing_plotting_library_is_an_error_that_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingPackage, match="pip install plotly"):
        site.build([], tmp_path)


def test_records_of_schema_1_have_no_intervals(tmp_path):
    old = [r | {"interval_us": None, "against": None, "host_us": None, "extra_bytes": None} for r in softmax()]
    site.build(old, tmp_path)
    assert "20.0<td><td>" in (tmp_path / "softmax.html").read_text()


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tilewright", "report", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run


def test_the_command_uses_the_newest_record_of_each_call(command, tmp_path):
    file, out = tmp_path / "records.jsonl", tmp_path / "out"
    old = timing("triton", 77.0, {"N": 1}) | {"date": "2020-01-01T00:00:00+00:00"}
    record.append(file, [old, timing("triton", 5.0, {"N": 1}), timing("eager", 9.0, {"N": 1})])
    with file.open("a") as torn:
        torn.write('{"cut": "of')
    code, output, errors = command(file, "--out", out)
    assert code == 0
    assert output.endswith(f"Next: open {out}/index.html in a browser\n")
    assert "line 4 is incomplete" in errors
    assert "77.0" not in (out / "softmax.html").read_text()
    assert len((out / "raw" / "softmax.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# A page\n", "none of its lines is a record; it must be a file of JSON lines"),
        ('{"schema": 99}\n', "line 1 was written by a newer version"),
        (json.dumps(timing("triton", 1.0, {"N": 1})) + "\n[]\n", "line 2 is not a record"),
        (json.dumps(record.stamp("verdict", "softmax", "triton", "x")) + "\n", "has no timings"),
    ],
)
def test_unusable_records_are_an_error_of_one_line(command, tmp_path, text, words):
    file = tmp_path / "records.jsonl"
    file.write_text(text)
    code, output, errors = command(file, "--out", tmp_path / "out")
    assert (code, output) == (2, "")
    assert words in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()

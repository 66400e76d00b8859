"""The HTML page of `tilewright audit`, in a real browser."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from browser import chromium
from tilewright.interpreter.results import NEVER_WRITTEN, OUT_OF_BOUNDS, Finding, Launch, Traffic
from tilewright.workbench.audit.page import render

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver
    from selenium.webdriver.remote.webelement import WebElement

pytestmark = pytest.mark.xdist_group("browser")  # one browser, in one process

HOSTILE = "<script>document.title='taken'</script>&\"'"


def traffic(name: str, tensor: torch.Tensor, reads: Any = 0, writer: Any = 0, *, masked: int = 0) -> Traffic:
    """Return traffic as the interpreter counts it, with one lane per access and full sectors."""
    shape, size = tuple(tensor.shape), tensor.element_size()
    reads = np.broadcast_to(np.asarray(reads, np.uint32), shape).copy()
    writer = np.broadcast_to(np.asarray(writer, np.int32), shape).copy()
    lanes = int(reads.sum()) + int(np.count_nonzero(writer))
    return Traffic(
        name,
        tensor,
        loaded=int(reads.sum()) * size,
        stored=int(np.count_nonzero(writer)) * size,
        lanes=lanes + masked,
        masked=masked,
        sectors=-(-lanes * size // 32),
        distinct_read=int((reads > 0).sum()) * tensor.element_size(),
        distinct_written=int((writer > 0).sum()) * tensor.element_size(),
        reads=reads,
        writer=writer,
    )


def tiles(shape: tuple[int, int], tile: tuple[int, int]) -> np.ndarray:
    """Return the writer map of one program per tile, x across."""
    rows, columns = (np.arange(size) // step for size, step in zip(shape, tile, strict=True))
    return 1 + columns[None, :] + rows[:, None] * (-(-shape[1] // tile[1]))


FAULT = inspect.getsourcelines(tiles)[1]  # a line that a finding can name


def blur() -> Launch:
    """Tiles of 32 x 32 with a halo of one element; program (2, 1, 0) does not write its last 8 rows."""
    reads = np.zeros((96, 128))
    for row in range(0, 96, 32):
        for column in range(0, 128, 32):
            reads[max(row - 1, 0) : row + 33, max(column - 1, 0) : column + 33] += 1
    writer = tiles((96, 128), (32, 32))
    writer[56:64, 64:96] = 0
    detail = "nobody wrote y[56, 64], a result"
    gap = Finding(NEVER_WRITTEN, "_blur", "y", __file__, FAULT, (2, 1, 0), (56, 64), 256, detail)
    return Launch(
        "_blur",
        __file__,
        40,
        (4, 3, 1),
        {
            "x": traffic("x", torch.empty(96, 128), reads, masked=448),
            "y": traffic("y", torch.empty(96, 128), 0, writer),
            "weight": traffic("weight", torch.empty(3, 3)),
        },
        [gap],
        99,
        {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4},
    )


def flat() -> Launch:
    """Blocks of 128 over 1000 elements, and a scalar that all programs read."""
    writer = 1 + np.arange(1000) // 128
    arguments = [
        traffic("x", torch.empty(1000, dtype=torch.bfloat16), 1, masked=24),
        traffic("scale", torch.empty(()), 8),
        traffic("y", torch.empty(1000), 0, writer, masked=24),
        traffic("long", torch.empty(100_000), 1 + np.arange(100_000) // 10_000),
    ]
    return Launch("_scale", __file__, 60, (8, 1, 1), {t.name: t for t in arguments}, [], 9)


def deep() -> Launch:
    """Three dimensions with one program per half slice, and a bias with stride 0."""
    half = 1 + np.arange(24)[:, None] // 12
    writer = np.broadcast_to(half, (4, 24, 40)) + 2 * np.arange(4)[:, None, None]
    arguments = [
        traffic("bias", torch.empty(1, 40).expand(24, 40), 96),
        traffic("y", torch.empty(4, 24, 40), 0, writer),
        traffic("tall", torch.empty(3, 200, 40), 1),
    ]
    return Launch("_deep", __file__, 70, (1, 2, 4), {t.name: t for t in arguments}, [], 9)


@cache
def large() -> Launch:
    """3000 x 5000 in tiles of 64 x 64 with one unwritten element; tiles of 14 x 14 that no cell divides."""
    writer = tiles((3000, 5000), (64, 64))
    writer[1234, 4321] = 0
    arguments = [
        traffic("x", torch.empty(3000, 5000), 3),
        traffic("y", torch.empty(3000, 5000), 0, writer),
        traffic("seams", torch.empty(600, 1000), 0, tiles((600, 1000), (14, 14))),
    ]
    return Launch("_large", __file__, 80, (79, 47, 1), {t.name: t for t in arguments}, [], 9)


def hostile() -> Launch:
    finding = Finding(OUT_OF_BOUNDS, HOSTILE, HOSTILE, HOSTILE, 3, None, (9,), 1, HOSTILE)
    touched = traffic(HOSTILE, torch.empty(4, 4), 1, 1)
    return Launch(HOSTILE, HOSTILE, 1, (1, 1, 1), {"a": touched}, [finding], 1, {HOSTILE: HOSTILE})


LAUNCHES = {"blur": blur, "flat": flat, "deep": deep, "large": large, "hostile": hostile}
SUMMARY = ["Five launches.", f"One of them is {HOSTILE}."]

# Colours as numbers: of the middle of every cell, and all that a key of the legend shows.
SCRIPT = """
const [section, name, kind, key] = arguments;
const cards = [...document.querySelectorAll(`#launch-${section} article`)];
const card = cards.find((one) => one.querySelector("h3").textContent === name);
const figure = card.querySelector(`figure.${kind}`);
const canvas = figure.querySelector(key ? `[data-key="${key}"]` : ".picture canvas");
const spec = JSON.parse(card.querySelector(".maps").dataset.spec);
const { width, height } = canvas;
const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
if (key) return [...new Set(pixels)];
const [sx, sy] = [width / spec.columns, height / spec.rows];
const at = (row, column) => pixels[Math.floor((row + 0.5) * sy) * width + Math.floor((column + 0.5) * sx)];
return Array.from({ length: spec.rows }, (_, r) => Array.from({ length: spec.columns }, (_, c) => at(r, c)));
"""


class Page:
    """The page of all launches above, in a browser."""

    def __init__(self, driver: WebDriver, url: str) -> None:
        self.driver, self.url = driver, url
        self.seen: tuple[int, str] | None = None  # current width and scheme

    def open(self, width: int = 1280, scheme: str = "light") -> None:
        self.seen = width, scheme
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get_log("browser")  # discards messages of other tests
        self.driver.get(self.url)
        self.driver.execute_async_script("shown.then(arguments[0])")

    def map(self, launch: str, name: str, kind: str) -> np.ndarray:
        return np.array(self.driver.execute_script(SCRIPT, self._number(launch), name, kind))

    def legend(self, launch: str, name: str, kind: str, key: str) -> set[int]:
        return set(self.driver.execute_script(SCRIPT, self._number(launch), name, kind, key))

    def card(self, launch: str, name: str) -> WebElement:
        cards = self.driver.find_elements("css selector", f"#launch-{self._number(launch)} article")
        return next(card for card in cards if card.find_element("css selector", "h3").text == name)

    def readout(self, launch: str, name: str) -> str:
        return self.card(launch, name).find_element("css selector", "output").text

    def point(self, launch: str, name: str, kind: str, row: int, column: int, *, click: bool = False) -> str:
        """Return the read-out of a cell."""
        from selenium.webdriver import ActionChains

        canvas = self.card(launch, name).find_element("css selector", f".{kind} .picture canvas")
        self.driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", canvas)
        rows, columns = self.map(launch, name, kind).shape
        width, height = canvas.size["width"], canvas.size["height"]
        across = int((column + 0.5) * width / columns) - width // 2
        down = int((row + 0.5) * height / rows) - height // 2
        mouse = ActionChains(self.driver, duration=0).move_to_element_with_offset(canvas, across, down)
        (mouse.click() if click else mouse).perform()
        return self.readout(launch, name)

    def _number(self, launch: str) -> int:
        return 1 + list(LAUNCHES).index(launch)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("audit")
    page = folder / "page.html"
    page.write_text(render(f"Audit {HOSTILE}", [make() for make in LAUNCHES.values()], SUMMARY), encoding="utf-8")
    with chromium(folder / "profile") as session:
        yield Page(session, page.as_uri())


@pytest.fixture
def page(browser: Page) -> Page:
    """Return the page in the light scheme at laptop width; it is not reloaded for each test."""
    if browser.seen != (1280, "light"):
        browser.open()
    return browser


def test_the_page_loads_no_resources_and_logs_no_errors(browser):
    browser.open()
    log = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
    requests = [event["params"] for event in log if event["method"] == "Network.requestWillBeSent"]
    urls = {
        request["request"]["url"]
        for request in requests
        if not request["documentURL"].startswith(("chrome:", "chrome-untrusted:"))
    }
    assert {url for url in urls if not url.startswith("data:")} == {browser.url}
    assert browser.driver.get_log("browser") == []


def test_summary_and_findings_are_shown(page):
    text = page.driver.find_element("css selector", "body").text
    for expected in (*SUMMARY, "2 findings", "grid 4 × 3 × 1", "12 programs", "BLOCK_M=32", f"{__file__}:40"):
        assert expected in text
    finding = page.driver.find_element("css selector", "#launch-1 .findings")
    assert finding.is_displayed()
    assert "nobody wrote y[56, 64], a result (256 lanes)" in finding.text
    assert f"{__file__}:{FAULT}" in finding.text
    assert "def tiles(" in finding.text, "the source line"
    assert finding.find_element("css selector", "b").value_of_css_property("color") == "rgba(179, 38, 30, 1)"
    assert "Not touched: weight" in text


def test_a_card_shows_the_numbers_of_its_tensor(page):
    card = page.card("blur", "x")
    assert "96 × 128 · float32 · strides (128, 1)" in card.text
    numbers = dict(zip(*(texts(card, tag) for tag in ("dt", "dd")), strict=True))
    assert numbers == {
        "Loaded": "53.6 KB",
        "Stored": "0 B",
        "Atomic": "0 B",
        "Reads per element": "1.09\nof those read",
        "Distinct read": "49.2 KB",
        "Distinct written": "0 B",
        "Masked lanes": "3.2%\nof 13,848",
        "Sector bytes": "53.6 KB\n1.00 × 53.6 KB used",
    }
    assert "Not written" in card.text
    assert "Not read" in page.card("blur", "y").text


def texts(element, tag: str) -> list[str]:
    return [found.text for found in element.find_elements("css selector", tag)]


def test_reads_have_the_colours_of_the_legend(page):
    reads = blur().arguments["x"].reads
    colours = page.map("blur", "x", "read")
    assert set(np.unique(reads)) == {1, 2, 4}, "tiles, halos and corners"
    for count in (1, 2, 4):
        assert set(colours[reads == count].tolist()) == page.legend("blur", "x", "read", f"reads-{count}")
    assert len(set(colours.flat)) == 3


def test_tiles_differ_and_the_gap_is_hatched(page):
    writer = blur().arguments["y"].writer
    colours = page.map("blur", "y", "written")
    never = page.legend("blur", "y", "written", "never")
    assert len(never) == 2, "ground and lines"
    assert set(colours[writer == 0].tolist()) <= never
    assert not never & set(colours[writer > 0].tolist())
    for program in range(1, 13):
        assert len(set(colours[writer == program].tolist())) == 1
    assert_neighbours_differ(colours, writer)
    assert "never written: 256 of 12,288" in page.card("blur", "y").text


def assert_neighbours_differ(colours: np.ndarray, writer: np.ndarray) -> None:
    for here, there in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1]), (np.s_[1:, 1:], np.s_[:-1, :-1])):
        seam = (writer[here] != writer[there]) & (writer[here] > 0) & (writer[there] > 0)
        assert np.all((colours[here] != colours[there])[seam])


def test_one_dimension_is_wrapped(page):
    colours = page.map("flat", "y", "written")
    assert colours.shape == (16, 64)
    assert np.all(colours.ravel()[1000:] == 0), "nothing is drawn where there are no elements"
    assert len(set(colours.ravel()[:1000].tolist())) == 8
    assert "1,000 elements in rows of 64" in page.card("flat", "y").text
    assert page.point("flat", "y", "written", 2, 5) == "y[133] · written by program (1, 0, 0)"
    assert page.point("flat", "scale", "read", 0, 0) == "scale · read 8 times"
    assert page.map("flat", "long", "read").shape == (196, 256)
    assert "100,000 elements in rows of 512; each cell is 2 elements" in page.card("flat", "long").text
    assert page.point("flat", "long", "read", 39, 16) == "long[20000:20002] · read 3 times"


def test_leading_dimensions_are_flattened_and_stride_0_is_noted(page):
    colours = page.map("deep", "y", "written")
    assert colours.shape == (96, 40)
    assert_neighbours_differ(colours, deep().arguments["y"].writer.reshape(96, 40))
    assert "40 across, 4 × 24 down" in page.card("deep", "y").text
    assert page.point("deep", "y", "written", 24 * 2 + 13, 7) == "y[2, 13, 7] · written by program (0, 1, 2)"
    assert page.point("deep", "tall", "read", 49, 3) == "tall[0, 196:200, 3] · read once"
    assert page.map("deep", "bias", "read").shape == (24, 40)
    assert "a dimension with stride 0 repeats the same memory" in page.card("deep", "bias").text


def test_a_large_tensor_is_reduced_and_loses_no_gap(page):
    assert "each cell is 32 × 32 elements" in page.card("large", "y").text
    colours = page.map("large", "y", "written")
    assert colours.shape == (94, 157)
    never = page.legend("large", "y", "written", "never")
    row, column = 1234 // 32, 4321 // 32
    assert colours[row, column] in never
    writer = large().arguments["y"].writer[::32, ::32].copy()
    inside = np.hypot(*(np.indices(colours.shape) - np.array([row, column])[:, None, None])) < 5  # circled in red
    writer[inside] = 0
    assert not never & set(colours[~inside].tolist())
    assert_neighbours_differ(colours, writer)
    expected = "y[1216:1248, 4320:4352] · written by program (67, 19, 0), but 1 of 1,024 never"
    assert page.point("large", "y", "written", row, column) == expected
    page.card("large", "x").click()
    page.card("large", "y").find_element("css selector", "button").click()
    assert page.readout("large", "y") == expected
    corner = "y[2976:3000, 4992:5000] · written by program (78, 46, 0)"
    assert page.point("large", "y", "written", 93, 156) == corner
    (several,) = page.legend("large", "seams", "written", "several")
    seams = page.map("large", "seams", "written")
    assert seams[3, 0] == several != seams[2, 0]
    expected = "seams[12:16, 0:4] · written by several programs, (0, 0, 0) to (72, 0, 0)"
    assert page.point("large", "seams", "written", 3, 0) == expected


def test_pointer_and_keys_move_the_read_out(page):
    from selenium.webdriver import ActionChains, Keys

    assert page.point("blur", "x", "read", 31, 31) == "x[31, 31] · read 4 times"
    assert page.point("blur", "y", "written", 60, 70) == "y[60, 70] · never written"
    assert page.point("blur", "y", "written", 40, 70, click=True) == "y[40, 70] · written by program (2, 1, 0)"
    ActionChains(page.driver, duration=0).send_keys(Keys.ARROW_DOWN, Keys.END).perform()
    assert page.readout("blur", "y") == "y[41, 127] · written by program (3, 1, 0)"
    both = page.point("hostile", HOSTILE, "read", 1, 2)
    assert both == f"{HOSTILE}[1, 2] · read once · written by program (0, 0, 0)"
    cursors = page.card("hostile", HOSTILE).find_elements("css selector", ".cursor")
    assert [cursor.is_displayed() for cursor in cursors] == [True, True], "in both maps"


def test_maps_are_reached_by_the_tab_key(browser):
    from selenium.webdriver import ActionChains, Keys

    browser.open()
    browser.driver.execute_script(
        "document.querySelector('#launch-1').tabIndex = -1; document.querySelector('#launch-1').focus()"
    )
    ActionChains(browser.driver, duration=0).send_keys(Keys.TAB, Keys.ARROW_RIGHT).perform()
    assert browser.readout("blur", "x") == "x[0, 1] · read once"
    label = browser.driver.switch_to.active_element.get_attribute("aria-label")
    assert label == "Reads of each element of x; arrow keys move the read-out"


def test_names_are_escaped(page):
    assert page.driver.title == f"Audit {HOSTILE}"
    assert page.driver.find_element("css selector", "h1").text == f"Audit {HOSTILE}"
    assert page.driver.find_element("css selector", "#launch-5 h2").text == HOSTILE
    assert len(page.driver.find_elements("css selector", "script")) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_horizontal_scrolling_on_a_phone(browser, scheme):
    browser.open(390, scheme)
    assert browser.driver.get_log("browser") == []
    assert browser.driver.execute_script("return document.documentElement.scrollWidth") == 390
    wide = (
        "return [...document.querySelectorAll('article, canvas')].filter((e) => e.getBoundingClientRect().right > 390)"
    )
    assert browser.driver.execute_script(wide) == []
    writer = blur().arguments["y"].writer
    colours = browser.map("blur", "y", "written")
    assert set(colours[writer == 0].tolist()) <= browser.legend("blur", "y", "written", "never")


def test_maps_follow_the_colour_scheme(page):
    light = page.map("blur", "x", "read"), page.legend("blur", "y", "written", "never")
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.seen = None
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert not light[1] & page.legend("blur", "y", "written", "never")
    assert np.all(light[0] != page.map("blur", "x", "read"))
    (once,) = page.legend("blur", "x", "read", "reads-1")
    assert page.map("blur", "x", "read")[0, 0] == once


def test_findings_without_a_launch_are_at_the_top_and_none_is_repeated():
    launch = blur()
    loose = Finding(NEVER_WRITTEN, "_blur", "z", "", 0, None, (0,), 1, "z stayed empty")
    page = render("t", [launch], [], [*launch.findings, loose])
    assert page.count("z stayed empty") == page.count("nobody wrote y[56, 64]") == 1
    assert page.index("z stayed empty") < page.index("<section")
    assert "2 findings" in page


def test_an_empty_tensor_and_a_fully_masked_one():
    arguments = [
        traffic("empty", torch.empty(5, 0), masked=8),
        traffic("spared", torch.empty(3), masked=8),
        traffic("idle", torch.empty(3)),
    ]
    page = render("t", [Launch("k", "f.py", 1, (1, 1, 1), {t.name: t for t in arguments}, [], 1)], [])
    assert page.count("100.0%") == 2
    assert "Not touched: <code>idle</code>" in page
    assert "No findings" in page

"""A person submits a kernel in a browser, watches it being judged and reads the board."""

import threading

import pytest

from arena.arenas import BOARD, judged, result, running
from browser import chromium

TRITON = """import torch, triton
import triton.language as tl


@triton.jit
def _softmax(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    offs = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + tl.program_id(0) * N + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + tl.program_id(0) * N + offs, e / tl.sum(e, 0), mask=offs < N)


def softmax(x):
    y = torch.empty_like(x)
    _softmax[(x.shape[0],)](x, y, x.shape[1], BLOCK_N=triton.next_power_of_2(x.shape[1]))
    return y
"""
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}


def is_wider_than_the_window(session):
    return session.execute_script("return document.documentElement.scrollWidth > window.innerWidth")


def errors(session):
    return [line["message"] for line in session.get_log("browser") if line["level"] == "SEVERE"]


@pytest.mark.slow
def test_a_person_submits_watches_and_reads_the_board(tmp_path):
    selenium = pytest.importorskip("selenium.webdriver.support.ui")
    with running(tmp_path / "data") as (address, arena), chromium(tmp_path / "profile") as session:
        stale = pytest.importorskip("selenium.common").StaleElementReferenceException  # the page loads itself again
        wait = selenium.WebDriverWait(session, 60, ignored_exceptions=[stale])
        find = lambda css: session.find_element("css selector", css)
        judged(arena, "x = 1", 40.0, name="first.py")
        session.get(address)
        find("a[href='/problems/softmax']").click()
        find("input[name=name]").send_keys("rows.py")
        session.execute_script("arguments[0].value = arguments[1]", find("textarea[name=code]"), TRITON)
        find("form.submit button").click()
        wait.until(lambda _: session.current_url.endswith("/submissions/2"))
        assert find(".states .now").text.startswith("queued")

        account = arena.guard.account("", "")
        job = arena.lease(account, "worker", None)
        wait.until(lambda _: find(".states .now").text == "checking")  # without a reload
        arena.report(account, job["job"], job["lease"], "timing")
        wait.until(lambda _: find(".states .now").text == "timing")
        arena.finish(account, job["job"], job["lease"], result(20.0))
        wait.until(lambda _: find(".states .now").text == "ranked")
        wait.until(lambda _: "Isolation: seccomp." in find("main").text)
        assert "def softmax" in find("main").text

        session.get(f"{address}/problems/softmax/boards/{BOARD}")
        rows = session.find_elements("css selector", ".entries tbody tr")
        assert [row.text.split()[:2] for row in rows] == [["1", "local"], ["2", "local"]]
        assert len(session.find_elements("css selector", ".best .point")) == 2
        for width, height in WIDTHS.values():
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            session.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)  # a window is never so narrow
            for page in ("", "/problems/softmax", f"/problems/softmax/boards/{BOARD}", "/submissions/2", "/archive"):
                session.get(f"{address}{page}")
                assert session.execute_script("return window.innerWidth") == width, page
                assert not is_wider_than_the_window(session), (width, page)
        assert errors(session) == []
        assert threading.active_count() < 50

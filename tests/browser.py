"""A headless Chromium for tests of pages; without one, the tests are skipped."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[WebDriver]:
    """Start a headless browser with its own profile, no background requests, and all logs."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for switch in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
        *("disable-component-update", "disable-sync", f"user-data-dir={profile}"),
    ):
        options.add_argument(f"--{switch}")
    session = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield session
    finally:
        session.quit()

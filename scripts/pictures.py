"""Take the screenshots in docs/pictures: pages of `tilewright audit` and `tilewright report`, in Chromium.

python scripts/pictures.py [audit | site]     only those; all without an argument
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "pictures"
AUDITED = {  # arguments of `tilewright audit`, and a selector of the page
    "tiles": (["linear", "--case", "M=256,N=192,K=96,relu=True"], ".tensors > :last-child"),
    "halos": (["examples/windows.py", "--input", "96x176"], ".tensors"),
    "gaps": (["examples/unwritten.py", "--input", "150x200"], ".tensors"),
}
SITE = {  # page, colour scheme, width and height
    "index": ("index", "light", 1280, 1000),
    "softmax": ("softmax", "light", 1280, 1300),
    "softmax-dark": ("softmax", "dark", 1280, 1300),
    "softmax-phone": ("softmax", "light", 390, 1500),
    "roofline": ("roofline", "light", 1280, 980),
}
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


def audit(browser: webdriver.Chrome, folder: Path) -> None:
    size = {"width": 1300, "height": 2600, "deviceScaleFactor": 1.5, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for name, (words, part) in AUDITED.items():
        page = folder / f"{name}.html"
        subprocess.run([sys.executable, "-m", "tilewright", "audit", *words, "--html", page], cwd=ROOT, check=False)
        browser.get(page.as_uri())
        browser.find_element(By.CSS_SELECTOR, part).screenshot(str(OUT / f"audit-{name}.png"))


def site(browser: webdriver.Chrome, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "tilewright", "report", "--out", folder], cwd=ROOT, check=True)
    for name, (page, scheme, width, height) in SITE.items():
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get((folder / f"{page}.html").as_uri())
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        browser.save_screenshot(str(OUT / f"site-{name}.png"))


def main() -> None:
    wanted = {"audit": audit, "site": site}
    if any(name not in wanted for name in sys.argv[1:]):
        sys.exit(__doc__)
    options = webdriver.ChromeOptions()
    for flag in (*QUIET, "--hide-scrollbars"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with tempfile.TemporaryDirectory() as folder, webdriver.Chrome(options, service) as browser:
        for name in sys.argv[1:] or wanted:
            wanted[name](browser, Path(folder))


if __name__ == "__main__":
    main()

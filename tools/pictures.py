"""The pictures of docs/audit.md: pages of `tilewright audit`, photographed in Chromium.

python tools/pictures.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By

ROOT = Path(__file__).parent.parent
PICTURES = {  # what to audit, and which part of the page
    "tiles": (["linear", "--case", "M=256,N=192,K=96,relu=True"], ".tensors > :last-child"),
    "halos": (["examples/windows.py", "--input", "96x176"], ".tensors"),
    "gaps": (["examples/unwritten.py", "--input", "150x200"], ".tensors"),
}
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


def main() -> None:
    options = webdriver.ChromeOptions()
    for flag in (*QUIET, "--force-device-scale-factor=1.5", "--window-size=1300,2600"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with tempfile.TemporaryDirectory() as folder, webdriver.Chrome(options, service) as browser:
        for name, (words, part) in PICTURES.items():
            page = Path(folder) / f"{name}.html"
            subprocess.run([sys.executable, "-m", "tilewright", "audit", *words, "--html", page], cwd=ROOT, check=False)
            browser.get(page.as_uri())
            shown = browser.find_element(By.CSS_SELECTOR, part)
            shown.screenshot(str(ROOT / "docs" / "pictures" / f"audit-{name}.png"))


if __name__ == "__main__":
    main()

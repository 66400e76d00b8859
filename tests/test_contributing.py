"""The example of CONTRIBUTING.md, followed to the letter in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_example_passes_its_tests_and_check(tmp_path):
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    files = re.findall(r"`((?:src|tests)/\S+\.py)`:\n\n```python\n(.*?)```", page, re.DOTALL)
    assert [Path(name).name for name, _ in files] == ["softsign.py", "test_softsign.py"]
    for name, code in files:
        (tmp_path / name).write_text(code)

    def run(*command: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": "src"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run("ruff", "check", *(name for name, _ in files))
    run("pytest", "tests/ops/test_softsign.py")
    run("tilewright", "check", "softsign", "--kernel", "eager", "--kernel", "triton")

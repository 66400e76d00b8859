"""The steps of docs/your-own-operation.md, followed literally."""

import re
import shlex

import pytest

from cli.command import run as tilewright
from test_contributing import ROOT, STEP, apply

PAGE = (ROOT / "docs" / "your-own-operation.md").read_text()
CODES = {"wrong": 1, "defines no": 2}  # what a page shows decides the exit code
pytestmark = pytest.mark.slow


def run(block: str, folder) -> None:
    """Run the commands of a block; a line that ends with "…" stands for a line that begins so."""
    commands, shown = [], []
    for line in block.splitlines():
        (commands if line.startswith("$ ") else shown).append(line)
    for command in commands:
        _, *args = shlex.split(command.removeprefix("$ "))
        done = tilewright(*args, cwd=folder, TILEWRIGHT_CACHE=str(folder / "cache"))
        expected = next((code for words, code in CODES.items() if any(words in line for line in shown)), None)
        printed = done.stdout + done.stderr
        if "explain" in command or "inspect" in command:  # they exit with 1 if a point can be improved
            assert done.returncode in (0, 1), printed
        else:
            assert done.returncode == (expected or 0), printed
    for line in shown:
        got = [one.rstrip() for one in printed.splitlines()]
        found = any(one.startswith(line[:-1]) for one in got) if line.endswith("…") else line in got
        assert found, f"the page shows a line that the command does not print: {line}\n{printed}"


def test_the_page_is_followed(tmp_path):
    file = None
    for step in STEP.finditer(PAGE):
        if step["file"]:
            file = tmp_path / step["file"]
        elif step["language"] == "console":
            run(step["code"], tmp_path)
        elif step["language"] == "diff":
            apply(step["code"], file)
        else:
            file.write_text(step["code"])
    assert re.search(r"^def cost", file.read_text(), re.MULTILINE), "the last step was not reached"

"""The steps of CONTRIBUTING.md, followed literally in a copy of the package."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
STEP = re.compile(
    r"^`(?P<file>\S+\.py)`:$|^```(?P<language>python|diff|console)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
FASTSOFTMAX = "def row_softmax(x):\n    return x.softmax(-1)\n"  # stands for the package that the peer needs
pytestmark = pytest.mark.verify


def section(title: str) -> str:
    """Return the text of a section without its subsections."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"CONTRIBUTING.md has no section '{title}'"
    return found[1]


@pytest.fixture
def copy(tmp_path):
    for folder in ("src", "tests", "scripts", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)  # with __pycache__, so that commands start quickly
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "fastsoftmax.py").write_text(FASTSOFTMAX)
    return tmp_path


def run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    if words[0] == "python":
        words = [sys.executable, *words[1:]]
    elif words[0] in ("ruff", "pytest", "tilewright"):
        words = [sys.executable, "-m", *words]
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"src{os.pathsep}site-packages", "TILEWRIGHT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
    return done.stdout


def apply(diff: str, path: Path) -> None:
    """Replace the unchanged and removed lines of a diff, which must occur once, by the unchanged and added ones."""
    lines = diff.splitlines(keepends=True)
    before, after = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} does not contain once:\n{before}"
    path.write_text(text.replace(before, after))


def follow(title: str, folder: Path) -> dict[str, str]:
    """Write the files, apply the diffs and run the commands of a section; return the output of each command."""
    file, outputs = None, {}
    for step in STEP.finditer(section(title)):
        if step["file"]:
            file = folder / step["file"]
        elif step["language"] == "console":
            for command in re.findall(r"^\$ (.*)$", step["code"], re.MULTILINE):
                outputs[command] = run(command, folder)
        else:
            assert file is not None, "a block of code follows the name of its file"
            if step["language"] == "diff":
                apply(step["code"], file)
            else:
                assert not file.exists(), f"{file.name} is there already"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(step["code"])
    return outputs


def output_of(outputs: dict[str, str], beginning: str) -> str:
    (found,) = [output for command, output in outputs.items() if command.startswith(beginning)]
    return found


def test_add_an_operation(copy):
    outputs = follow("Add an operation", copy)
    assert "2 passed" in output_of(outputs, "pytest")
    assert "right" in output_of(outputs, "tilewright check")
    assert "softsign" in run("tilewright ops", copy)


def test_add_a_row_wise_operation_with_configurations(copy):
    outputs = follow("Add a row-wise operation with configurations", copy)
    assert " passed" in output_of(outputs, "pytest")
    assert "mi300x" in output_of(outputs, "tilewright inspect")
    assert "tilewright.normalize(" in (copy / "docs" / "api.md").read_text()
    assert "normalize" in (copy / "src" / "tilewright" / "__init__.pyi").read_text()


def test_add_a_family(copy):
    assert "right" in output_of(follow("Add a family", copy), "tilewright check")


CHECK_PEER = """
from tilewright import registry, testing
peer = registry.peers(registry.load("softmax"))["fastsoftmax"]
print(peer.fn.__module__, testing.check(peer.fn, "softmax", depth="quick").verdict)
"""


def test_add_a_peer(copy):
    follow("Add a peer", copy)
    assert run(shlex.join(["python", "-c", CHECK_PEER]), copy) == "tilewright.peers.fastsoftmax right\n"


def test_add_a_tool(copy):
    outputs = follow("Add a tool", copy)
    assert "M=65536,N=256 bfloat16" in output_of(outputs, "tilewright footprint")
    assert "footprint" in run("tilewright --help", copy)


def test_add_a_gpu(copy):
    outputs = follow("Add a GPU", copy)
    assert "RTX A6000" in output_of(outputs, "tilewright gpu")
    assert "rtx-a6000" in output_of(outputs, "tilewright floor")

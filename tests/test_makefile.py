"""The options with which the Makefile runs the tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"
DYING = """
import os, signal, pytest

@pytest.mark.parametrize("n", range(9))
def test_passes(n):
    assert n < 9

@pytest.mark.xdist_group("group")
@pytest.mark.parametrize("n", range(5))
def test_dies(n):
    if n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_dying_worker_fails_the_run(tmp_path):
    """By default, pytest-xdist waits forever for the other tests of the group."""
    (tmp_path / "test_dying.py").write_text(DYING)
    (options,) = re.findall(r"^PARALLEL := (.*)$", MAKEFILE.read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "pytest", *options.replace("$(WORKERS)", "2").split(), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stdout
    assert "crashed while running 'test_dying.py::test_dies[3]" in done.stdout, done.stdout


def test_help_names_every_target():
    text = MAKEFILE.read_text()
    (targets,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    explained = set(re.findall(r'@echo "make ([\w-]+) ', text))
    assert set(targets.split()) - {"help", "lint", "types", "tests"} == explained

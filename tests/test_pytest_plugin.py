"""The `interpreted` fixture in another project."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import torch
from kernels import copy, copy_too_much

def test_right(interpreted):
    x = torch.randn(100)
    assert torch.equal(copy(x), x)
    assert interpreted.launches[0].arguments["x_ptr"].reads_per_element == 1

def test_wrong(interpreted):
    copy_too_much(torch.randn(100))
"""


def test_the_fixture_runs_launches_and_fails_on_faults(tmp_path):
    (tmp_path / "kernels.py").write_text((Path(__file__).parent / "interpreter" / "kernels.py").read_text())
    (tmp_path / "test_theirs.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tilewright.pytest_plugin", str(tmp_path)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "out of bounds in _copy_too_much" in done.stdout

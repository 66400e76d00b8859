"""scripts/outside.py: other projects' kernels in the interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tilewright.errors import KernelAborted, KernelFault

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import outside

        yield outside
    finally:
        sys.path.remove(str(SCRIPTS))


def raising(error):
    def run():
        raise error

    return run


@pytest.mark.slow
def test_outcomes_and_table(script, capsys):
    from outside_suites.cases import Mismatch

    cases = [
        script.Case("one", "passes", lambda: None),
        script.Case("one", "differs", raising(Mismatch("output 0 differs"))),
        script.Case("one", "faults", raising(KernelFault(["f.py:3: out of bounds in _copy"]))),
        script.Case("one", "unsupported", raising(KernelAborted("f.py:1: _f uses inline assembly", "unsupported"))),
        script.Case("two", "fails", raising(KeyError("x"))),
        script.Case("two", "dies", lambda: os._exit(3)),
        script.Case(
            "two", "several", lambda: [script.Outcome("two", "a", "right"), script.Outcome("two", "b", "wrong")]
        ),
        script.Case("two", "hangs", lambda: time.sleep(60)),
    ]
    outcomes = script.run_all(cases, jobs=2, limit=3)
    found = {outcome.name: outcome.outcome for outcome in outcomes}
    assert found == {
        "passes": "right", "differs": "wrong", "faults": "wrong", "unsupported": "refused",
        "fails": "error", "dies": "error", "a": "right", "b": "wrong", "hangs": "error",
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert "one: differs: wrong: output 0 differs" in printed
    assert "two: dies: error: the process ended with exit code 3" in printed
    assert "two: hangs: error: longer than 3 s" in printed
    _, one, two = script.table(outcomes)
    assert one.split()[:-1] == ["one", "4", "1", "2", "1", "0"]
    assert two.split()[:-1] == ["two", "5", "1", "1", "0", "3"]


def test_a_wrong_result_is_found(script):
    from outside_suites.cases import Mismatch, assert_close

    x = torch.ones(8)
    assert_close("x", x * (1 + 1e-7), x, 1e-6)
    for wrong in (x * 1.01, x * float("nan"), x[:4], None):
        with pytest.raises(Mismatch, match="x "):
            assert_close("x", wrong, x, 1e-6)


def run(*options):
    command = [sys.executable, str(SCRIPTS / "outside.py"), "--json", "--jobs", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_missing_checkouts_are_named_with_how_to_get_them(tmp_path):
    done = run(*(f"--suite={name}" for name in ("tutorials", "language", "gluon", "puzzles")), f"--triton={tmp_path}")
    assert done.returncode == 0, done.stderr
    missing = json.loads(done.stdout)["missing"]
    assert len(missing) == 4
    assert all("git clone" in line and "PATH" in line for line in missing)


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "package"), [("liger", "liger_kernel"), ("fla", "fla")])
def test_a_sample_is_right(suite, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = run("--suite", suite, "--sample")
    report = json.loads(done.stdout)
    assert not [case for case in report["cases"] if case["outcome"] != "right"]
    assert len(report["cases"]) >= 3
    assert done.returncode == 0

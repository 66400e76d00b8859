"""Judging: a trick is refused with its reason, a right kernel is timed beside the leader."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.arena import judge as module
from tilewright.arena import problems
from tilewright.arena.judge import Judge, measured
from tilewright.errors import BadProblem, GPUUnusable, TilewrightError

SUBMISSIONS = Path(__file__).parent.parent / "submissions" / "adversarial"
SAMPLE = ("silent_fallback", "patched_clock", "noise")  # scripts/arena_tricks.py submits them all
WRITES_EVERYWHERE = """
import contextlib, os, sys
from tilewright.arena.analysis import _keep_only

_keep_only(int(sys.argv[1]))
for number in range(256):
    with contextlib.suppress(OSError):
        os.write(number, b"x")
"""
RIGHT = "import torch\n\n\ndef softmax(x):\n    return torch.softmax(x, -1)\n"


@pytest.fixture(scope="module")
def problem():
    return problems.describe("softmax", boards=["h200 predicted"], cases=["M=8,N=64"])


def test_a_process_of_an_analysis_cannot_answer_for_the_next_one():
    answers, result = os.pipe(), os.pipe()
    command = [sys.executable, "-c", WRITES_EVERYWHERE, str(result[1])]
    subprocess.run(command, pass_fds=[answers[1], result[1]], check=True)
    for pipe in (answers, result):
        os.close(pipe[1])
    assert (os.read(answers[0], 9), os.read(result[0], 9)) == (b"", b"x")
    for pipe in (answers, result):
        os.close(pipe[0])


def test_results_have_no_infinite_numbers_and_no_folders_of_this_machine(tmp_path):
    found = module._as_reported({"cases": [{"max_error": float("inf"), "budget": 1e-6}], "pair": (float("nan"), True)})
    assert found == {"cases": [{"max_error": None, "budget": 1e-6}], "pair": [None, True]}
    reason = f"at {tmp_path}/{module.SCRATCH}x1y2/submission/submission_5.py:3"
    assert module._as_reported([reason]) == ["at submission_5.py:3"]


def test_a_file_that_does_not_parse_is_named_as_submitted(problem):
    job = {"board": "h200 predicted", "problem": problem, "submission": {"id": 7, "code": "def softmax(x:\n"}}
    reason = Judge("cpu")(job, lambda state: None)["reason"]
    assert reason.startswith("submission_7.py, line 1: syntax error")
    assert reason.endswith("fix the file and submit it again")


def test_a_problem_that_fails_is_no_fault_of_the_submission(problem, monkeypatch):
    job = {"board": "h200 predicted", "problem": problem, "submission": {"id": 1, "code": RIGHT}}

    def check(*_):
        raise BadProblem("/tmp/softmax", "its reference fails")

    monkeypatch.setattr(Judge, "_check", check)
    assert Judge("cpu")(job, print)["reason"] == "the problem cannot be judged: its reference fails"
    lost = job | {"problem": problem | {"files": {"entry": "no_such_operation"}}}
    with pytest.raises(TilewrightError):  # which gives the job back: another worker may have what this one lacks
        Judge("cpu")(lost, print)


def test_a_gpu_that_fails_is_no_fault_of_the_submission(problem, monkeypatch):
    job = {"board": "h200 predicted", "problem": problem, "submission": {"id": 1, "code": RIGHT}}

    def check(*_):
        raise GPUUnusable("eager", "an illegal memory access was encountered")

    monkeypatch.setattr(Judge, "_check", check)
    with pytest.raises(GPUUnusable):
        Judge("cpu")(job, print)
    assert module._is_of_machine(GPUUnusable("eager", "lost"))
    assert not module._is_of_machine(RuntimeError("a fault of the judge"))


def test_a_submission_that_linux_killed_is_given_back(problem):
    code = f"import os\n\nos.kill(os.getpid(), 9)\n{RIGHT}"
    job = {"board": "h200 predicted", "problem": problem, "submission": {"id": 1, "code": code}}
    with pytest.raises(module.Killed, match="killed by SIGKILL; this machine may lack memory"):
        Judge("cpu", depth="quick")(job, lambda state: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_trick_never_reaches_a_board(problem, name):
    submission = {"id": 1, "code": (SUBMISSIONS / f"{name}.py").read_text()}
    states = []
    job = {"board": "h200 predicted", "problem": problem, "submission": submission}
    found = Judge("cpu", depth="quick")(job, states.append)
    assert not found["ranked"]
    assert found["reason"]
    assert states == ["checking"], "it is not timed"


@pytest.mark.slow
def test_a_submission_is_timed_beside_the_leader(problem, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLES", 5)
    files = [tmp_path / name / f"{name}.py" for name in ("submission", "leader")]
    for file in files:
        file.parent.mkdir()
        file.write_text(RIGHT)
    with problems.loaded(problem) as found:
        timing = measured(found, *files, "cpu")
    assert timing["against_leader"]["low"] <= timing["against_leader"]["ratio"] <= timing["against_leader"]["high"]
    assert timing["over_eager"] > 0
    assert timing["low"] <= timing["us"] <= timing["high"]
    files[1].write_text(RIGHT.replace("(x, -1)", "(x, 0)"))
    with problems.loaded(problem) as found:
        timing = measured(found, *files, "cpu")
    assert "against_leader" not in timing
    assert "the leader was not timed (M=8,N=64" in timing["note"]

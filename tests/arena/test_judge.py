"""Judging: a trick is refused with its reason, a right kernel is timed beside the leader."""

from pathlib import Path

import pytest

from tilewright.arena import judge as module
from tilewright.arena import problems
from tilewright.arena.judge import Judge, measured

SUBMISSIONS = Path(__file__).parent.parent / "submissions" / "adversarial"
SAMPLE = ("zeros", "silent_fallback", "patched_clock", "noise", "deletes_files")
RIGHT = "import torch\n\n\ndef softmax(x):\n    return torch.softmax(x, -1)\n"


@pytest.fixture(scope="module")
def problem():
    return problems.describe("softmax", boards=["h200 predicted"], cases=["M=8,N=64"])


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

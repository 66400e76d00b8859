"""Submitting to an arena: over MCP, and in the loop of `tilewright evolve`, with a server that a data folder gets."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from mcp import Client

from agents.test_evolve import PROBLEM as PROBLEM_TEXT
from agents.test_mcp import Session
from cli.command import run
from tilewright.agents.arbiter import ArenaArbiter, add_problem
from tilewright.agents.arenas import Arena, evidence
from tilewright.agents.pool import Pool
from tilewright.agents.server import build
from tilewright.arena.errors import ArenaNotReachable, ArenaRefused, UnknownBoard

BOARD = "h200 predicted"
PROBLEM = str(Path(__file__).parents[1] / "problems/kernelbench/level1_relu.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("arena")
    assert add_problem(path, "softmax", BOARD, ["M=4096,N=1024"]) == "softmax"
    assert add_problem(path, PROBLEM, BOARD, []) == "level1_relu"
    return path


@pytest.fixture(scope="module")
def session(folder):
    arena = Arena(str(folder), is_quick=True)
    server = build(Pool(1, 120), arena)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Client(server)) as client:
        yield Session(portal, client)


def test_a_problem_is_added_once(folder):
    assert add_problem(folder, "softmax", "a100-80gb predicted", []) == "softmax"
    assert add_problem(folder, "level1_relu", BOARD, []) == "level1_relu"


@pytest.mark.slow
def test_problems_of_the_arena_are_listed_and_read(session):
    assert session.result("list_problems")["arena"] == ["level1_relu", "softmax"]
    found = session.result("read_problem", problem="level1_relu")
    assert (found["kind"], found["entry_point"]) == ("kernelbench", "ModelNew")
    assert "get_init_inputs" in found["reference"]


@pytest.mark.slow
def test_a_submission_is_judged_with_progress_and_evidence(session, tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("def other(x): return x\n")
    answer, steps = session.call("submit", problem="softmax", file=str(path))
    found = answer.structured_content
    (result,) = found["results"]
    assert found["is_finished"]
    assert (result["board"], result["state"]) == (BOARD, "refused")
    assert "has no kernel for softmax" in result["reason"]
    assert steps[-1][2].startswith(f"{BOARD}: ")
    assert session.result("read_submission", submission=found["submission"]) == found
    later = session.result("submit", problem="softmax", code="def softmax(x): return x\n", wait=0)
    assert not later["is_finished"]
    assert f"submission {later['submission']}" in later["next"]


@pytest.mark.slow
def test_an_empty_board_and_our_kernels_in_the_archive(session):
    board = session.result("read_board", problem="softmax")
    assert (board["board"], board["entries"], board["total"]) == (BOARD, [], 0)
    kernels = session.result("search_archive", problem="softmax", technique="triton")["kernels"]
    assert {one["author"] for one in kernels} == {"tilewright"}
    assert any("@triton.jit" in one["code"] for one in kernels)
    assert all(len(one["code"]) < 21_000 for one in kernels)
    assert session.result("search_archive", problem="softmax", words="nosuchword")["kernels"] == []


@pytest.mark.slow
def test_errors_of_the_arena_say_what_to_fix(session):
    assert "no problem named 'sofmax'" in session.error("submit", problem="sofmax", code="x = 1")
    assert "exactly one of code or file" in session.error("submit", problem="softmax")
    assert "no file at" in session.error("submit", problem="softmax", file="none.py")
    assert "it is empty" in session.error("submit", problem="softmax", code=" ")
    assert "null byte" in session.error("submit", problem="softmax", code="x\0")
    assert "no submission 999" in session.error("read_submission", submission=999)
    assert "no board named 'b200'" in session.error("read_board", problem="softmax", board="b200")


@pytest.mark.slow
def test_a_folder_in_use_and_a_server_that_is_gone(session, folder):
    second = Arena(str(folder))
    with pytest.raises(ArenaRefused, match="another server uses"):
        second.problem_names()
    second.close()
    gone = Arena("http://127.0.0.1:9")
    with pytest.raises(ArenaNotReachable):
        gone.problem_names()
    gone.close()


def test_evidence_of_a_job():
    failed = {"case": "M=1,N=1", "dtype": "float32", "verdict": "wrong", "reason": "output[0] is 0"}
    right = failed | {"verdict": "right", "reason": ""}
    verdict = {"cases": [right, failed], "labels": ["forward only"]}
    assert evidence({"result": {"verdict": verdict}}) == [
        "M=1,N=1 float32: wrong, output[0] is 0",
        "label: forward only",
    ]
    case = {"case": "M=1,N=1", "dtype": "float32", "floor_us": 2.0, "bottleneck": "latency", "advice": ["fuse"]}
    timing = {"cases": [{"case": "M=1,N=1", "dtype": "float32", "us": 4.0}]}
    lines = evidence({"result": {"analysis": {"cases": [case]}, "timing": timing}})
    assert lines == ["M=1,N=1 float32: 4.00 us, floor 2.00 us, bottleneck latency", "  advice: fuse"]
    assert evidence({"result": None}) == []


JOB = {
    "board": BOARD,
    "state": "ranked",
    "reason": "",
    "result": {
        "verdict": {"verdict": "right"},
        "timing": {"us": 4.0, "share": 0.5, "over_eager": 2.0, "cases": []},
    },
}
KERNEL = {"name": "a.py", "author": "ada", "us": 4.0, "share": 0.5, "over_eager": 2.0, "code": "x = 1"}


class Recorded:
    """A client that answers with one judged submission."""

    def problem(self, name):
        return {"boards": [BOARD, "a100-80gb"], "cases": ["M=8,N=8"]}

    def submit(self, problem, code, name, derived_from):
        if len(code) > 100:
            raise ArenaRefused("it has too many bytes")
        return {"id": 7, "derived_from": derived_from}

    def states(self, number):
        return iter(())

    def submission(self, number):
        return {"id": number, "jobs": [JOB | {"board": "a100-80gb", "state": "refused"}, JOB]}

    def archive(self, problem):
        slower = KERNEL | {"us": 9.0, "board": BOARD}
        return [KERNEL | {"board": "h200", "share": 0.9}, slower, KERNEL | {"board": BOARD, "name": "b.py"}]


class RecordedArena:
    client = Recorded()


def test_the_arena_as_the_judge_of_evolve():
    arbiter = ArenaArbiter(RecordedArena(), "softmax", PROBLEM_TEXT, None)
    assert arbiter.problem.bench_cases == ["M=8,N=8"]
    verdict = arbiter.judge("x = 1", None)
    assert (verdict.is_right, verdict.is_ranked, verdict.submission) == (True, True, 7)
    assert (verdict.us, verdict.share, verdict.over_eager) == (4.0, 0.5, 2.0)
    assert arbiter.judge("x" * 200, None).reason == "it has too many bytes"
    first, second, third = arbiter.best(3)
    assert first.results == f"b.py by ada on {BOARD}: 4.00 us, 50% of the ceiling, 2.00 times the speed of eager"
    assert second.results.startswith(f"a.py by ada on {BOARD}: 9.00 us")
    assert third.results.startswith("a.py by ada on h200")
    with pytest.raises(UnknownBoard, match="no board named 'b200'"):
        ArenaArbiter(RecordedArena(), "softmax", PROBLEM_TEXT, "b200")


@pytest.mark.slow
@pytest.mark.verify
def test_evolve_judges_in_an_arena_of_its_own(tmp_path):
    script = tmp_path / "script"
    script.mkdir()
    (script / "answer-1").write_text("No kernel this time, only prose.")
    (script / "answer-2").write_text("Here it is:\n```python\ndef other(x): return x\n```\n")
    generator = shlex.join([sys.executable, str(Path(__file__).parent / "stand_in.py"), str(script)])
    options = ["--quick", "--json", "--out", "mine", "-c", "M=16384,N=8192"]
    done = run("evolve", "softmax", "--with", generator, *options, "--rounds", 2, cwd=tmp_path)
    assert done.returncode == 1
    assert "1  no kernel: its output holds no Python code" in done.stderr
    assert "2  refused: unusable: " in done.stderr
    report = json.loads(done.stdout)
    assert (report["attempts"], report["kernels"], report["right"], report["ranked"]) == (2, 1, 0, 0)
    assert report["fast"]["fast_0"] == 0.0
    prompt = (script / "prompt-2").read_text()
    assert "by tilewright on h200" in prompt
    assert "timed: M=16384,N=8192" in prompt


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["softmax", "--with", "no-such-program"], "cannot run 'no-such-program': no such program"),
        (["softmax", "--with", ""], "it is empty"),
        (["sofmax", "--with", "cat"], "no operation has this name"),
        (["softmax", "--with", "cat", "--rounds", "0"], "rounds"),
        (["softmax", "--with", "cat", "-c", "M=1"], "N is missing"),
        (["softmax", "--with", "cat", "--arena", "http://127.0.0.1:9"], "no arena answers"),
    ],
)
def test_mistakes_are_one_line(arguments, why, tmp_path):
    done = run("evolve", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert why in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""

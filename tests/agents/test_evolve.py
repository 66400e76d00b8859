"""The loop of `tilewright evolve`, with a scripted generator and a scripted judge."""

import json
import shlex
import sys
import threading
import time
from pathlib import Path

import pytest

from tilewright.agents.answers import ProblemText
from tilewright.agents.evolve import LOG, Judged, Run, summarize
from tilewright.agents.generator import parse_command
from tilewright.agents.prompt import KnownKernel, shortened
from tilewright.errors import GeneratorFails, RunOfAnotherProblem

PROBLEM = ProblemText(
    name="softmax",
    kind="operation",
    computes="Softmax over a dimension.",
    entry_point="softmax",
    signature="softmax(x)",
    reference="def reference(x):\n    return torch.softmax(x, dim=-1)\n",
    inputs=["M=8,N=8 float32", "x: [8, 8] float32"],
    dtypes=["float32"],
    check_cases=["M=1,N=1"],
    bench_cases=["M=8,N=8"],
    has_gradient=True,
    rules=["Return new tensors."],
)


class Scripted:
    """Judges by the number in the code: `us = 5` takes 5 us, eager takes 10; without a number it is wrong."""

    problem = PROBLEM

    def __init__(self, seconds=0.0):
        self.seconds, self.parents, self.entries, self.is_closed = seconds, [], [], False
        self.running = self.most = 0
        self._lock = threading.Lock()

    def judge(self, code, derived_from):
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(self.seconds)
        with self._lock:
            self.running -= 1
            self.parents.append(derived_from)
            words = code.split()
            if words[:2] != ["us", "="]:
                return Judged(False, False, "wrong: output[0] is 0", "M=1,N=1 float32: output[0] is 0, expected 1")
            us = float(words[2])
            self.entries.append((us, code))
            return Judged(True, True, submission=len(self.entries), us=us, share=1 / us, over_eager=10 / us)

    def best(self, count):
        return [KnownKernel(code, f"{us:g} us") for us, code in sorted(self.entries)[:count]]

    def close(self):
        self.is_closed = True


@pytest.fixture
def script(tmp_path):
    """Return a function that makes a command from the answers of the stand-in."""

    def make(*answers):
        folder = tmp_path / "script"
        folder.mkdir(exist_ok=True)
        for number, answer in enumerate(answers, start=1):
            (folder / f"answer-{number}").write_text(answer)
        return parse_command(shlex.join([sys.executable, str(Path(__file__).parent / "stand_in.py"), str(folder)]))

    make.prompt = lambda number: (tmp_path / "script" / f"prompt-{number}").read_text()
    return make


def run(arbiter, command, folder, **options):
    lines = []
    report = Run(arbiter, command, folder, **{"rounds": 10, "budget": 60, "say": lines.append} | options)()
    return report, lines


def logged(tmp_path):
    lines = (tmp_path / "run" / LOG).read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def test_the_best_kernels_and_the_last_verdict_are_the_next_context(tmp_path, script):
    arbiter = Scripted()
    command = script("us = 8", "```python\nus = 5\n```", "I try:\n```python\nx = 1\n```", "us = 20", "us = 6")
    report, lines = run(arbiter, command, tmp_path / "run", rounds=5)
    assert lines[1].split(maxsplit=1) == ["2", "ranked: 5.00 us, 20% of the ceiling, 2.00x eager"]
    assert lines[2].split(maxsplit=1) == ["3", "refused: wrong: output[0] is 0"]
    first, fourth = script.prompt(1), script.prompt(4)
    for text in (
        "Softmax over a dimension.",
        "softmax(x)",
        "torch.softmax(x, dim=-1)",
        "Return new tensors.",
        "M=8,N=8",
    ):
        assert text in first
    assert "Best kernels" not in first
    assert fourth.index("us = 5") < fourth.index("us = 8")  # the best first
    assert "expected 1" in fourth
    assert "```python\nx = 1\n```" in fourth
    assert (tmp_path / "run" / "best.py").read_text() == "us = 5\n"
    assert arbiter.parents == [None, 1, 2, 2, 2]
    assert report.best.number == 2
    assert (report.attempts, report.kernels, report.right, report.ranked) == (5, 5, 4, 4)
    assert report.fast == {"fast_0": 0.8, "fast_1": 0.6, "fast_1.5": 0.4, "fast_2": 0.0}
    assert report.prompt_chars > 5 * len(PROBLEM.reference)
    assert arbiter.is_closed


def test_a_run_goes_on_where_it_ended(tmp_path, script):
    command = script("us = 8", "us = 5", "us = 9", "us = 4")
    first, _ = run(Scripted(), command, tmp_path / "run", rounds=2)
    with (tmp_path / "run" / LOG).open("a") as log:
        log.write('{"schema": 2, "kind": "att')  # a crash in the middle of a line
    again, lines = run(Scripted(), command, tmp_path / "run", rounds=4)
    assert [line.split()[0] for line in lines] == ["3", "4"]
    assert (first.attempts, again.attempts, again.best.us) == (2, 4, 4.0)
    over, lines = run(Scripted(), command, tmp_path / "run", rounds=4)
    assert (over, lines) == (again, [])
    assert [one["number"] for one in logged(tmp_path)] == [1, 2, 3, 4]


def test_a_folder_of_another_problem_is_refused(tmp_path, script):
    run(Scripted(), script("us = 8"), tmp_path / "run", rounds=1)
    other = Scripted()
    other.problem = ProblemText(**{**vars(PROBLEM), "name": "add"})
    with pytest.raises(RunOfAnotherProblem, match="holds a run of softmax, not of add"):
        run(other, script(), tmp_path / "run")


def test_rounds_without_a_kernel_are_one_line_each_and_three_in_a_row_end_the_run(tmp_path, script):
    command = script("", "us = 5", "prose only, no code", "")
    with pytest.raises(GeneratorFails, match="3 times in a row, the last time because it exited with 1: no answer 5"):
        run(Scripted(), command, tmp_path / "run")
    outcomes = [(one["outcome"], one["reason"]) for one in logged(tmp_path)]
    assert outcomes == [
        ("no kernel", "it wrote nothing"),
        ("ranked", ""),
        ("no kernel", "its output holds no Python code"),
        ("no kernel", "it wrote nothing"),
        ("no kernel", "it exited with 1: no answer 5"),
    ]


def test_the_budget_ends_a_run_and_limits_the_last_generator(tmp_path, script):
    began = time.monotonic()
    report, _ = run(Scripted(0.4), script(*["us = 5"] * 9), tmp_path / "run", rounds=9, budget=0.9)
    assert 1 <= report.attempts < 9
    sleeper = parse_command(f"{sys.executable} -c 'import time; time.sleep(60)'")
    report, lines = run(Scripted(), sleeper, tmp_path / "other", rounds=1, budget=0.1, seconds=60)
    assert "did not end within 1 s" in lines[0]
    assert time.monotonic() - began < 20


def test_jobs_run_at_once_and_lose_nothing(tmp_path, script):
    arbiter = Scripted(0.3)
    report, _ = run(arbiter, script(*[f"us = {n}" for n in range(2, 10)]), tmp_path / "run", rounds=8, jobs=4)
    assert arbiter.most > 1
    assert sorted(one["number"] for one in logged(tmp_path)) == [*range(1, 9)]
    assert (tmp_path / "run" / "best.py").read_text() == "us = 2\n"
    assert (report.attempts, report.best.us) == (8, 2.0)


def test_an_error_of_the_judge_ends_every_job(tmp_path, script):
    class Broken(Scripted):
        def judge(self, code, derived_from):
            raise OSError("the arena is gone")

    arbiter = Broken()
    with pytest.raises(OSError, match="gone"):
        run(arbiter, script(*["us = 5"] * 8), tmp_path / "run", jobs=2)
    assert arbiter.is_closed


def test_of_long_code_the_last_definitions_are_shown():
    far, header, near, kernel = "f" * 9_000, "h" * 15_000, "n" * 9_000, "k" * 100
    shown = shortened("\n\n\n".join([far, header, near, kernel]))
    assert shown == "\n\n\n".join(["# 15009 characters are left out", far, near, kernel])
    assert shortened(header) == header


def test_without_times_of_eager_fast_p_is_not_available():
    assert summarize("softmax", []).fast == {"fast_0": None, "fast_1": None, "fast_1.5": None, "fast_2": None}

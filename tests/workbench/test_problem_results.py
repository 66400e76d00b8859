"""Results and effects of a problem's reference, and results that jump."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tilewright.errors import TilewrightError
from tilewright.variants import vary
from tilewright.workbench.bench.problems import speedup
from tilewright.workbench.check import problems
from tilewright.workbench.check.batch import Job, Options, judge_all
from tilewright.workbench.check.budget import Match, Mismatch, compare, expect
from tilewright.worker.memory import guard_allocations
from tilewright.worker.results import flatten_results, rebuild_results, result_names
from workbench.problem_files import model, verdict


def test_results_are_compared_by_their_keys():
    x, y = torch.ones(2), torch.zeros(3)
    assert [t.shape for t in flatten_results({"b": y, "a": x})] == [x.shape, y.shape]
    assert result_names({"b": y, "a": (x, y)}) == ["['a'][0]", "['a'][1]", "['b']"]
    assert result_names((x, [y])) is None


def test_numbers_are_results_and_none_is_nothing():
    assert [t.tolist() for t in flatten_results((True, None, 7, 0.5))] == [True, 7, 0.5]
    assert flatten_results(torch.tensor([1 + 2j])).tolist() == [[1, 2]]


def test_results_are_rebuilt():
    like = {"b": torch.tensor([1 + 2j]), "a": [3, None, torch.ones(2)]}
    rebuilt = rebuild_results(iter(flatten_results(like)), like)
    assert list(rebuilt) == ["b", "a"]
    assert rebuilt["a"][:2] == [3, None]
    assert torch.equal(rebuilt["b"], like["b"])


def test_a_solution_returns_the_keys_of_the_reference(tmp_path, device):
    problem = model(tmp_path / "moments.py", 'return {"mean": x.mean(-1), "largest": x.amax(-1)}')
    other_order = model(tmp_path / "order.py", 'return {"largest": x.amax(-1), "mean": x.mean(-1)}', "ModelNew")
    assert verdict(problem, other_order, device).right
    swapped = model(tmp_path / "swapped.py", 'return {"largest": x.mean(-1), "mean": x.amax(-1)}', "ModelNew")
    assert verdict(problem, swapped, device).verdict == "wrong"
    found = verdict(problem, model(tmp_path / "tuple.py", "return x.mean(-1), x.amax(-1)", "ModelNew"), device)
    assert "returned no keys, expected ['largest'], ['mean']" in found.reason


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        ("x.mul_(2)", "x += x", "pass"),
        ("x.mul_(2)\n        return x.sum(-1)", "x += x\n        return x.sum(-1)", "return 2 * x.sum(-1)"),
        ("return x * 2, x.shape[0], None", "return x + x, 8, None", "return x + x, 7, None"),
    ],
)
def test_what_the_reference_writes_and_counts_is_compared(body, right, wrong, tmp_path, device):
    problem = model(tmp_path / "problem.py", body)
    assert verdict(problem, model(tmp_path / "right.py", right, "ModelNew"), device).right
    assert verdict(problem, model(tmp_path / "wrong.py", wrong, "ModelNew"), device).verdict == "wrong"


@pytest.mark.parametrize(
    ("body", "reason"), [("pass", "returns nothing, and writes to none of its arguments"), ("return 'a'", "a str")]
)
def test_a_reference_without_results_is_refused(body, reason, tmp_path, device):
    path = model(tmp_path / "problem.py", body)
    with pytest.raises(TilewrightError, match=reason):
        verdict(path, model(tmp_path / "solution.py", body, "ModelNew"), device)


def test_results_cached_by_a_checksum_are_found(tmp_path, device):
    problem = model(tmp_path / "problem.py", "return torch.tanh(x)")
    body = "return known.setdefault(float(x.double().sum().round(decimals=3)), torch.tanh(x)).clone()"
    found = verdict(problem, model(tmp_path / "cached.py", body, "ModelNew", head="known = {}"), device)
    assert not found.right
    assert "(permuted)" in found.reason


def test_a_reference_that_returns_nan_alone_is_named(tmp_path, device):
    problem = model(tmp_path / "problem.py", "return torch.sqrt(-1 - x.abs())")
    found = verdict(problem, model(tmp_path / "copy.py", "return x * float('nan')", "ModelNew"), device)
    assert "the problem's reference always returns nan, whatever its inputs are" in found.labels


def rounded(x):
    return torch.round((1 + x) * 1000) / 1000


def test_a_step_does_not_loosen_the_budget_of_other_elements():
    x = torch.rand(256, 256, generator=torch.Generator().manual_seed(1))
    (expected,) = expect(rounded, (x,), has_steps=True)
    assert isinstance(compare(rounded(x), expected), Match)
    assert isinstance(compare(torch.round(1000 * x + 1000) * 0.001, expected), Match)  # rounds some elements up
    found = compare(1 + x, expected)
    assert isinstance(found, Mismatch)
    assert int(found.reason.rpartition("(")[2].split()[0]) > 65_000
    (unaware,) = expect(rounded, (x,))  # some of its elements jump anyway
    assert isinstance(compare(1 + x, unaware), Mismatch)


def test_integers_may_differ_by_one_at_a_step_alone():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    quantize = lambda x: torch.round(x * 37.3).to(torch.int32)
    (expected,) = expect(quantize, (x,), has_steps=True)
    near = expected.budget > 0
    assert 0 < int(near.sum()) < 200
    assert isinstance(compare(quantize(x) + near, expected), Match)
    assert isinstance(compare(quantize(x) + 2 * near, expected), Mismatch)
    assert isinstance(compare(quantize(x) + 1, expected), Mismatch)


def test_steps_of_narrow_outputs_leave_other_outputs_alone():
    def both(x):
        scale = x.float().square().mean(-1).rsqrt()
        return (x.float() * scale[:, None]).to(x.dtype), scale

    x = torch.randn(37, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, scale = expect(both, (x,))
    assert float(scale.budget.max()) < 1e-5


def test_sorted_inputs_stay_sorted():
    edges, x = torch.rand(33).sort()[0], torch.rand(4, 33)
    changed = vary([edges, x], "random signs", "cpu", seed=1)
    assert torch.equal(changed[0], edges)
    assert not torch.equal(changed[1], x)


def test_a_default_device_holds_where_allocations_are_guarded():
    from torch.utils._device import _device_constructors

    with guard_allocations(), torch.device("meta"):
        torch.empty(1)
    assert torch._C._VariableFunctions.empty in _device_constructors()


def test_what_a_problem_prints_is_no_output(tmp_path, capsys):
    loaded = problems.load(model(tmp_path / "prints.py", "print('call')\n        return x", head="print('import')"))
    loaded.select(device="cpu")
    loaded.op.reference(*loaded.op.make(loaded.op.check[0], "cpu"))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "import" in printed.err


@pytest.mark.slow
def test_the_end_of_a_judge_is_explained_and_others_go_on(tmp_path):
    exits = model(tmp_path / "exits.py", "return x", head="import os\nos._exit(3)")
    killed = model(tmp_path / "killed.py", "return x", head="import ctypes\nctypes.string_at(0)")
    solution = model(tmp_path / "solution.py", "return x", "ModelNew")
    fine = model(tmp_path / "fine.py", "return x")
    jobs = [Job(path, path.stem, solution) for path in (exits, killed, fine)]
    outcomes = judge_all(jobs, Options("quick"), "cpu", 1, measure=speedup)
    assert "its judge ended with code 3" in outcomes[0].reason
    assert "its judge was killed by SIGSEGV" in outcomes[1].reason
    assert outcomes[2].verdict == "right"
    assert outcomes[2].speedup > 0  # measured in the judge's process


@pytest.mark.slow
def test_an_interrupted_folder_keeps_its_report(tmp_path):
    for name, wait in (("1_fast", "pass"), ("2_slow", "time.sleep(50)")):
        for folder, kind in (("problems", "Model"), ("solutions", "ModelNew")):
            (tmp_path / folder).mkdir(exist_ok=True)
            body = f"{wait if kind == 'ModelNew' else 'pass'}\n        return torch.relu(x)"
            model(tmp_path / folder / f"{name}.py", body, kind, head="import time")
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "tilewright", "check", "--problem", tmp_path / "problems", tmp_path / "solutions"]
    command += ["--quick", "--jobs", "1", "--json", "--report", report]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert json.loads(process.stdout.readline())["verdict"] == "right"
        time.sleep(1)
        os.kill(process.pid, signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest) == (130, "")
    assert "interrupted: 1 of 2 solutions were not judged" in errors
    assert "Traceback" not in errors
    assert "| 2_slow | not judged |" in report.read_text()

"""KernelBench and gpu-mode problems, unchanged: every solution in problems/ gets the verdict it names."""

import ast
import json
import re
from pathlib import Path

import pytest

from cli.command import assert_one_line, run
from tilewright.errors import TilewrightError
from tilewright.workbench.check import check, problems

FOLDER = Path(__file__).parent.parent / "problems"
SOLUTIONS = sorted(FOLDER.glob("*/solutions/*.py"))


def constants(path: Path) -> dict[str, str]:
    body = ast.parse(path.read_text()).body
    named = [n for n in body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
    return {n.targets[0].id: n.value.value for n in named if n.targets[0].id in ("EXPECTED", "PROBLEM")}


def verdict_of(path: Path, device: str, seed: int | None = None):
    problem = problems.load((path.parent / constants(path)["PROBLEM"]).resolve())
    try:
        (found,) = check(problem.op, [], [path], device=device, seed=seed, depth="quick", problem=problem)
    finally:
        problem.close()
    return found


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_a_solution_gets_its_verdict(path, device):
    try:
        found = verdict_of(path, device)
        verdict, reason = found.verdict, found.reason
    except TilewrightError as error:
        verdict, reason = "unusable", str(error)
    assert verdict == constants(path)["EXPECTED"], reason


def solution(kind: str, name: str) -> Path:
    return FOLDER / kind / "solutions" / f"{name}.py"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("kernelbench", "softmax_bf16"), ("kernelbench", "softmax_wide_zeros"), ("gpumode", "softmax_zeros")],
)
def test_the_reason_says_if_the_problems_own_check_accepts_a_wrong_solution(kind, name, device):
    found = verdict_of(solution(kind, name), device, seed=1)  # whether its check accepts depends on the inputs
    assert found.verdict == "wrong"
    assert "the problem's own check accepts it" in found.reason


def test_a_case_sets_the_sizes_of_a_kernelbench_file():
    path, problem = solution("kernelbench", "softmax_huge_torch"), FOLDER / "kernelbench" / "level1_softmax_huge.py"
    done = run("check", "--problem", str(problem), str(path))
    assert_one_line(done, 2, "more than 2097152 elements need a GPU; 768 times smaller would do")
    done = run("check", "--problem", str(problem), str(path), "--case", "batch_size=2,dim=3000", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["verdict"], found["cases"][0]["case"]) == ("right", "batch_size=2,dim=3000")


@pytest.mark.slow
def test_parameters_follow_the_sizes_of_a_case():
    problem = FOLDER / "kernelbench" / "level1_linear_relu.py"
    like = problems.load(problem).op.check[0]
    smaller = ",".join(f"{name}={max(1, value // 2)}" for name, value in like.point)
    path = solution("kernelbench", "linear_relu_same_names")
    done = run("check", "--problem", problem, path, "--case", smaller, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_one_line(run("check", "--problem", problem, path, "--case", smaller, "--case", str(like)), 2, "one --case")


def test_bad_problems_are_reported_in_one_line(tmp_path):
    path, softmax = str(solution("kernelbench", "softmax_torch")), str(FOLDER / "kernelbench" / "level1_softmax.py")
    assert_one_line(run("check", "--problem", str(tmp_path / "none.py"), path), 2, "no file at")
    assert_one_line(run("check", "--problem", str(tmp_path), path), 2, "task.yml is not a problem")
    assert_one_line(run("check", "--problem", softmax, "none.py"), 2, "no file at")
    (tmp_path / "task.yml").write_text("files: [\n")
    assert_one_line(run("check", "--problem", str(tmp_path), path), 2, "no task with files and tests")
    for options, message in ((["--kernel", "triton"], "--kernel"), ([], "--problem needs a FILE")):
        files = [path] if options else []
        done = run("check", "--problem", softmax, *files, *options)
        assert done.returncode == 2
        assert message in done.stderr


@pytest.mark.slow
def test_a_problem_whose_reference_is_constant_is_named(device):
    found = verdict_of(solution("kernelbench", "always_zero_zeros"), device)
    assert "the problem's reference always returns 0, whatever its inputs are" in found.labels
    for name in ("softmax_torch", "relu_clamp", "two_results_torch"):
        labels = verdict_of(solution("kernelbench", name), device).labels
        assert not any("always returns" in label for label in labels)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("relu_identity", "random signs"),
        ("l1_norm_abs_of_sum", "random signs"),
        ("max_pool_zero_padding", "negated"),
    ],
)
def test_the_verdict_names_the_inputs_on_which_a_solution_is_wrong(name, values, device):
    found = verdict_of(solution("kernelbench", name), device)
    assert not found
    assert any(case.verdict == "wrong" and f"({values})" in case.case for case in found.cases)
    assert all(case.verdict == "right" for case in found.cases if "(" not in case.case)


def test_inputs_that_the_reference_does_not_accept_are_left_out(device):
    found = verdict_of(solution("kernelbench", "log_scale_log1p"), device)
    cases = [case.case for case in found.cases]
    assert any("(zeros)" in case for case in cases)
    assert not any("(negated)" in case or "(random signs)" in case for case in cases)


def test_the_verdict_says_in_which_call_a_solution_began_to_replay(device):
    found = verdict_of(solution("kernelbench", "softmax_replays"), device)
    assert found.calls > 20
    assert int(re.search(r"in call (\d+): ", found.reason)[1]) > 20
    assert verdict_of(solution("kernelbench", "softmax_torch"), device).calls >= 38


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("gpumode", "dropout_twice", "its reference draws random numbers"),
        ("kernelbench", "random_forward_torch", "its reference draws random numbers"),
        ("gpumode", "of_failing_reference", "its reference fails (RuntimeError: not on this device)"),
    ],
)
def test_a_problem_whose_reference_fails_or_does_not_repeat_itself_is_refused(kind, name, reason, device):
    with pytest.raises(TilewrightError, match=re.escape(reason)):
        verdict_of(solution(kind, name), device)

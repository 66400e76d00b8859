"""KernelBench and gpu-mode problems, unchanged: every solution in problems/ gets the verdict it names."""

import ast
import json
import re
from pathlib import Path

import pytest

from cli.command import assert_one_line, run
from tilewright.errors import TilewrightError
from tilewright.workbench.check import check, problems
from tilewright.worker import tf32

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


def check_json(*arguments: object) -> dict:
    done = run("check", "--problem", *map(str, arguments), "--quick", "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_a_case_sets_the_sizes_of_a_kernelbench_file():
    path, problem = solution("kernelbench", "softmax_huge_torch"), FOLDER / "kernelbench" / "level1_softmax_huge.py"
    found = check_json(problem, path, "--case", "dim=300,batch_size=2")
    assert (found["verdict"], found["cases"][0]["case"]) == ("right", "batch_size=2,dim=300")


def test_a_problem_too_large_for_a_cpu_is_shrunk_and_the_verdict_says_so(device):
    found = verdict_of(solution("kernelbench", "softmax_huge_torch"), device)
    assert found.right
    assert device == "cuda" or any("shrunk to fit a CPU: batch_size=" in label for label in found.labels)


def test_scale_shrinks_a_problem(tmp_path):
    path, problem = solution("kernelbench", "softmax_torch"), FOLDER / "kernelbench" / "level1_softmax.py"
    found = check_json(problem, path, "--scale", "1/16")
    sizes = dict(part.split("=") for part in found["cases"][0]["case"].split(","))
    assert 64 * 1000 / 32 <= int(sizes["batch_size"]) * int(sizes["dim"]) <= 64 * 1000 / 16
    assert any(label.startswith("shrunk to 1/16: ") for label in found["labels"])
    assert_one_line(run("check", "--problem", problem, path, "--scale", "x"), 2, "is not a fraction like 1/64")


MODEL = """
import torch
import torch.nn as nn

{head}

class {name}(nn.Module):
    def forward(self, x):
        {body}

{sizes}

def get_inputs():
    return [torch.randn({shape})]

def get_init_inputs():
    return []
"""


def model(path: Path, body: str, name: str = "Model", sizes: str = "", shape: str = "8, 128", head: str = "") -> Path:
    path.write_text(MODEL.format(name=name, body=body, sizes=sizes, shape=shape, head=head))
    return path


def verdict(problem: Path, path: Path, device: str):
    loaded = problems.load(problem)
    try:
        (found,) = check(loaded.op, [], [path], device=device, depth="quick", problem=loaded)
    finally:
        loaded.close()
    return found


def test_an_operation_that_moves_values_is_exact(tmp_path, device):
    problem = model(tmp_path / "sort.py", "return torch.sort(x)[0]")
    cleared = "(torch.sort(x)[0].view(torch.int32) & ~7).view(torch.float32)"
    assert verdict(problem, model(tmp_path / "same.py", "return torch.sort(x)[0]", "ModelNew"), device).right
    found = verdict(problem, model(tmp_path / "cleared.py", f"return {cleared}", "ModelNew"), device)
    assert found.verdict == "wrong"
    assert "± 0 " in found.reason


def test_sizes_may_be_expressions_tuples_and_unpacked(tmp_path):
    sizes = "N = 2048 * 2\nheight, width = 128, 64\ninput_shape = (32768,)\nderived = N * 2"
    loaded = problems.load(model(tmp_path / "sizes.py", "return x * 2", sizes=sizes, shape="N, *input_shape, 224"))
    assert str(loaded.op.check[0]) == "N=4096,height=128,width=64,input_shape=32768,224=224"
    loaded.select(["input_shape=7,N=3"])
    assert [a.shape for a in loaded.op.make(loaded.op.check[0], "cpu")[:1]] == [(3, 7, 224)]


def test_a_solution_follows_the_sizes_of_the_problem(tmp_path, device):
    sizes = "rows = 8\ncols = 128"
    problem = model(tmp_path / "problem.py", "return x + 1", sizes=sizes, shape="rows, cols")
    fixed = model(tmp_path / "fixed.py", "return x.view(rows, cols) + 1", "ModelNew", sizes, "rows, cols")
    loaded = problems.load(problem)
    loaded.select(["cols=64"])
    (found,) = check(loaded.op, [], [fixed], device=device, depth="quick", problem=loaded)
    assert found.right, found.reason


def test_tf32_is_off_unless_the_problem_turns_it_on(tmp_path):
    before = tf32.current()
    assert problems.load(model(tmp_path / "off.py", "return x")).tf32 == tf32.Tf32(False, False)
    head = "torch.backends.cudnn.allow_tf32 = True\ntorch.set_float32_matmul_precision('high')"
    assert problems.load(model(tmp_path / "on.py", "return x", head=head)).tf32 == tf32.Tf32(True, True)
    assert tf32.current() == before


def test_a_solution_with_parameters_falls_back_to_torch(tmp_path, device):
    problem = FOLDER / "kernelbench" / "level1_linear_relu.py"
    copy = tmp_path / "copy.py"
    copy.write_text(re.sub(r"\bModel\b", "ModelNew", problem.read_text()))
    found = verdict(problem, copy, device)
    assert any(label.startswith("falls back to torch") for label in found.labels)


def test_torch_compile_runs_in_the_sandbox(tmp_path, device):
    problem = model(tmp_path / "problem.py", "return torch.tanh(x)")
    head = "@torch.compile\ndef fn(x):\n    return torch.tanh(x)\n"
    found = verdict(problem, model(tmp_path / "compiled.py", "return fn(x)", "ModelNew", head=head), device)
    assert found.right, found.reason


def test_a_missing_package_is_named(tmp_path):
    problem = model(tmp_path / "needs.py", "return x", head="import no_such_package")
    path = model(tmp_path / "same.py", "return x", "ModelNew")
    assert_one_line(run("check", "--problem", problem, path), 2, "needs the package 'no_such_package'")


def test_a_raising_reference_is_a_usage_error(tmp_path):
    path = model(tmp_path / "same.py", "return x", "ModelNew")
    for number, (body, shape) in enumerate([("raise ValueError(3)", "8"), ("return x", "undefined")]):
        problem = model(tmp_path / f"raises{number}.py", body, shape=shape)
        assert_one_line(run("check", "--problem", problem, path), 2, "is not a problem that can be checked")


@pytest.mark.slow
def test_a_folder_of_problems_is_judged_and_reported(tmp_path):
    (tmp_path / "problems" / "a").mkdir(parents=True)
    (tmp_path / "solutions").mkdir()
    for name in ("1_relu", "2_tanh", "3_none"):
        model(tmp_path / "problems" / "a" / f"{name}.py", "return torch.relu(x)")
    model(tmp_path / "solutions" / "1_relu.py", "return torch.relu(x)", "ModelNew")
    model(tmp_path / "solutions" / "level_1_problem_2_sample_0_kernel.py", "return x", "ModelNew")
    reports = [tmp_path / "r.md", tmp_path / "r.html"]
    options = ["--jobs", "2", "--quick", "--report", reports[0], "--report", reports[1], "--json"]
    done = run("check", "--problem", tmp_path / "problems", tmp_path / "solutions", *options)
    assert done.returncode == 1, done.stderr
    lines = {line["problem"]: line["verdict"] for line in map(json.loads, done.stdout.splitlines())}
    assert lines == {"a/1_relu": "right", "a/2_tanh": "no solution", "a/3_none": "no solution"}
    assert "| a | 3 | 1 | 33.3 % | not measured |" in reports[0].read_text()
    assert "<td>33.3 %" in reports[1].read_text()
    assert_one_line(run("check", "--problem", tmp_path / "solutions", tmp_path / "solutions"), 2, "holds no problem")


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
    assert_one_line(run("check", "--problem", str(tmp_path), path), 2, "holds no problem")
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


def test_a_problem_with_batch_norm_is_shrunk(tmp_path):
    sizes, body = "batch_size = 64\nsize = 512", "return torch.nn.functional.batch_norm(x, None, None, training=True)"
    loaded = problems.load(model(tmp_path / "norm.py", body, sizes=sizes, shape="batch_size, 16, size, size"))
    loaded.select(device="cpu")
    assert loaded.is_shrunk(str(loaded.op.check[0]))


def test_inputs_whose_shapes_depend_on_values_are_not_drawn_at_huge_sizes(monkeypatch):
    loaded = problems.load(FOLDER / "gpumode" / "vectoradd_py")
    drawn = []
    draw = loaded._draw_inputs

    def drawing(case, seed, device):
        if device == "meta":
            raise RuntimeError("needs values")
        drawn.append(case["size"])
        return draw(case, seed, device)

    monkeypatch.setattr(loaded, "_draw_inputs", drawing)
    loaded._meta.clear()
    loaded.op.make(loaded.op.check[0], "meta")
    loaded.once = [loaded.op.check[0].with_size("size", 2**20)]
    loaded.select(device="cpu")
    loaded.close()
    assert loaded.once == []
    assert max(drawn) < 2**14

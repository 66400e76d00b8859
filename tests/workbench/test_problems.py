"""KernelBench and gpu-mode problems, unchanged: every solution in problems/ gets the verdict it names."""

import ast
import json
import re
import struct
from pathlib import Path

import pytest

from cli.command import assert_one_line, run
from tilewright.cli import check_folder
from tilewright.errors import CannotWrite, TilewrightError
from tilewright.workbench.check import check, problems
from tilewright.worker import tf32
from workbench.problem_files import model, verdict

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


def test_parameters_that_a_solution_may_ignore_are_named(tmp_path, device):
    problem = tmp_path / "norm.py"
    problem.write_text(
        "import torch\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.norm = torch.nn.LayerNorm(64)\n        self.linear = torch.nn.Linear(64, 64)\n"
        "    def forward(self, x):\n        return self.linear(self.norm(x))\n\n"
        "def get_inputs():\n    return [torch.randn(8, 64)]\n\ndef get_init_inputs():\n    return []\n"
    )
    copy = tmp_path / "copy.py"
    copy.write_text(re.sub(r"\bModel\b", "ModelNew", problem.read_text()))
    found = verdict(problem, copy, device)
    assert "not told from constants: norm.weight = 1, norm.bias = 0" in found.labels


def test_inputs_that_never_change_are_named(tmp_path, device):
    problem, ignores = tmp_path / "problem.py", tmp_path / "ignores_its_bias.py"
    text = (
        "import torch\n\nclass {}(torch.nn.Module):\n    def forward(self, x, bias):\n        return {}\n\n"
        "def get_inputs():\n    return [torch.randn(8, 64), torch.zeros(64)]\n\n"
        "def get_init_inputs():\n    return []\n"
    )
    problem.write_text(text.format("Model", "x + bias"))
    ignores.write_text(text.format("ModelNew", "x.clone()"))
    assert "not told from constants: argument 2 = 0" in verdict(problem, ignores, device).labels


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
    assert '<td class="number">33.3 %' in reports[1].read_text()
    assert_one_line(run("check", "--problem", tmp_path / "solutions", tmp_path / "solutions"), 2, "holds no problem")


def test_a_report_that_does_not_fit_on_the_disk_is_named(tmp_path):
    (tmp_path / "report.md").symlink_to("/dev/full")
    with pytest.raises(CannotWrite, match="No space left"):
        check_folder._write([], "title", [tmp_path / "report.md"], as_json=True)


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


def test_an_argument_is_no_output_buffer_if_its_own_values_matter(tmp_path):
    files = [{"name": "reference.py", "source": "reference.py"}]
    (tmp_path / "task.yml").write_text(json.dumps({"files": files, "tests": [{"size": 80, "seed": 1}]}))
    (tmp_path / "reference.py").write_text(
        "import torch\n\ndef generate_input(size, seed):\n    return torch.randn(size), torch.arange(float(size))\n\n"
        "def ref_kernel(data):\n    return torch.where(data[1] > 50, data[0], -data[0])\n\n"
        "def check_implementation(data, output):\n    return True, ''\n"
    )
    task = problems.load(tmp_path)
    assert task.destinations(task.op.make(task.op.check[0])) == []
    task.close()


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


def test_shrunk_sizes_stay_above_one(tmp_path):
    sizes = "batch = 64\nchannels = 64\nheight = width = 256"
    body = "return torch.nn.functional.conv2d(x, x.new_ones(channels, channels, 3, 3))"
    loaded = problems.load(model(tmp_path / "conv.py", body, sizes=sizes, shape="batch, channels, height, width"))
    loaded.select(device="cpu")
    assert set(dict(loaded.op.check[0].point)) == {"batch", "channels", "height", "width"}
    assert min(dict(loaded.op.check[0].point).values()) >= 4


FLASHINFER = FOLDER / "flashinfer"
DEFINITION = FLASHINFER / "definitions" / "norm" / "add_rmsnorm_h96.json"


def packed(path: Path, name: str = "add_rmsnorm_returns", language: str = "python", **spec) -> Path:
    """Write a flashinfer-bench solution as JSON, with its kernel in a second file."""
    sources = [
        {"path": "main.py", "content": "from parts.norm import run as call"},
        {"path": "parts/norm.py", "content": solution("flashinfer", name).read_text()},
    ]
    spec = {"language": language, "target_hardware": ["H200"], "entry_point": "main.py::call", **spec}
    content = {"name": path.stem, "definition": "add_rmsnorm_h96", "author": "a", "spec": spec, "sources": sources}
    path.write_text(json.dumps(content))
    return path


def test_a_flashinfer_bench_solution_in_json(tmp_path, device):
    returns = packed(tmp_path / "returns.json", destination_passing_style=False)
    assert verdict(DEFINITION, returns, device).right
    assert verdict(DEFINITION, packed(tmp_path / "fills.json", "add_rmsnorm_fills"), device).right
    found = verdict(DEFINITION, packed(tmp_path / "half.json", "add_rmsnorm_half_filled"), device)
    assert found.verdict == "wrong"
    done = run("check", "--problem", DEFINITION, returns, "--quick", "--case", "batch_size=3", "--json")
    assert json.loads(done.stdout)["cases"][0]["case"] == "batch_size=3,hidden_size=96"
    for path, words in (
        (packed(tmp_path / "cuda.json", language="cuda"), "it is written in cuda"),
        (packed(tmp_path / "entry.json", entry_point="none.py::run"), "its sources lack none.py"),
        (DEFINITION, "no flashinfer-bench solution"),
        (tmp_path / "missing.json", "no file at"),
    ):
        assert_one_line(run("check", "--problem", DEFINITION, path), 2, words)


def test_a_definition_without_workloads_is_refused(tmp_path):
    path = tmp_path / "lonely.json"
    path.write_text(DEFINITION.read_text())
    returns = solution("flashinfer", "add_rmsnorm_returns")
    assert_one_line(run("check", "--problem", path, returns), 2, "it has no workloads; put add_rmsnorm_h96.jsonl")
    path.write_text("{}")
    assert_one_line(run("check", "--problem", path, returns), 2, "it is no definition with workloads")
    path.write_text("{")
    assert_one_line(run("check", "--problem", path, returns), 2, "it is no JSON file")


def test_inputs_from_a_safetensors_file(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [4, 20]}}).encode()
    values = struct.pack("<f4f", 9.0, 1.0, 2.0, 3.0, 4.0)
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values)
    content = {
        "name": "scaled", "op_type": "scale", "axes": {"N": {"type": "const", "value": 2}},
        "inputs": {"x": {"shape": ["N"], "dtype": "float32"}, "w": {"shape": ["N", "N"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["N"], "dtype": "float32"}}, "reference": "def run(x, w):\n    return w @ x",
    }  # fmt: skip
    inputs = {"x": {"type": "random"}, "w": {"type": "safetensors", "path": "w.safetensors", "tensor_key": "w"}}
    workload = {"workload": {"uuid": "u", "axes": {}, "inputs": inputs}}
    (tmp_path / "scaled.json").write_text(json.dumps(content))
    (tmp_path / "scaled.jsonl").write_text(json.dumps(workload))
    loaded = problems.load(tmp_path / "scaled.json")
    x, w, *_ = loaded.op.make(loaded.op.check[0], "cpu")
    assert x.shape == (2,)
    assert w.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_reference_that_depends_on_values_is_shrunk_by_what_it_computes(tmp_path):
    body = "y = x[:, None] * x[None] if x.sum().item() < 1e9 else x\n        return y.exp().sum(1)"
    loaded = problems.load(model(tmp_path / "outer.py", body, sizes="N = 4096", shape="N"))
    loaded.select(device="cpu")
    assert loaded.op.check[0]["N"] <= 1024


def test_a_reference_of_many_operators_is_shrunk_without_running_them_all(tmp_path):
    body = "h = x[0]\n        for t in range(len(x)):\n            h = torch.tanh(h + x[t])\n        return h"
    loaded = problems.load(model(tmp_path / "rnn.py", body, sizes="T = 10000000", shape="T, 16"))
    loaded.select(device="cpu")
    assert loaded.op.check[0]["T"] < 20_000

"""Problems of every kind are stored with their files, judged, and predicted without a GPU."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewright import source
from tilewright.arena import problems
from tilewright.arena.analysis import Analyst
from tilewright.arena.errors import BadBoard, CannotAddProblem
from tilewright.arena.judge import Judge
from tilewright.cli import app
from tilewright.worker.execute import flatten

OWN = '''
def reference(x):
    """Scale every row by its largest magnitude."""
    return x / x.abs().amax(-1, keepdim=True)


def inputs(draw):
    return (draw.randn("M", "N"),)


cases = [{"M": 5, "N": 77}]
bench = [{"M": 16, "N": 256}]
'''
KERNELBENCH = """
import torch

ROWS = 4194304  # 4 GiB, which an analysis must not draw


class Model(torch.nn.Module):
    def forward(self, x):
        return x / x.abs().amax(-1, keepdim=True)


def get_inputs():
    return [torch.randn(ROWS, 256)]


def get_init_inputs():
    return []
"""
KERNEL = """
import torch, triton
import triton.language as tl


@triton.jit
def _scale(x_ptr, y_ptr, stride_m, stride_n, N, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * stride_m + offs.to(tl.int64) * stride_n, mask=offs < N, other=0.0).to(tl.float32)
    has_nan = tl.sum((x != x).to(tl.int32), 0) > 0
    y = x / tl.where(has_nan, float("nan"), tl.max(tl.abs(x), 0))
    tl.store(y_ptr + row * N + offs, y.to(y_ptr.dtype.element_ty), mask=offs < N)


def row_scale(x):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        _scale[(x.shape[0],)](x, y, *x.stride(), x.shape[1], BLOCK_N=triton.next_power_of_2(x.shape[1]))
    return y


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return row_scale(x)
"""
PROBLEMS = Path(__file__).parent.parent / "problems"
FASTER = {"id": 9, "us": 0.1, "low_us": 0.1, "high_us": 0.1, "share": 1.0, "fast": 1.0}
FILES = {"own file": OWN, "kernelbench": KERNELBENCH}


def described(folder, text):
    (folder / "row_scale.py").write_text(text)
    return problems.describe(str(folder / "row_scale.py"), boards=["h200 predicted"])


@pytest.fixture(scope="module")
def analyst():
    analyst = Analyst()
    yield analyst
    analyst.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "leader"), [("own file", FASTER), ("kernelbench", None)])
def test_a_problem_in_a_file_is_judged_on_another_machine(kind, leader, tmp_path, analyst):
    problem = described(tmp_path, FILES[kind])
    (tmp_path / "row_scale.py").unlink()  # the worker has the job alone
    assert (problem["kind"], problem["name"]) == (kind, "row_scale")
    submission = {"id": 1, "code": KERNEL}
    judge = Judge("cpu", "quick", analyst=analyst)
    states = []
    job = {"board": "h200 predicted", "problem": problem, "submission": submission, "leader": leader}
    found = judge(job, states.append)
    assert found["ranked"], found["reason"]
    assert states == ["checking", "timing"] * (1 if leader else 2), "a new leader is judged again from scratch"
    assert found.get("confirmed") == (None if leader else True)
    assert found["timing"]["us"] > 0
    assert 0 < found["timing"]["share"] < 1


DEFINITION = {
    "name": "row_scale",
    "op_type": "norm",
    "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 256}},
    "inputs": {"x": {"shape": ["M", "N"], "dtype": "float32"}},
    "outputs": {"y": {"shape": ["M", "N"], "dtype": "float32"}},
    "reference": "def run(x):\n    return x / x.abs().amax(-1, keepdim=True)\n",
}
WORKLOAD = {"workload": {"axes": {"M": 16}, "inputs": {"x": {"type": "random"}}, "uuid": "0f6f1d2c"}}


def test_a_definition_of_flashinfer_bench_keeps_its_workloads(tmp_path):
    pytest.importorskip("tilewright.workbench.check.problems.flashinfer")
    for folder in ("definitions/norm", "workloads/norm"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "definitions/norm/row_scale.json").write_text(json.dumps(DEFINITION))
    (tmp_path / "workloads/norm/row_scale.jsonl").write_text(json.dumps(WORKLOAD | {"definition": "row_scale"}))
    problem = problems.describe(str(tmp_path / "definitions/norm/row_scale.json"), boards=["h200 predicted"])
    shutil.rmtree(tmp_path / "definitions")
    assert (problem["kind"], problem["name"]) == ("flashinfer-bench", "row_scale")
    with problems.loaded(problem) as found:
        assert [case["M"] for case in found.cases] == [16]
        (y,) = flatten(found.op.reference(*found.op.make(found.cases[0], "cpu")))
        assert y.shape == (16, 256)
        assert float(y.abs().max()) == 1.0


def test_a_gpu_mode_task_is_timed_on_its_benchmarks():
    problem = problems.describe(str(PROBLEMS / "gpumode" / "vectoradd_py"), boards=["h200 predicted"])
    assert (problem["kind"], problem["name"]) == ("gpu-mode", "vectoradd_py")
    assert problem["cases"] == ["size=1024", "size=16384"]
    with problems.loaded(problem) as found:
        assert [case["size"] for case in found.op.check] == [127, 128, 129]
        *_, large = found.cases
        cost = found.op.cost(*found.op.make(large, "meta"))
        assert (cost.read, cost.written) == (2 * 2 * 16384**2, 2 * 16384**2), "the output buffer is not read"


def test_files_that_a_task_names_above_its_folder_are_kept():
    problem = problems.describe(str(PROBLEMS / "gpumode" / "contest" / "quantise_py"), boards=["h200"])
    assert {"utils.py", "contest/quantise_py/task.yml"} < {*problem["files"]}
    with problems.loaded(problem) as found:
        assert len(found.op.check) == 2


def test_a_link_does_not_publish_what_is_outside_of_the_folder(tmp_path):
    folder = tmp_path / "softmax_py"
    shutil.copytree(PROBLEMS / "gpumode" / "softmax_py", folder)
    for name in ("utils.py", "eval.py"):  # which its task.yml names
        shutil.copy(PROBLEMS / "gpumode" / name, tmp_path)
    (folder / "notes").symlink_to("task.yml")
    assert problems.describe(str(folder), boards=["h200"])["kind"] == "gpu-mode"
    (folder / "secret").symlink_to("/etc/passwd")
    with pytest.raises(CannotAddProblem, match="its secret is a link that leads out of it"):
        problems.describe(str(folder), boards=["h200"])


def test_an_entry_point_is_named_after_the_operation(tmp_path):
    fields = problems.describe("softmax", boards=["h200"], name="softmax-long")
    assert problems.entry_point(fields).name == "softmax"
    assert problems.entry_point(described(tmp_path, OWN)).name == "row_scale"
    assert problems.entry_point(described(tmp_path, KERNELBENCH)).name == "ModelNew"


def test_the_statement_of_an_operation_is_its_mathematics():
    for name in source.op_files():
        text = problems.statement({"kind": problems.OP, "files": {problems.ENTRY: name}})
        mathematics, _, rest = text.partition("\nop = ")
        assert f".{name}\n\ndef reference(" in mathematics
        assert f'"{name}"' in rest, name
        assert ".kernel(" not in rest, name


def test_cases_too_large_for_this_machine_are_kept():
    path = str(PROBLEMS / "kernelbench" / "level1_softmax_huge.py")
    assert problems.describe(path, boards=["h200"])["cases"] == ["batch_size=4096,dim=393216"]
    assert problems.describe(path, boards=["h200"], cases=["dim=64"])["cases"] == ["batch_size=4096,dim=64"]


def test_an_own_file_is_timed_on_its_bench_cases(tmp_path):
    problem = described(tmp_path, OWN)
    assert problem["cases"] == ["M=16,N=256"]
    assert problem["description"] == "Scale every row by its largest magnitude."
    assert "def reference" in problems.statement(problem)
    with problems.loaded(problem) as found:
        (case,) = found.cases
        assert case.dtype == "bfloat16"
        x = found.op.make(case, "meta")
        assert found.op.cost(*x).bytes == 2 * 16 * 256 * 2  # read and written
        assert torch.equal(found.op.reference(torch.ones(2, 2)), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def reference(x):\n    return x\n", "inputs"),
        ("def reference(x):\n    return 1\ndef inputs():\n    import torch\n    return torch.ones(2)\n", "returns int"),
        ("import nothing_like_this\ndef reference(x): ...\n", "nothing_like_this"),
        ("x = 1\n", "defines no"),
        ("def broken(:\n", "line 1"),
        ("\0", "row_scale"),
    ],
)
def test_a_problem_that_does_not_load_is_reported_in_one_line(tmp_path, text, why):
    with pytest.raises(CannotAddProblem) as refused:
        described(tmp_path, text)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_problem_is_named_as_the_user_did(tmp_path):
    for name, why in (("no_model.py", "defines no Model"), ("nothing.py", "does not exist")):
        path = str(PROBLEMS / "kernelbench" / name)
        with pytest.raises(CannotAddProblem, match=why) as refused:
            problems.describe(path, boards=["h200"])
        assert str(refused.value).startswith(f"{path} cannot be added")
        assert "/tilewright-problem-" not in str(refused.value)
    with pytest.raises(CannotAddProblem, match="is no name"):
        problems.describe("softmax", boards=["h200"], name="a/b")
    add = ["arena", "problem", "add", "softmax", "relu", "--name", "x", "--data", str(tmp_path)]
    assert CliRunner().invoke(app, add).exit_code == 2, "the second would replace the first"


def test_the_others_are_added(tmp_path):
    (tmp_path / "in").mkdir()
    for name, text in (("good", KERNELBENCH), ("bad", "x = 1\n"), ("own", OWN)):
        (tmp_path / "in" / f"{name}.py").write_text(text)
    data = ["--data", str(tmp_path / "data")]
    found = CliRunner().invoke(app, ["arena", "problem", "add", str(tmp_path / "in"), "-b", "h200 predicted", *data])
    assert found.exit_code == 2
    assert [line.partition(":")[0] for line in found.stdout.splitlines()[:2]] == ["added good", "added own"]
    listed = CliRunner().invoke(app, ["arena", "problem", "list", *data])
    assert "kernelbench" in listed.stdout
    assert "own file" in listed.stdout


@pytest.mark.parametrize("name", ["", "a/b", "../x", "h200  predicted", " predicted", "<b>", "x" * 81])
def test_a_board_has_a_name_that_fits_into_an_address(name):
    with pytest.raises(BadBoard, match="no board can be named"):
        problems.describe("softmax", boards=[name])


def test_a_board_of_an_unknown_gpu_is_named(tmp_path):
    command = ["arena", "problem", "add", "softmax", "-b", "h20O", "--case", "M=4,N=8", "--data", str(tmp_path)]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0
    assert "no GPU named 'h20O' is known" in found.stderr

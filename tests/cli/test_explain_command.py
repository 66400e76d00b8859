"""Tests of `tilewright explain`."""

import json
import shutil
from pathlib import Path

import pytest

from cli.command import assert_one_line, in_process
from sample_records import timing_record
from tilewright import record, source

ROOT = Path(__file__).parent.parent.parent
KERNELS = Path(__file__).parent.parent / "workbench" / "inspect_kernels.py"
FLAW = ROOT / "examples" / "flaws" / "extra_pass.py"
SMALL = ("relu", "-k", "triton", "--case", "N=67108864")


@pytest.fixture
def explain(capsys, monkeypatch, tmp_path):
    """The command in this process, with one recorded timing."""
    timing = timing_record(us=160.0, case={"N": 2**26}, dtype="bfloat16")
    timing |= {"op": "relu", "source": source.kernel_hash("relu", "triton")}
    record.append(tmp_path / "results" / "relu.jsonl", [timing])
    monkeypatch.setenv("TILEWRIGHT_RESULTS", str(tmp_path / "results"))
    return in_process("explain", monkeypatch, capsys)


def test_a_good_kernel(explain):
    done = explain(*SMALL)
    assert done.returncode == 0, done.stderr
    for words in ("Bottleneck: memory bandwidth", "Time: 160.0 us, measured", "of the ceiling", "Predicted:", "pass"):
        assert words in done.stdout
    assert "fail" not in done.stdout
    assert "Next: tilewright inspect relu -k triton --case N=67108864 --sass" in done.stdout


def test_a_flawed_kernel(explain):
    done = explain(FLAW, "-f", "slow", "-i", "67108864:bf16")
    assert done.returncode == 1, done.stderr
    assert "DRAM traffic is 2.00 times the minimum (audited)" in done.stdout
    assert "Next: fuse _scale and _cut into one launch" in done.stdout


def test_json(explain):
    done = explain(*SMALL, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["us"] == {"value": 160.0, "source": "measured"}
    assert found["bottleneck"]["name"] == "memory bandwidth"
    assert found["prediction"]["terms"]["memory"]["source"] == "audited"
    assert [point["name"] for point in found["checks"]][:2] == ["coalesced access", "occupancy"]
    assert len(found["checks"]) == 8


def test_predictions_are_recorded(explain, tmp_path):
    path = tmp_path / "predictions.jsonl"
    done = explain("--predict", "--record", path)
    assert done.returncode == 0, done.stderr
    assert "Memory-bound calls (1): predicted / measured" in done.stdout
    (one,) = record.read(path).records
    assert (one["kind"], one["op"], one["measured"]["us"]) == ("prediction", "relu", 160.0)
    done = explain("relu", "--predict", "--json")
    assert json.loads(done.stdout)["predicted_us"] == one["predicted_us"]


def test_a_replacement_of_cuda_is_reported(explain):
    done = explain("softmax", "-k", "cuda", "-c", "M=64,N=256", "--gpu", "mi300x")
    assert "_online_fwd: CUDA C++ does not run on mi300x; the call launches this kernel instead." in done.stdout


def test_a_failed_compilation_is_reported(explain):
    done = explain(KERNELS, "-f", "for_nvidia", "-i", "128:fp32", "--gpu", "mi300x")
    assert done.returncode == 1, done.stderr
    assert "does not compile for gfx942" in done.stdout
    assert f"{KERNELS.name}, line" in done.stdout


def test_mistakes_are_one_line(explain, tmp_path):
    assert_one_line(explain("relu", "--gpu", "h20"), 2, "did you mean 'h200'?")
    assert_one_line(explain("relo"), 2, "did you mean 'relu'?")
    assert_one_line(explain("relu", "-k", "eager"), 2, "eager of relu is part of torch")
    assert_one_line(explain("relu", "--gpu", "h200,a100"), 2, "explain takes one GPU")
    assert_one_line(explain("relu", "--threads", "64"), 2, "--threads: only for a .cu FILE")
    assert_one_line(explain("argmax", "--direction", "backward"), 2, "argmax has no gradient")
    assert_one_line(explain(tmp_path), 2, "is a directory")
    (tmp_path / "plain.py").write_text("def launch(x):\n    return x + 1\n")
    assert_one_line(explain(tmp_path / "plain.py", "-i", "64:fp32"), 2, "try another --function or --input")
    assert_one_line(explain(KERNELS, "-f", "of_values", "-i", "9x9"), 2, "of_values fails before it launches")
    assert_one_line(explain(tmp_path / "no.cu"), 2, "no file at")
    assert_one_line(explain(tmp_path / "no.py"), 2, "no file at")
    assert_one_line(explain(FLAW, "-f", "quick"), 2, "no function named 'quick'")
    assert_one_line(explain(FLAW, "-k", "triton"), 2, "only for an OP")
    assert_one_line(explain("relu", "-i", "8x8"), 2, "only for a FILE")
    assert_one_line(explain("relu", "--direction", "both"), 2, "not one of forward, backward")
    assert_one_line(
        explain("relu", "--record", tmp_path / "x"),
        2,
        "--record: only with --predict",
        "See: tilewright explain --help",
    )
    assert_one_line(explain(), 2, "name an operation or a file")
    assert_one_line(explain("--predict", "--gpu", "a100"), 2, "no timing of any operation on a100-80gb is recorded")
    assert_one_line(explain("transpose", "--predict"), 2, "no timing of transpose on h200", "bench transpose --record")
    assert_one_line(explain("relo", "--predict"), 2, "did you mean 'relu'?")


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_select_a_kernel_of_a_cuda_file(explain, tmp_path):
    file = tmp_path / "two.cu"
    file.write_text("__global__ void a(float* x) { x[0] = 1; }\n__global__ void b(float* x) { x[0] = 1; }\n")
    titles = [line for line in explain(file).stdout.splitlines() if line.startswith("two.cu")]
    assert titles == ["two.cu, a, h200", "two.cu, b, h200"]
    assert "two.cu, a" not in explain(file, "-f", "b").stdout


def test_predictions_use_only_recorded_calls(explain):
    for more, says in (
        (("-c", "N=64"), "not with --predict, which uses the recorded calls"),
        (("-k", "nope"), "relu has no kernel named 'nope'"),
        (("--gpu", "a100"), "predict one: tilewright explain relu --gpu a100-80gb"),
    ):
        assert_one_line(explain("relu", "--predict", *more), 2, says)

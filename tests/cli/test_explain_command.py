"""Tests of `tilewright explain`."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer

from cli.command import assert_one_line, in_process
from sample_records import timing_record
from tilewright import cli, record, source

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
    for words in (
        "Bottleneck: memory bandwidth",
        "Time: 160.0 us, measured",
        "against a floor of",
        "Predicted:",
        "pass",
    ):
        assert words in done.stdout
    assert "fail" not in done.stdout
    assert "→ only fewer bytes make it faster: fuse it" in done.stdout
    assert "Not checked" not in done.stdout, "only correct kernels are timed"
    assert "Next: tilewright inspect relu -k triton -c N=67108864 -d bfloat16 --gpu h200 --sass" in done.stdout


def test_a_flawed_kernel(explain):
    done = explain(FLAW, "-f", "slow", "-i", "67108864:bf16")
    assert done.returncode == 1, done.stderr
    assert "DRAM traffic is 2.00 times the minimum (audited)" in done.stdout
    assert done.stdout.count("fuse _scale and _cut into one launch") == 1
    assert "Not checked: nothing compares its results with a reference; `tilewright check" in done.stdout
    assert "-f slow -i 67108864:bf16 --reference NAME` does" in " ".join(done.stdout.split())


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
    assert_one_line(explain("relu", "--predict", "--gpu", "h200,a100"), 2, "--predict takes one GPU")
    assert_one_line(explain("relu", "--gpu", "gb200"), 2, "the datasheet of gb200 lacks the number of SMs")
    assert_one_line(explain("relu", "--price", "a100=1"), 2, "a100-80gb is not one of the compared GPUs")
    assert_one_line(explain("relu", "--threads", "64"), 2, "--threads: only for a .cu FILE")
    assert_one_line(explain("argmax", "--direction", "backward"), 2, "argmax has no gradient")
    assert_one_line(explain(tmp_path), 2, "is a directory")
    (tmp_path / "plain.py").write_text("def launch(x):\n    return x + 1\n")
    assert_one_line(explain(tmp_path / "plain.py", "-i", "64:fp32"), 2, "try another --function or --input")
    assert_one_line(explain(KERNELS, "-f", "of_values", "-i", "9x9"), 2, "launched no Triton or CUDA C++ kernel")
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


NARROW = """
import torch, triton, triton.language as tl

@triton.jit
def _double(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + offs, mask=offs < N)
    tl.store(y_ptr + row + offs, 2 * x, mask=offs < N)

def double(x):
    y = torch.empty_like(x)
    _double[(x.shape[0],)](x, y, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return y

def sorted_after(x):
    return torch.sort(double(x))[0]

def relu(x):
    return double(x.view(1, -1)).view(x.shape)
"""


@pytest.fixture
def narrow(tmp_path):
    path = tmp_path / "a narrow one.py"  # a path that must be quoted
    path.write_text(NARROW)
    return path


def commands(text: str) -> list[str]:
    """Return the commands in what explain prints, in backticks or after "Next:"."""
    text = re.sub(r"\s+", " ", text)
    return re.findall(r"`(tilewright [^`]+)`", text) + re.findall(r"Next: (tilewright .*?) ?$", text)


@pytest.mark.slow
def test_every_printed_command_can_be_parsed(explain, narrow):
    group = typer.main.get_command(cli.app)
    printed = [
        explain("relu", "-k", "triton", "-c", "N=4096").stdout,
        explain("relu", "-k", "triton", "-c", "N=4096", "--direction", "backward").stdout,
        explain("relu", narrow, "-c", "N=4096").stdout,
        explain(narrow, "-f", "sorted_after", "-i", "256x1000:bf16").stdout,
        explain(narrow, "-f", "double", "-i", "256x1000:bf16", "--gpu", "h200", "--gpu", "a100").stdout,
    ]
    found = [command for text in printed for command in commands(text)]
    assert {shlex.split(command)[1] for command in found} == {"bench", "check", "explain", "inspect", "profile"}
    for command in found:
        _, name, *words = shlex.split(command)
        group.commands[name].make_context(name, words)


@pytest.mark.slow
def test_no_finding_is_printed_twice(explain, narrow):
    done = explain(narrow, "-f", "sorted_after", "-i", "20000x3000:bf16")
    sentences = [part.strip(" .") for part in re.split(r"; |: |\(|\)|\. |→", re.sub(r"\s+", " ", done.stdout))]
    repeated = {part for part in sentences if len(part.split()) > 4 and sentences.count(part) > 1}
    assert not repeated


@pytest.mark.slow
def test_an_unchecked_kernel_is_named(explain, narrow, tmp_path):
    done = explain("relu", narrow, "-c", "N=4096")
    assert f"run `tilewright check relu {shlex.quote(str(narrow))}`" in re.sub(r"\s+", " ", done.stdout)
    verdict = {"verdict": "wrong", "cases": []}
    code = source.kernel_hash("relu", "triton")
    record.append(tmp_path / "results" / "v.jsonl", [record.stamp("verdict", "relu", "triton", code, **verdict)])
    assert "its newest verdict is 'wrong'" in explain("relu", "-k", "triton", "-c", "N=64").stdout
    verdict = record.stamp("verdict", "relu", "triton", code, verdict="right", cases=[])
    record.append(tmp_path / "results" / "w.jsonl", [verdict | {"date": "2999-01-01"}])
    assert "Not checked" not in explain("relu", "-k", "triton", "-c", "N=64").stdout


@pytest.mark.slow
def test_several_gpus_are_compared(explain, narrow):
    call = (narrow, "-f", "double", "-i", "20000x4096:bf16")
    gpus = ("--gpu", "l4", "--gpu", "h200,gb200")
    done = explain(*call, *gpus)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines if line and line[0] in ("l4", "h200")] == ["h200", "l4"], "the fastest first"
    assert "gb200: not available: the datasheet of gb200 lacks" in done.stdout
    assert "memory bandwidth" in done.stdout
    done = explain(*call, *gpus, "--price", "l4=0.01,h200=9", "--json")
    refused, *found = map(json.loads, done.stdout.splitlines())
    assert refused["gpu"] == "gb200"
    for one in found:
        expected = one["price_per_hour"] * one["us"]["value"] / 3600
        assert one["price_per_million_calls"] == pytest.approx(expected)
    priced = explain(*call, *gpus, "--price", "l4=0.01,h200=9").stdout
    assert priced.index("\nl4 ") < priced.index("\nh200 "), "the cheapest call first"

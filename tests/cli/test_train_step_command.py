"""tilewright train-step: the whole path on a CPU, recorded results and predictions without a GPU."""

import json

import pytest
from command import assert_one_line, in_process, run

from tilewright import hardware, record

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(hardware.has_gpu(), reason="the commands would measure the GPU"),
    pytest.mark.slow,
    pytest.mark.xdist_group("train-step"),  # one measurement
]
ON_CPU = ("train-step", "--device", "cpu", "-m", "tiny", "-v", "eager", "-v", "ours", "--rounds", "2", "--steps", "2")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A measurement on the CPU, with its record in a results folder."""
    folder = tmp_path_factory.mktemp("results")
    file = folder / "cpu" / "train_step.jsonl"
    return run(*ON_CPU, "--graphs", "-d", "float32", "--record", file), file


def test_a_step_is_measured_on_the_cpu(recorded):
    done, file = recorded
    assert done.returncode == 0, done.stderr
    for words in ("tiny 2x16 tokens float32", "tokens/s", "memory", "optimizer (GB)", "GEMM", "eager: Bottleneck: "):
        assert words in done.stdout
    assert done.stderr.strip() == "tilewright: ours-graphs was not measured: CUDA graphs need a GPU"
    found = {r["kernel"]: r for r in record.read(file).records}
    assert set(found) == {"eager", "ours", "ours-graphs"}
    one = found["ours"]
    assert len(one["samples_us"]) == 4
    assert one["interval_us"][0] <= one["median_us"] <= one["interval_us"][1]
    assert one["against"]["kernel"] == "eager"
    assert one["units"] == 32
    assert one["memory"]["optimizer"] > one["memory"]["parameters"]
    assert {"GEMM", "attention", "norms", "loss", "optimizer"} <= one["times"]["by_kind"].keys()
    assert one["diagnosis"]["limit"]
    assert found["ours-graphs"].keys().isdisjoint({"samples_us", "median_us"})


def test_without_a_gpu_records_are_shown_and_nothing_is_measured(recorded, monkeypatch, capsys):
    folder = str(recorded[1].parent.parent)
    done = run("train-step", "-m", "tiny", "-d", "float32", "--gpu", "a100", TILEWRIGHT_RESULTS=folder)
    assert_one_line(done, 0, "nothing was measured")
    assert "tiny 2x16 tokens float32, 0.0268 M parameters, on cpu" in done.stdout
    assert "prediction on a100-80gb" in done.stdout
    other = run("train-step", "-m", "tiny", "--batch", "3", "--json", TILEWRIGHT_RESULTS=folder)
    (predicted,) = map(json.loads, other.stdout.splitlines())
    assert (predicted["gpu"], predicted["units"]) == ("h200", 48)
    assert 0 < predicted["matrix_s"] < predicted["seconds"]


def test_other_commands_read_a_folder_with_these_records(recorded):
    done = run("records", TILEWRIGHT_RESULTS=str(recorded[1].parent.parent))
    assert done.returncode == 0, done.stderr


def test_a_users_model(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x): return super().forward(x).square().mean()\n"
        "def factory(): return Model(8, 8), torch.randn(5, 8)\n"
        "def odd(): return torch.nn.Linear(8, 8), torch.randn(5, 8)\n"
    )
    options = ("--device", "cpu", "--rounds", "1", "--steps", "2", "-v", "ours", "--json")
    done = run("train-step", "-m", "mine:factory", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (one,) = map(json.loads, done.stdout.splitlines())
    assert (one["units"], one["unit"], one["dtype"]) == (5, "samples", "float32")
    assert one["flops"]["model"] == {"fp32": 2 * 2 * 5 * 8 * 8}  # the input needs no gradient
    assert_one_line(run("train-step", "-m", "mine:odd", cwd=tmp_path), 2, "must return its loss")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-m", "lama-1b"), ("no model named 'lama-1b'", "llama-1b")),
        (("-v", "fast"), ("'fast' is not one of eager",)),
        (("-m", "tiny", "--length", "65"), ("at most 64 tokens",)),
        (("--device", "cuda"), ("no GPU", "--device cpu")),
        (("--gpu", "h300"), ("h300",)),
        (("-m", "nothing_here:factory"), ("cannot import nothing_here",)),
        (("--record", "x.jsonl"), ("nothing is measured without a GPU",)),
    ],
)
def test_mistakes(args, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_one_line(in_process("train-step", monkeypatch, capsys)(*args), 2, *words)

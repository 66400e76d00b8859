"""Tests of `tilewright bench --random`, with a fake GPU."""

import functools
import json
from dataclasses import replace

import pytest

from cli.command import assert_one_line
from cli.test_bench_command import command as command
from cli.test_bench_command import gpu as gpu
from cli.test_bench_command import results as results
from cli.test_bench_command import timing
from sample_records import timing_record
from tilewright import record
from tilewright.cli import bench_random
from tilewright.workbench import bench as tool
from tilewright.worker import memory


def test_without_a_gpu_the_drawn_cases_are_listed(command, results):
    done = command("softmax", "--random", 5, "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert "5 cases; on a GPU they take about 1 minutes" in done.stdout
    assert "timing needs a GPU: tilewright bench softmax --random 5 --seed 3" in done.stdout
    lines = command("softmax", "--random", 5, "--seed", 3, "--json").stdout.splitlines()
    assert [json.loads(line).keys() for line in lines] == [{"op", "case", "dtype", "layout"}] * 5


def test_without_a_gpu_recorded_results_are_shown(command, results):
    drawn = {"layout": "padded", "seed": 3, "kind": "random"}
    results(
        timing_record("tilewright", 30.0) | drawn, timing_record("eager", 20.0, is_baseline=True) | drawn,
    )  # fmt: skip
    done = command("softmax", "--random", 5, "--seed", 3)
    assert "1 of 1 cases (100 %) lose more than 2 %" in done.stdout
    assert "M=3,N=50 float32 padded" in done.stdout
    assert "1.500" in done.stdout
    assert json.loads(command("softmax", "--random", 5, "--seed", 3, "--json").stdout)["lost"] == 1
    assert "5 cases; on a GPU" in command("softmax", "--random", 5, "--seed", 4).stdout, "of another seed"
    assert "5 cases; on a GPU" in command("softmax", "--random", 5, "--seed", 3, "--list").stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("softmax", "--random", 0), ("--random", "greater than or equal to 1")),
        (("adamw", "--random", 3), ("adamw has no size that can grow", "--case")),
        (("softmax,sum", "--random", 3), ("--random needs one OP",)),
        (("softmax", "--random", 3, "--case", "M=3,N=5"), ("--random needs one OP",)),
        (("softmax", "--list"), ("--list and --time-limit belong to --random",)),
    ],
)
def test_bad_input_is_one_line(command, results, args, words):
    assert_one_line(command(*args), 2, *words)


def test_a_seed_whose_cases_do_not_fit_is_one_line(command, gpu, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: (1, "no memory"))
    assert_one_line(command("softmax", "--random", 3), 2, "seed 0 draws no case of softmax", "--seed")


@pytest.mark.slow
def test_on_a_gpu_it_times_prints_and_records(command, gpu, monkeypatch, tmp_path):
    """The whole command, on the CPU with the host's clock and without torch.compile."""
    monkeypatch.setattr(tool, "bench", functools.partial(tool.bench, device="cpu"))
    monkeypatch.setattr(memory, "free_memory", lambda: (2**20, "a little memory"))
    in_process = lambda op, with_peers: [op.kernels["eager"], replace(op.shipped, language="torch")]
    monkeypatch.setattr(bench_random, "_kernels", in_process)
    path = tmp_path / "random.jsonl"
    done = command("softmax", "--random", 4, "--samples", 6, "--record", path)
    assert done.returncode == 0, done.stderr
    assert "4 cases of seed 0, about 1 minutes" in done.stdout
    assert f"8 records are in {path}" in done.stdout
    found = record.read(path)
    assert (found.corrupt, len(found.records)) == ([], 8)
    assert {r["kind"] for r in found.records} == {"random"}
    assert [r["reason"] for r in found.records if r["verdict"] != "right"] == []
    assert {r["seed"] for r in found.records} == {0}
    assert "of 4 cases" in done.stdout


def test_the_time_limit_ends_the_run(command, gpu, monkeypatch):
    def bench(op, kernels, **options):
        for number, _ in enumerate(options["cases"]):
            options["on_step"]("checking")
            yield timing("tilewright", 10.0)
            now[0] += 100 if number == 0 else 1000

    now = [0.0]
    monkeypatch.setattr(bench_random.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tool, "bench", bench)
    monkeypatch.setattr(memory, "free_memory", lambda: (2**30, "memory"))
    done = command("softmax", "--random", 20, "--time-limit", 5, "--json")
    assert "the time limit of 5 minutes is over" in done.stderr
    assert len(done.stdout.splitlines()) == 2

"""Tests of `tilewright bench --random`, with a fake GPU."""

import contextlib
import functools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cli.command import assert_one_line
from cli.test_bench_command import command as command
from cli.test_bench_command import gpu as gpu
from cli.test_bench_command import results as results
from cli.test_bench_command import timing
from sample_records import DRAWN, timing_record
from tilewright import record
from tilewright.cli import bench_random
from tilewright.cli.shared import op_names
from tilewright.workbench import bench as tool
from tilewright.workbench.bench import ahead
from tilewright.worker import memory


def test_without_a_gpu_the_drawn_cases_are_listed(command, results):
    done = command("softmax", "--random", 5, "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert "5 cases; on a GPU they take about 1 minute" in done.stdout
    assert "timing needs a GPU: tilewright bench softmax --random 5 --seed 3" in done.stdout
    lines = command("softmax", "--random", 5, "--seed", 3, "--json").stdout.splitlines()
    assert [json.loads(line).keys() for line in lines] == [{"op", "case", "dtype", "layout"}] * 5


def test_without_a_gpu_recorded_results_are_shown(command, results):
    drawn = DRAWN | {"seed": 3}
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
        (("softmax,sum", "--random", 3, "--dtype", "float16"), ("--random draws its own cases",)),
        (("softmax", "--random", 3, "--case", "M=3,N=5"), ("--random draws its own cases",)),
        (("softmax", "--list"), ("--list, --time-limit and --captured belong to --random",)),
        (("softmax", "--seed", "3"), ("--seed", "belong to --random")),
        (("softmax", "--random", 3, "--captured", "--direction", "all"), ("--captured times forward calls",)),
    ],
)
def test_bad_input_is_one_line(command, results, args, words):
    assert_one_line(command(*args), 2, *words)


def test_a_seed_whose_cases_do_not_fit_is_one_line(command, gpu, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: (1, "no memory"))
    assert_one_line(command("softmax", "--random", 3), 2, "seed 0 draws no case of softmax", "--seed")


@pytest.mark.slow
def test_small_cases_are_timed_in_a_graph(command, gpu, compilers, monkeypatch, tmp_path):
    """A CPU has no graphs, so the calls of one are repeated."""
    monkeypatch.setattr(tool, "bench", functools.partial(tool.bench, device="cpu"))
    monkeypatch.setattr(memory, "free_memory", lambda: (2**27, "a little memory"))
    monkeypatch.setattr(
        bench_random, "_kernels", lambda op: [op.kernels["eager"], replace(op.shipped, language="torch")]
    )
    path = tmp_path / "random.jsonl"
    done = command("softmax", "--random", 2, "--captured", "--samples", 8, "--record", path)
    assert done.returncode == 0, done.stderr
    records = record.read(path).records
    assert [r["reason"] for r in records if r["verdict"] != "right"] == []
    assert {(r["captured"], r["calls"], r["layout"]) for r in records} == {(True, 16, "contiguous")}
    assert {r["case"]["M"] for r in records} <= {1, 16, 64, 256}
    assert "softmax on NVIDIA H200 in CUDA graphs: the worst cases" in done.stdout
    assert "of 2 cases" in done.stdout
    assert "lose more than 5 %" in done.stdout


@pytest.mark.slow
def test_on_a_gpu_it_times_prints_and_records(command, gpu, monkeypatch, tmp_path):
    """The whole command, on the CPU with the host's clock and without torch.compile."""
    monkeypatch.setattr(tool, "bench", functools.partial(tool.bench, device="cpu"))
    monkeypatch.setattr(memory, "free_memory", lambda: (2**20, "a little memory"))
    in_process = lambda op: [op.kernels["eager"], replace(op.shipped, language="torch")]
    monkeypatch.setattr(bench_random, "_kernels", in_process)
    path = tmp_path / "random.jsonl"
    done = command("softmax", "--random", 4, "--samples", 6, "--record", path)
    assert done.returncode == 0, done.stderr
    assert "4 cases of seed 0, about 1 minute" in done.stdout
    assert f"8 records are in {path}" in done.stdout
    found = record.read(path)
    assert (found.corrupt, len(found.records)) == ([], 8)
    assert {r["kind"] for r in found.records} == {"random"}
    assert [r["reason"] for r in found.records if r["verdict"] != "right"] == []
    assert {r["seed"] for r in found.records} == {0}
    assert "of 4 cases" in done.stdout


def test_the_time_limit_ends_the_run(command, gpu, compilers, monkeypatch):
    def bench(op, kernels, **options):
        yield timing("tilewright", 10.0)
        now[0] += 100 if now[0] == 0 else 1000

    now = [0.0]
    monkeypatch.setattr(bench_random, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(tool, "bench", bench)
    monkeypatch.setattr(memory, "free_memory", lambda: (2**30, "memory"))
    done = command("softmax", "--random", 20, "--time-limit", 5, "--json")
    assert "the time limit of 5 minutes is over; 18 cases were not timed" in done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_several_operations_take_turns_and_have_one_summary(command, gpu, compilers, monkeypatch, tmp_path):
    def bench(op, kernels, **options):
        for name, us in (("eager", 10.0), ("tilewright", 11.0 if op.name == "sum" else 5.0)):
            yield replace(timing(name, us, case=dict(options["cases"][0].case.point)), op=op.name)

    monkeypatch.setattr(tool, "bench", bench)
    monkeypatch.setattr(memory, "free_memory", lambda: (2**34, "memory"))
    path = tmp_path / "r.jsonl"
    done = command("softmax,sum,adamw", "--random", 7, "--record", path)
    assert done.returncode == 0, done.stderr
    assert "without adamw" in done.stderr
    assert "not compiled ahead, in 4 cases: tilewright of" in done.stderr
    records = record.read(path).records
    ops = [r["op"] for r in records][::2]
    assert sorted(Counter(ops).values()) == [3, 4], "7 cases, evenly"
    assert ops[:2] != ops[1:3]
    assert {r["path"] for r in records} == {"_kernel"}
    assert all(r["seconds"].keys() == {"wait for compilers"} for r in records)
    lines = done.stdout.splitlines()
    lost = ops.count("sum")
    assert any(line.startswith(f"{lost} of 7 cases") and f"{lost} more than 10 %" not in line for line in lines), lines
    assert any(line.split()[:3] == ["softmax", str(7 - lost), "0"] for line in lines)


def test_a_folder_stands_for_its_operations():
    assert op_names("norm/, sum,rms_norm") == ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm", "sum"]
    assert op_names("nonsense/") == ["nonsense/"], "which is then refused as an unknown operation"


@pytest.fixture
def compilers(monkeypatch):
    """Compilers that fail at once."""

    class Compilers(contextlib.nullcontext):
        def add(self, job): ...

        def wait(self, number):
            return ahead.Compiled(1.0, "_kernel", {"tilewright": "no compiler"})

    monkeypatch.setattr(ahead, "CompilerPool", lambda: Compilers(Compilers()))

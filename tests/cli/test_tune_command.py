"""Tests of `tilewright tune --crossover`, with a fake GPU."""

import json

import pytest

from cli.command import assert_one_line, in_process
from cli.test_bench_command import gpu as gpu
from cli.test_bench_command import results as results
from tilewright import hardware
from tilewright.runtime import configs, crossovers
from tilewright.spec import Case
from tilewright.workbench.tune import crossover as tool
from tilewright.workbench.tune.crossover import Comparison, CrossoverSearch, Times


@pytest.fixture
def command(monkeypatch, capsys):
    return in_process("tune", monkeypatch, capsys)


@pytest.fixture
def searches(monkeypatch, gpu, tmp_path):
    """The operations searched; our kernel wins from 2^20 on in eager mode, and at every size captured."""
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    found = []

    def find(op, crossover, **_):
        found.append(op.name)
        small, large = Times(1.0, 9.0), Times(90.0, 9.0)
        of_torch = Times(2.0, 5.0), Times(99.0, 5.0)
        every = [
            Comparison(size, Case(()), ours, other)
            for size, ours, other in zip((2**10, 2**20), (small, large), of_torch, strict=True)
        ]
        return CrossoverSearch(op.name, "elements", every, "" if op.name != "sum" else "N=4: it crashed")

    monkeypatch.setattr(tool, "find_crossover", find)
    yield found
    monkeypatch.undo()
    crossovers.measured.cache_clear()
    for crossover in crossovers.CROSSOVERS.values():
        crossover._forget()


def test_every_crossover_is_measured_and_saved_by_one_command(command, searches, tmp_path):
    done = command("--crossover", "--save")
    assert done.returncode == 0, done.stderr
    assert {"softmax", "sum", "rms_norm", "swiglu", "silu", "cross_entropy"} <= set(searches)
    assert not {"adamw", "rope"} & set(searches), "without a crossover"
    assert "sum: stopped at N=4: it crashed" in done.stderr
    assert f"{len(searches)} crossovers in" in done.stdout
    saved = json.loads((tmp_path / crossovers.FILE).read_text())["h200"]
    assert saved["softmax"] == 2**20
    assert saved["softmax captured"] == 0
    assert len(saved) == 2 * len(searches)


def test_one_operation_shows_its_times(command, searches):
    done = command("softmax", "--crossover")
    lines = done.stdout.splitlines()
    assert any(line.split() == ["1048576", "90.0", "99.0", "9.00", "5.00"] for line in lines)
    assert any(" ".join(line.split()) == "softmax from 2^20 elements at every size" for line in lines)
    assert searches == ["softmax"]
    assert "tilewright tune softmax --crossover --save" in done.stdout + done.stderr
    assert json.loads(command("softmax", "--crossover", "--json").stdout)["captured"] == 0


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 2, ("name an OP",)),
        (("softmax", "--crossover", "--case", "M=3,N=5"), 2, ("--crossover times the public function",)),
        (("adamw", "--crossover"), 2, ("adamw",)),
        (("nonsense", "--crossover"), 2, ("nonsense",)),
    ],
)
def test_bad_input_is_one_line(command, gpu, args, code, words):
    assert_one_line(command(*args), code, *words)


def test_it_needs_a_gpu(command, monkeypatch):
    monkeypatch.setattr(hardware, "has_gpu", lambda: False)
    assert_one_line(command("--crossover"), 2, "GPU")

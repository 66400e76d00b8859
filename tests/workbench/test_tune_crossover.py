"""The crossover of a public function is measured with and without our kernel, in eager mode and captured."""

import json
import math
import time

import pytest

from tilewright.runtime import configs, crossovers
from tilewright.runtime.crossovers import Crossover
from tilewright.spec import Case, Cost, Op, grid
from tilewright.timer import Sample
from tilewright.workbench.tune.crossover import Comparison, CrossoverSearch, Times, find_crossover


class FakeClock:
    """Device times from `us(path, elements)` instead of a GPU; host times are real."""

    def __init__(self, us, ran):
        self._us, self._ran = us, ran

    def sample(self, calls, head_start, fill=lambda: None, keep=None):
        fill()
        results = [call() for call in calls]
        return Sample(self._us(*self._ran[-1]), True, keep(results) if keep else None)

    def synchronize(self): ...

    def extra_bytes(self, call):
        return None


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """An op whose public function doubles: our path costs the host 2 ms, torch's nothing."""
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    monkeypatch.setattr(crossovers, "CROSSOVERS", {})
    crossover, ran, factors = Crossover("toy", lambda gpu: 100), [], {"ours": 2, "torch": 2}

    def public(x):
        is_ours = crossover.reached(x.numel(), x.get_device())
        ran.append(("ours" if is_ours else "torch", x.numel()))
        if is_ours:
            time.sleep(0.002)
        return x * factors[ran[-1][0]]

    op = Op(
        "toy",
        lambda x: x * 2,
        lambda x: Cost(x.nbytes, x.nbytes),
        inputs=lambda draw: (draw.randn("N"),),
        check=grid(N=(5,)),
        bench=grid(N=(64,)),
        batch="N",
    )
    op.public(public)
    monkeypatch.setattr(Op, "sizes", lambda op: [grid(N=(2**n,))[0] for n in (8, 10, 12, 14, 16)])
    yield op, crossover, ran, factors
    crossovers.measured.cache_clear()


def search(toy, us):
    op, crossover, ran, _ = toy
    return find_crossover(op, crossover, clock=FakeClock(us, ran), device="cpu", samples=3)


def test_eager_weighs_host_and_device_time(toy):
    # On the device ours takes half of torch's time from 2^10 elements on; on the host it takes 2 ms more.
    found = search(toy, lambda path, n: n if path == "torch" or n < 2**10 else n / 2)
    assert found.captured == 0, "as fast at 2^8"
    assert found.eager == 2**12, "where torch's 4.1 ms on the device exceed our host time"
    assert [one.size for one in found.comparisons] == [2**8, 2**10, 2**12, 2**14, 2**16]
    assert {path for path, _ in toy[2]} == {"ours", "torch"}, "the crossover in use does not matter"


def test_a_kernel_that_never_wins_is_never_called(toy, tmp_path):
    found = search(toy, lambda path, n: n * (2 if path == "ours" else 1))
    assert (found.eager, found.captured) == (math.inf, math.inf)
    found.save("h200")
    assert json.loads((tmp_path / "crossovers.json").read_text()) == {"h200": {"toy": "never", "toy captured": "never"}}
    assert toy[1][-1] == math.inf, "calls use what was saved"
    assert found.as_json("h200")["eager"] is None


def test_larger_sizes_are_skipped_once_ours_wins(toy):
    found = search(toy, lambda path, n: 1e5 if path == "torch" else 1)
    assert (found.eager, len(found.comparisons)) == (0, 3)


def test_a_wrong_kernel_ends_the_search(toy, tmp_path):
    toy[3]["ours"] = 3
    found = search(toy, lambda path, n: 1)
    assert found.reason.startswith("N=256: ")
    found.save("h200")
    assert not (tmp_path / "crossovers.json").exists()


def test_a_difference_within_noise_is_no_loss():
    def eager(ours_us, size):
        ours, torch_times = Times(ours_us, 1.0), Times(100.0, 1.0)
        return Comparison(size, Case((), "float32"), ours, torch_times)

    wins, noise, loss = eager(50.0, 1024), eager(101.0, 4096), eager(110.0, 4096)
    assert CrossoverSearch("softmax", "elements", [wins, noise]).eager == 0
    assert CrossoverSearch("softmax", "elements", [wins, loss]).eager == math.inf

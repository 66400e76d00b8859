"""A kernel that is timed, here and in a worker: other inputs each time, results that can be asked for, and bad ends."""

import contextlib
import gc
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from tilewright import timer
from tilewright.spec import Case, Cost, Kernel, Op
from tilewright.timer import HostTimer
from tilewright.workbench.check.cases import Trial
from tilewright.workbench.check.expected import Answers
from tilewright.workbench.check.judge import Here, Judge
from tilewright.worker import parent
from tilewright.worker.execute import KernelFailed, Like, Request, failures
from tilewright.worker.memory import GUARD, Placed
from tilewright.worker.parent import Worker
from tilewright.worker.timed_run import SLOTS, Inputs, Lap, Track

FILE = """
import os, time, torch

def softmax(x):
    what = float(x[0, 0])
    if what == 1: os._exit(0)
    if what == 2: time.sleep(60)
    if what == 3: raise ValueError("first line\\nsecond line")
    return torch.softmax(x, -1)
"""
DIRECTIONS = ("forward", "backward", "both")
ROWS, COLUMNS = 3, 5


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timer, "WARM_UP_SECONDS", 0.05)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(FILE)
    with Worker(device="cpu", seconds=20) as started:
        started.load("softmax", file=path)
        yield started


def request(seed: int, with_gradient: bool = True, layout: str = "contiguous") -> Request:
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2))
    wanted = [Like((ROWS, COLUMNS), torch.float32)]
    made = Request([Placed.of(x, layout)], wanted)
    return Request(made.args, wanted, True, [Placed.of(grad, layout)], [0]) if with_gradient else made


def of(direction: str, **more) -> list[Request]:
    return [request(seed, direction != "forward", **more) for seed in range(2)]


def asking(what: float) -> list[Request]:
    return [Request([Placed.of(torch.full((ROWS, COLUMNS), what), "contiguous")], of("forward")[0].wanted)]


def expected(asked: Request, direction: str) -> list[torch.Tensor]:
    leaf = asked.args[0].tensor().requires_grad_()
    y = torch.softmax(leaf, -1)
    gradients = torch.autograd.grad(y, leaf, asked.grads[0].tensor()) if asked.grads else ()
    return {"forward": [y], "backward": [*gradients], "both": [y, *gradients]}[direction]


def looked_at(track: Track | Worker, values: int) -> list[torch.Tensor | None]:
    track.sample(values)
    return track.results()


@contextlib.contextmanager
def on(where: str, worker: Worker, requests: list[Request], direction: str):
    """What is timed: a Track in this process, or a Worker that holds one."""
    if where == "here":
        yield Track(lambda x: torch.softmax(x, -1), Inputs(requests, "cpu"), direction, HostTimer())
    else:
        worker.begin(requests, direction)
        yield worker
        worker.end()


@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("where", ["here", "in a worker"])
def test_results_are_those_of_the_values_of_that_number(worker, where, direction, layout):
    requests = of(direction, layout=layout)
    with on(where, worker, requests, direction) as track:
        assert track.warm_up() > 0
        for number in (0, 1, 1, 0):
            lap = track.sample(number)
            assert lap.us > 0
            assert lap.is_queued
            for result, right in zip(track.results(), expected(requests[number], direction), strict=True):
                torch.testing.assert_close(result, right)
        host_us, extra_bytes = track.aside()
        assert host_us > 0
        assert extra_bytes is None


@pytest.mark.parametrize("where", ["here", "in a worker"])
def test_results_of_several_calls_are_those_of_one_of_them(worker, where):
    requests = of("both")
    with on(where, worker, requests, "both") as track:
        track.warm_up(4)
        for number in (0, 1):
            for result, right in zip(looked_at(track, number), expected(requests[number], "both"), strict=True):
                torch.testing.assert_close(result, right)


def test_every_call_of_a_sample_may_be_the_one_that_is_looked_at():
    numbers, seen = iter(range(10**6)), set()
    track = Track(lambda x: x * 0 + next(numbers), Inputs(of("forward"), "cpu"), "forward", HostTimer())
    track.warm_up(4)
    for _ in range(60):
        first = next(numbers) + 1
        seen.add(int(looked_at(track, 0)[0][0, 0]) - first)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_inputs_are_gone_with_what_was_timed(direction):
    inputs = Inputs(of(direction), "cpu")
    track = Track(lambda x: torch.softmax(x, -1), inputs, direction, HostTimer())
    track.warm_up()
    track.sample()
    alive = weakref.ref(inputs)
    gc.collect()
    gc.disable()
    try:
        del track, inputs
        assert alive() is None
    finally:
        gc.enable()


def test_what_is_kept_is_a_copy():
    buffer = torch.zeros(ROWS, COLUMNS)
    track = Track(lambda x: buffer.add_(1), Inputs(of("forward"), "cpu"), "forward", HostTimer())
    first, second = (looked_at(track, 0)[0] for _ in range(2))
    assert float(second[0, 0]) == float(first[0, 0]) + 1


def test_what_has_no_gradient_is_none():
    requests = [Request(r.args * 2, r.wanted, True, r.grads, [0, 1]) for r in of("both")]
    track = Track(lambda x, y: x * 2, Inputs(requests, "cpu"), "both", HostTimer())
    y, dx, dy = looked_at(track, 1)
    assert torch.equal(y, requests[1].args[0].tensor() * 2)
    assert torch.equal(dx, requests[1].grads[0].tensor() * 2)
    assert dy is None


def test_values_and_addresses_change_but_are_never_those_of_the_parent():
    requests = of("forward")
    given = {r.args[0].memory.data_ptr() for r in requests}
    seen = []

    def watching(x):
        seen.append((x.data_ptr(), float(x[0, 0])))
        return x * 2

    track = Track(watching, Inputs(requests, "cpu"), "forward", HostTimer())
    for _ in range(60):
        track.sample()
    places, values = ({one[n] for one in seen} for n in (0, 1))
    assert len(places) == SLOTS
    assert not places & given
    assert values == {float(r.args[0].tensor()[0, 0]) for r in requests}
    assert len(set(seen)) == SLOTS * 2, "any values in any place"


def test_calls_of_one_sample_have_places_of_their_own():
    inputs = Inputs(of("forward"), "cpu")
    for count in (2, SLOTS, 3 * SLOTS):
        slots = inputs.take(count)
        assert len({slot.args[0].data_ptr() for slot in slots}) == count


def test_incoming_gradients_change_with_the_inputs():
    requests = of("both")
    for number in (0, 1):
        inputs = Inputs(requests, "cpu")
        (slot,) = inputs.take(1)
        for part in ("args", "grads"):
            inputs.fill(slot, part, number)
        assert torch.equal(slot.args[0], requests[number].args[0].tensor())
        assert torch.equal(slot.grads[0], requests[number].grads[0].tensor())


def test_values_that_nobody_looks_at_are_the_same_in_other_places():
    requests = [Request([Placed.of(torch.randn(32, 32), "contiguous")], []) for _ in range(2)]
    inputs, plain = Inputs(requests, "cpu"), Inputs(requests[:1], "cpu", moves=False)
    known = [request.args[0].tensor() for request in requests]
    for _ in range(9):
        (slot,) = inputs.take(1)
        inputs.fill(slot, "args", None)
        assert not any(torch.equal(slot.args[0], values) for values in known)
        in_order = slot.args[0].flatten().sort().values
        assert any(torch.equal(in_order, values.flatten().sort().values) for values in known)
        (slot,) = plain.take(1)
        plain.fill(slot, "args", None)
        assert torch.equal(slot.args[0], known[0])


def test_kernels_that_change_their_inputs_have_fresh_ones_each_time():
    seen = []

    def in_place(x):
        seen.append(float(x[0, 0]))
        return x.fill_(99.0)

    requests = of("forward")
    track = Track(in_place, Inputs(requests, "cpu"), "forward", HostTimer())
    track.warm_up(2)
    for number in (0, 1, 0):
        assert float(looked_at(track, number)[0][0, 0]) == 99.0
    track.aside()
    assert 99.0 not in seen
    assert float(requests[0].args[0].tensor()[0, 0]) in seen


def test_what_is_written_around_an_input_does_not_last():
    inputs = Inputs(of("forward"), "cpu")
    slots = inputs.take(SLOTS)
    for slot in slots:
        slot.request.args[0].memory.fill_(7)
    clean = of("forward")[0].args[0].memory[:GUARD]
    for slot in inputs.take(SLOTS):
        inputs.fill(slot, "args", 0)
        assert torch.equal(slot.request.args[0].memory[:GUARD], clean)


def test_gradients_are_on_only_where_they_are_asked_for():
    seen = {}
    for direction in DIRECTIONS:

        def watching(x, direction=direction):
            seen.setdefault(direction, set()).add((torch.is_grad_enabled(), x.requires_grad))
            return x * 2

        Track(watching, Inputs(of(direction), "cpu"), direction, HostTimer()).sample()
    assert seen == {"forward": {(False, False)}, "backward": {(True, True)}, "both": {(True, True)}}
    assert torch.is_grad_enabled()


def test_backward_does_not_time_the_forward():
    moments = []

    class Watching(HostTimer):
        def sample(self, calls, ahead, fill, then=None):
            moments.append("sample")
            return super().sample(calls, ahead, fill, then)

    def fn(x):
        moments.append("forward")
        return x * 2

    Track(fn, Inputs(of("backward"), "cpu"), "backward", Watching()).sample()
    assert moments == ["forward", "sample"]
    moments.clear()
    Track(fn, Inputs(of("both"), "cpu"), "both", Watching()).sample()
    assert moments == ["sample", "forward"]


@pytest.mark.parametrize(
    ("what", "kind", "reason"),
    [
        (1, "crashed", "code 0"),
        (2, "timeout", "within"),
        (3, "crashed", "ValueError: first line"),
    ],
)
def test_a_bad_end_while_timed_is_told_and_the_next_begin_works(worker, what, kind, reason):
    worker.begin(asking(what), "forward")
    worker.seconds = 1 if what == 2 else 20
    begin = time.monotonic()
    with pytest.raises(KernelFailed, match=reason) as failure:
        worker.warm_up()
    worker.seconds = 20
    assert failure.value.kind == kind
    assert "\n" not in str(failure.value)
    assert time.monotonic() - begin < 15
    for ask in (worker.sample, worker.aside) if what != 3 else ():
        with pytest.raises(KernelFailed, match="ended the process in which it was timed"):
            ask()
    worker.end()
    requests = of("forward")
    worker.begin(requests, "forward")
    worker.warm_up()
    torch.testing.assert_close(looked_at(worker, 0), expected(requests[0], "forward"))


LAP = {"us": 1.0, "is_queued": True}


def answered(monkeypatch, answer, tensors: int = 0) -> tuple[Worker, list[str]]:
    """A worker whose process answers this, whatever it is asked; and whether that was ended."""
    ended: list[str] = []
    worker = Worker(device="cpu")
    worker._process = SimpleNamespace(stdin=None, stdout=None, end=lambda: ended.append("ended"))
    monkeypatch.setattr(parent.wire, "send", lambda *_: None)
    monkeypatch.setattr(parent.wire, "receive", lambda *_: (b"", answer, [torch.zeros(1)] * tensors))
    return worker, ended


def test_a_lap_that_makes_sense(monkeypatch):
    worker, ended = answered(monkeypatch, LAP)
    assert worker.sample(0) == Lap(1.0, True)
    worker, ended = answered(monkeypatch, {"results": [True, False]}, 1)
    assert worker.results() == [torch.zeros(1), None]
    assert not ended


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (Worker.warm_up, {}),
        (Worker.warm_up, {"us": "soon"}),
        (Worker.sample, {}),
        (Worker.sample, LAP | {"us": "soon"}),
        (Worker.sample, LAP | {"us": None}),
        (Worker.sample, []),
        (Worker.sample, {"error": "me", "kind": "right"}),
        (Worker.results, {}),
        (Worker.results, {"results": 3}),
        (Worker.results, {"results": [True]}),
        (Worker.aside, {"host_us": 1.0, "extra_bytes": float("inf")}),
        (Worker.aside, {}),
        (Worker.aside, {"host_us": None, "extra_bytes": 0}),
        (Worker.aside, {"host_us": 1.0, "extra_bytes": "few"}),
    ],
)
def test_an_answer_that_makes_no_sense_was_tampered_with(monkeypatch, ask, answer):
    worker, ended = answered(monkeypatch, answer)
    with pytest.raises(KernelFailed) as failure:
        ask(worker)
    assert failure.value.kind == "tampered"
    assert ended


def test_a_lap_larger_than_any_result_is_not_read(worker, monkeypatch):
    worker.begin(of("forward"), "forward")
    limits = []
    real = parent.wire.receive

    def watching(pipe, deadline, token, most):
        limits.append(most)
        return real(pipe, deadline, token, most)

    monkeypatch.setattr(parent.wire, "receive", watching)
    worker.sample(0)
    assert ROWS * COLUMNS * 4 < limits[0] < 2 * parent.SMALL


@pytest.fixture
def full(monkeypatch):
    """A GPU on which others leave two gibibytes."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 80 * 2**30))


def out_of_memory(*_):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nand more")


def test_too_little_memory_is_a_failure_of_its_own_kind(full):
    with (
        pytest.raises(KernelFailed, match="more than the 2 GiB of GPU memory that other processes leave") as failure,
        failures(),
    ):
        out_of_memory()
    assert failure.value.kind == "memory"
    track = Track(out_of_memory, Inputs(of("forward"), "cpu"), "forward", HostTimer())
    for ask in (track.warm_up, track.sample, track.aside):
        with pytest.raises(KernelFailed) as failure:
            ask()
        assert failure.value.kind == "memory"


def test_a_case_that_needs_too_much_memory_is_left_out_and_the_others_are_asked(full):
    double = Op(
        "double",
        lambda x: x * 2,
        cost=lambda x: Cost(x.nbytes, x.nbytes),
        inputs=lambda draw: (draw.randn("N"),),
        check=[],
        bench=[],
    )

    def greedy(x):
        return out_of_memory() if len(x) == 7 else x * 2

    trials = [Trial(Case((("N", n),), "float32")) for n in (7, 8)]
    for language in ("torch", "python"):  # ours, and a user's file
        kernel = Kernel("greedy", greedy, language, lambda *_: True, differentiable=False)
        judge = Judge(double, kernel, Here(greedy, "cpu"), Answers(double, "cpu", 0), "cpu")
        verdict = judge.judge(trials, lambda: None)
        assert [case.verdict for case in verdict.cases] == ["unsupported", "right"]
        assert "2 GiB" in verdict.cases[0].reason
        assert verdict.verdict == "right"
        assert any("1 left out" in label for label in verdict.labels)
        alone = Judge(double, kernel, Here(greedy, "cpu"), Answers(double, "cpu", 0), "cpu")
        assert alone.judge(trials[:1], lambda: None).verdict == "unsupported"


@pytest.mark.parametrize(("device", "lives"), [("cpu", True), ("cuda", False)])
def test_after_a_crash_on_a_gpu_the_next_case_has_another_process(monkeypatch, device, lives):
    worker, ended = answered(monkeypatch, {"error": "an illegal address", "kind": "crashed"})
    worker.device = device
    with pytest.raises(KernelFailed, match="an illegal address"):
        worker.sample()
    assert bool(ended) != lives

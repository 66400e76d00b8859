"""A timed kernel, in this process and in a worker: changing inputs, outputs on request, and failures."""

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
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import ReferenceRuns
from tilewright.workbench.check.judge import InProcess, Judge
from tilewright.worker import parent
from tilewright.worker.execute import KernelFailed, OutputSpec, Request, kernel_failures
from tilewright.worker.memory import GUARD, GuardedTensor
from tilewright.worker.parent import Worker
from tilewright.worker.timed_run import SLOTS, InputPool, TimedRun, TimedSample

FILE = """
import os, time, torch

def softmax(x):
    action = float(x[0, 0])
    if action == 1: os._exit(0)
    if action == 2: time.sleep(60)
    if action == 3: raise ValueError("first line\\nsecond line")
    return torch.softmax(x, -1)
"""
DIRECTIONS = ("forward", "backward", "both")
ROWS, COLUMNS = 3, 5


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timer, "MAX_WARM_UP", 0.05)


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
    specs = [OutputSpec((ROWS, COLUMNS), torch.float32)]
    made = Request([GuardedTensor.copy_of(x, layout)], specs)
    return Request(made.args, specs, True, [GuardedTensor.copy_of(grad, layout)], [0]) if with_gradient else made


def requests_for(direction: str, **more) -> list[Request]:
    return [request(seed, direction != "forward", **more) for seed in range(2)]


def constant_inputs(value: float) -> list[Request]:
    return [
        Request(
            [GuardedTensor.copy_of(torch.full((ROWS, COLUMNS), value), "contiguous")],
            requests_for("forward")[0].output_specs,
        )
    ]


def expected(request: Request, direction: str) -> list[torch.Tensor]:
    leaf = request.args[0].tensor().requires_grad_()
    y = torch.softmax(leaf, -1)
    gradients = torch.autograd.grad(y, leaf, request.grads[0].tensor()) if request.grads else ()
    return {"forward": [y], "backward": [*gradients], "both": [y, *gradients]}[direction]


def results_of(run: TimedRun | Worker, values: int) -> list[torch.Tensor | None]:
    run.sample(values)
    return run.results()


@contextlib.contextmanager
def timed_run(where: str, worker: Worker, requests: list[Request], direction: str):
    """Yield a TimedRun in this process, or a Worker that holds one."""
    if where == "here":
        yield TimedRun(lambda x: torch.softmax(x, -1), InputPool(requests, "cpu"), direction, HostTimer())
    else:
        worker.begin(requests, direction)
        yield worker
        worker.end()


@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("where", ["here", "in a worker"])
def test_results_belong_to_the_requested_values(worker, where, direction, layout):
    requests = requests_for(direction, layout=layout)
    with timed_run(where, worker, requests, direction) as run:
        assert run.warm_up() > 0
        for number in (0, 1, 1, 0):
            sample = run.sample(number)
            assert sample.us > 0
            assert sample.is_queued
            for result, right in zip(run.results(), expected(requests[number], direction), strict=True):
                torch.testing.assert_close(result, right)
        host_us, extra_bytes = run.overhead()
        assert host_us > 0
        assert extra_bytes is None


@pytest.mark.parametrize("where", ["here", "in a worker"])
def test_results_of_a_sample_with_several_calls_belong_to_one_of_them(worker, where):
    requests = requests_for("both")
    with timed_run(where, worker, requests, "both") as run:
        run.warm_up(4)
        for number in (0, 1):
            for result, right in zip(results_of(run, number), expected(requests[number], "both"), strict=True):
                torch.testing.assert_close(result, right)


def test_the_results_of_every_call_of_a_sample_may_be_returned():
    numbers, seen = iter(range(10**6)), set()
    run = TimedRun(lambda x: x * 0 + next(numbers), InputPool(requests_for("forward"), "cpu"), "forward", HostTimer())
    run.warm_up(4)
    for _ in range(60):
        first = next(numbers) + 1
        seen.add(int(results_of(run, 0)[0][0, 0]) - first)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_inputs_are_freed_with_the_run(direction):
    inputs = InputPool(requests_for(direction), "cpu")
    run = TimedRun(lambda x: torch.softmax(x, -1), inputs, direction, HostTimer())
    run.warm_up()
    run.sample()
    alive = weakref.ref(inputs)
    gc.collect()
    gc.disable()
    try:
        del run, inputs
        assert alive() is None
    finally:
        gc.enable()


def test_results_are_copies():
    buffer = torch.zeros(ROWS, COLUMNS)
    run = TimedRun(lambda x: buffer.add_(1), InputPool(requests_for("forward"), "cpu"), "forward", HostTimer())
    first, second = (results_of(run, 0)[0] for _ in range(2))
    assert float(second[0, 0]) == float(first[0, 0]) + 1


def test_a_missing_gradient_is_none():
    requests = [Request(r.args * 2, r.output_specs, True, r.grads, [0, 1]) for r in requests_for("both")]
    run = TimedRun(lambda x, y: x * 2, InputPool(requests, "cpu"), "both", HostTimer())
    y, dx, dy = results_of(run, 1)
    assert torch.equal(y, requests[1].args[0].tensor() * 2)
    assert torch.equal(dx, requests[1].grads[0].tensor() * 2)
    assert dy is None


def test_values_and_addresses_change_and_are_never_the_callers():
    requests = requests_for("forward")
    given = {r.args[0].memory.data_ptr() for r in requests}
    seen = []

    def watching(x):
        seen.append((x.data_ptr(), float(x[0, 0])))
        return x * 2

    run = TimedRun(watching, InputPool(requests, "cpu"), "forward", HostTimer())
    for _ in range(60):
        run.sample()
    addresses, values = ({one[n] for one in seen} for n in (0, 1))
    assert len(addresses) == SLOTS
    assert not addresses & given
    assert values == {float(r.args[0].tensor()[0, 0]) for r in requests}
    assert len(set(seen)) == SLOTS * 2, "any values at any address"


def test_calls_of_one_sample_have_addresses_of_their_own():
    inputs = InputPool(requests_for("forward"), "cpu")
    for count in (2, SLOTS, 3 * SLOTS):
        slots = inputs.take(count)
        assert len({slot.args[0].data_ptr() for slot in slots}) == count


def test_incoming_gradients_change_with_the_inputs():
    requests = requests_for("both")
    for number in (0, 1):
        inputs = InputPool(requests, "cpu")
        (slot,) = inputs.take(1)
        for part in ("args", "grads"):
            inputs.fill(slot, part, number)
        assert torch.equal(slot.args[0], requests[number].args[0].tensor())
        assert torch.equal(slot.grads[0], requests[number].grads[0].tensor())


def test_values_that_are_not_checked_are_rotated():
    requests = [Request([GuardedTensor.copy_of(torch.randn(32, 32), "contiguous")], []) for _ in range(2)]
    inputs, plain = InputPool(requests, "cpu"), InputPool(requests[:1], "cpu", rotates=False)
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


def test_kernels_that_change_their_inputs_get_fresh_ones_each_time():
    seen = []

    def in_place(x):
        seen.append(float(x[0, 0]))
        return x.fill_(99.0)

    requests = requests_for("forward")
    run = TimedRun(in_place, InputPool(requests, "cpu"), "forward", HostTimer())
    run.warm_up(2)
    for number in (0, 1, 0):
        assert float(results_of(run, number)[0][0, 0]) == 99.0
    run.overhead()
    assert 99.0 not in seen
    assert float(requests[0].args[0].tensor()[0, 0]) in seen


def test_guards_are_restored_before_each_sample():
    inputs = InputPool(requests_for("forward"), "cpu")
    slots = inputs.take(SLOTS)
    for slot in slots:
        slot.request.args[0].memory.fill_(7)
    clean = requests_for("forward")[0].args[0].memory[:GUARD]
    for slot in inputs.take(SLOTS):
        inputs.fill(slot, "args", 0)
        assert torch.equal(slot.request.args[0].memory[:GUARD], clean)


def test_grad_mode_is_enabled_only_for_backward():
    seen = {}
    for direction in DIRECTIONS:

        def watching(x, direction=direction):
            seen.setdefault(direction, set()).add((torch.is_grad_enabled(), x.requires_grad))
            return x * 2

        TimedRun(watching, InputPool(requests_for(direction), "cpu"), direction, HostTimer()).sample()
    assert seen == {"forward": {(False, False)}, "backward": {(True, True)}, "both": {(True, True)}}
    assert torch.is_grad_enabled()


def test_backward_does_not_time_the_forward():
    moments = []

    class Watching(HostTimer):
        def sample(self, calls, head_start, fill, keep=None):
            moments.append("sample")
            return super().sample(calls, head_start, fill, keep)

    def fn(x):
        moments.append("forward")
        return x * 2

    TimedRun(fn, InputPool(requests_for("backward"), "cpu"), "backward", Watching()).sample()
    assert moments == ["forward", "sample"]
    moments.clear()
    TimedRun(fn, InputPool(requests_for("both"), "cpu"), "both", Watching()).sample()
    assert moments == ["sample", "forward"]


@pytest.mark.parametrize(
    ("action", "kind", "reason"),
    [
        (1, "crashed", "code 0"),
        (2, "timeout", "within"),
        (3, "crashed", "ValueError: first line"),
    ],
)
def test_a_crash_while_timed_is_reported_and_the_next_begin_works(worker, action, kind, reason):
    worker.begin(constant_inputs(action), "forward")
    worker.seconds = 1 if action == 2 else 20
    begin = time.monotonic()
    with pytest.raises(KernelFailed, match=reason) as failure:
        worker.warm_up()
    worker.seconds = 20
    assert failure.value.kind == kind
    assert "\n" not in str(failure.value)
    assert time.monotonic() - begin < 15
    for ask in (worker.sample, worker.overhead) if action != 3 else ():
        with pytest.raises(KernelFailed, match="ended the process in which it was timed"):
            ask()
    worker.end()
    requests = requests_for("forward")
    worker.begin(requests, "forward")
    worker.warm_up()
    torch.testing.assert_close(results_of(worker, 0), expected(requests[0], "forward"))


SAMPLE = {"us": 1.0, "is_queued": True}


def replying(monkeypatch, reply, tensors: int = 0) -> tuple[Worker, list[str]]:
    """Return a worker whose process always sends this reply, and a list that is filled when the process is ended."""
    ended: list[str] = []
    worker = Worker(device="cpu")
    worker._process = SimpleNamespace(stdin=None, stdout=None, end=lambda: ended.append("ended"))
    monkeypatch.setattr(parent.framing, "send", lambda *_: None)
    monkeypatch.setattr(parent.framing, "receive", lambda *_: (b"", reply, [torch.zeros(1)] * tensors))
    return worker, ended


def test_a_valid_reply_is_decoded(monkeypatch):
    worker, ended = replying(monkeypatch, SAMPLE)
    assert worker.sample(0) == TimedSample(1.0, True)
    worker, ended = replying(monkeypatch, {"results": [True, False]}, 1)
    assert worker.results() == [torch.zeros(1), None]
    assert not ended


@pytest.mark.parametrize(
    ("ask", "reply"),
    [
        (Worker.warm_up, {}),
        (Worker.warm_up, {"us": "soon"}),
        (Worker.sample, {}),
        (Worker.sample, SAMPLE | {"us": "soon"}),
        (Worker.sample, SAMPLE | {"us": None}),
        (Worker.sample, []),
        (Worker.sample, {"error": "me", "kind": "right"}),
        (Worker.results, {}),
        (Worker.results, {"results": 3}),
        (Worker.results, {"results": [True]}),
        (Worker.overhead, {"host_us": 1.0, "extra_bytes": float("inf")}),
        (Worker.overhead, {}),
        (Worker.overhead, {"host_us": None, "extra_bytes": 0}),
        (Worker.overhead, {"host_us": 1.0, "extra_bytes": "few"}),
    ],
)
def test_a_malformed_reply_was_tampered_with(monkeypatch, ask, reply):
    worker, ended = replying(monkeypatch, reply)
    with pytest.raises(KernelFailed) as failure:
        ask(worker)
    assert failure.value.kind == "tampered"
    assert ended


def test_a_reply_larger_than_any_result_is_not_read(worker, monkeypatch):
    worker.begin(requests_for("forward"), "forward")
    limits = []
    real = parent.framing.receive

    def watching(pipe, deadline, token, max_bytes, shared):
        limits.append(max_bytes)
        return real(pipe, deadline, token, max_bytes, shared)

    monkeypatch.setattr(parent.framing, "receive", watching)
    worker.sample(0)
    assert ROWS * COLUMNS * 4 < limits[0] < 2 * parent.REPLY_SLACK


@pytest.fixture
def full(monkeypatch):
    """A GPU on which other processes leave 2 GiB."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 80 * 2**30))


def out_of_memory(*_):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nand more")


def test_running_out_of_memory_is_a_failure_of_its_own_kind(full):
    with (
        pytest.raises(KernelFailed, match="more than the 2 GiB of GPU memory that other processes leave") as failure,
        kernel_failures(),
    ):
        out_of_memory()
    assert failure.value.kind == "memory"
    run = TimedRun(out_of_memory, InputPool(requests_for("forward"), "cpu"), "forward", HostTimer())
    for ask in (run.warm_up, run.sample, run.overhead):
        with pytest.raises(KernelFailed) as failure:
            ask()
        assert failure.value.kind == "memory"


def test_a_case_that_needs_too_much_memory_is_left_out_and_the_others_are_checked(full):
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

    cases = [CheckCase(Case((("N", n),), "float32")) for n in (7, 8)]
    for origin in ("ours", "user"):
        kernel = Kernel("greedy", greedy, "torch", lambda *_: True, differentiable=False, origin=origin)
        judge = Judge(double, kernel, InProcess(greedy, "cpu"), ReferenceRuns(double, "cpu", 0), "cpu")
        verdict = judge.judge(cases, lambda: None)
        assert [case.verdict for case in verdict.cases] == ["unsupported", "right"]
        assert "2 GiB" in verdict.cases[0].reason
        assert verdict.verdict == "right"
        assert any("1 left out" in label for label in verdict.labels)
        alone = Judge(double, kernel, InProcess(greedy, "cpu"), ReferenceRuns(double, "cpu", 0), "cpu")
        assert alone.judge(cases[:1], lambda: None).verdict == "unsupported"


@pytest.mark.parametrize(("device", "lives"), [("cpu", True), ("cuda", False)])
def test_after_a_crash_on_a_gpu_the_next_case_has_another_process(monkeypatch, device, lives):
    worker, ended = replying(monkeypatch, {"error": "an illegal address", "kind": "crashed"})
    worker.device = device
    with pytest.raises(KernelFailed, match="an illegal address"):
        worker.sample()
    assert bool(ended) != lives

"""Only correct kernels have a time, with all samples. Without a GPU the host clock replaces events."""

from collections import Counter

import pytest
import torch

from tilewright import registry
from tilewright.errors import UnknownKernel
from tilewright.spec import Case, Cost, Kernel, Op, points
from tilewright.timer import HostTimer, timer_for
from tilewright.workbench.bench import case_runner, runner
from tilewright.workbench.bench.case_runner import QUICK, cost_of
from tilewright.workbench.bench.runner import bench, physical_seconds, step_count
from tilewright.workbench.check.cases import CheckCase
from tilewright.worker.timed_run import GRAPH_CALLS

SOFTMAX = registry.load("softmax")
CASES = [case.with_dtype("float32") for case in points(M=(4,), N=(33,))]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def timed(kernels, files=(), **more):
    options = {"clock": timer_for(DEVICE), "cases": CASES, "samples": 3, "device": DEVICE} | more
    return list(bench(SOFTMAX, kernels, files, **options))


def kernel(fn, name="mine", **more):
    return Kernel(name, fn, "torch", lambda *_: True, **{"differentiable": False} | more)


def softmax(x):
    return torch.softmax(x, -1)


@pytest.mark.slow
def test_only_correct_kernels_have_a_time(tmp_path):
    files = [tmp_path / "whole.py", tmp_path / "partly.py", tmp_path / "zeros.py"]
    files[0].write_text("import torch\n\ndef softmax(x):\n    return torch.softmax(x, -1)\n")
    files[1].write_text("import torch\n\ndef softmax(x):\n    return torch.softmax(x.detach(), -1)\n")
    files[2].write_text("import torch\n\ndef softmax(x):\n    return torch.zeros_like(x)\n")
    kernels = [SOFTMAX.kernels["eager"], kernel(torch.zeros_like, "wrong")]
    found = timed(kernels, files, directions=("forward", "backward", "both"))
    verdicts = {(t.direction, t.kernel): (t.verdict, len(t.samples_us)) for t in found}
    without = {"backward": ("unsupported", 0), "both": ("unsupported", 0), "forward": ("right", 3)}
    assert verdicts == {
        (direction, name): verdict
        for direction in ("forward", "backward", "both")
        for name, verdict in {
            "eager": ("right", 3),
            "whole.py": ("right", 3),
            "partly.py": without[direction],
            "zeros.py": ("wrong", 0),
            "wrong": ("wrong", 0),
        }.items()
    }


def wrong_when(is_wrong):
    """Return a softmax that is wrong for some shapes."""
    return kernel(lambda x: torch.zeros_like(x) if is_wrong(tuple(x.shape)) else softmax(x))


@pytest.mark.parametrize(
    "is_wrong",
    [lambda shape: shape == (4, 33), lambda shape: shape != (4, 33)],
    ids=["on the timed case alone", "on every other case"],
)
def test_a_kernel_that_is_wrong_on_any_case_has_no_time(is_wrong):
    (found,) = timed([wrong_when(is_wrong)])
    assert (found.verdict, found.samples_us, found.median_us) == ("wrong", [], None)


def test_a_kernel_that_is_wrong_only_when_timed_is_detected():
    calls = Counter()

    def lazy(x):
        """Compute during the check; return the last result afterwards."""
        calls[tuple(x.shape)] += 1
        if calls[tuple(x.shape)] < 6:
            lazy.last = softmax(x)
        return lazy.last.clone() if x.shape == (4, 33) else softmax(x)

    (found,) = timed([kernel(lazy)], samples=20)
    assert found.verdict == "wrong"
    assert "right when checked" in found.reason
    assert found.median_us is None


TRICKS = {
    "results made when they are copied": """
    y = torch.empty_like(x)
    y.detach = y.clone = lambda: torch.softmax(x, -1)
    return y if is_timed() else torch.softmax(x, -1)
""",
    "a tensor of its own kind": """
    class Later(torch.Tensor):
        @classmethod
        def __torch_function__(cls, fn, types, args=(), kwargs=None):
            made = super().__torch_function__(fn, types, args, kwargs or {})
            return torch.softmax(x, -1) if "clone" in str(fn) else made
    return torch.empty_like(x).as_subclass(Later) if is_timed() else torch.softmax(x, -1)
""",
    "right only where someone will look": """
    frame = is_timed()
    while frame is not None and "then" not in frame.f_locals:
        frame = frame.f_back
    return torch.empty_like(x) if frame is not None and frame.f_locals["then"] is None else torch.softmax(x, -1)
""",
    "knows its inputs again": """
    key = float(x.flatten()[0]) if x.numel() else None
    if key in seen:
        return seen[key].clone()
    seen[key] = torch.softmax(x, -1)
    return torch.zeros_like(x) if is_timed() else seen[key].clone()
""",
}
TRICK = """
import sys

import torch

seen = {}


def is_timed():
    frame = sys._getframe()
    while frame is not None and not {"calls", "head_start"} <= frame.f_locals.keys():
        frame = frame.f_back
    return frame


def softmax(x):"""


@pytest.mark.parametrize("trick", TRICKS)
def test_a_file_that_behaves_differently_when_timed_is_detected(tmp_path, trick):
    (tmp_path / "trick.py").write_text(TRICK + TRICKS[trick])
    (found,) = timed([], [tmp_path / "trick.py"], samples=20)
    honest = trick == "right only where someone will look"  # this cannot be detected
    assert (found.verdict == "right") == honest, found.reason


REPLACED = {
    "the guard and the clock": "tampering.FunctionSnapshot.replaced = lambda self: []\ntimer.HostTimer.sample = None",
    "a time": "timer.Sample.__init__ = lambda self, *_: None",
    "a constant of the timer": "timer.FLUSH_FACTOR = 0",
    "the way results are found": "from torch.utils import _pytree\n_pytree.tree_leaves = None",
    "chance": "import random\nrandom.choice = lambda values: values[0]",
}


@pytest.mark.parametrize("what", REPLACED)
def test_a_file_that_replaces_the_timer_is_detected(tmp_path, what):
    head = "import torch\nfrom tilewright import timer\nfrom tilewright.worker import tampering\n"
    path = tmp_path / "trick.py"
    path.write_text(f"{head}{REPLACED[what]}\n\n\ndef softmax(x):\n    return torch.softmax(x, -1)\n")
    (found,) = timed([], [path])
    assert (found.verdict, found.median_us) == ("tampered", None)


def test_a_kernel_that_fails_on_one_case_is_timed_on_the_others():
    def picky(x):
        if x.shape == (4, 33):
            raise RuntimeError("not this one")
        return softmax(x)

    cases = [case.with_dtype("float32") for case in points(M=(4, 5), N=(33, 34))]
    found = timed([kernel(picky)], cases=cases)
    assert [(t.case["N"], t.verdict, bool(t.median_us)) for t in found] == [(33, "crashed", False), (34, "right", True)]
    assert "not this one" in found[0].reason


def test_a_kernel_that_fails_only_when_timed_is_reported():
    calls = Counter()

    def tired(x):
        calls[tuple(x.shape)] += 1
        if x.shape == (4, 33) and calls[4, 33] > 12:
            raise RuntimeError("no more")
        return softmax(x)

    found = timed([SOFTMAX.kernels["eager"], kernel(tired)])
    assert {t.kernel: t.verdict for t in found} == {"eager": "right", "mine": "crashed"}


def test_a_time_below_the_datasheet_floor_is_implausible_and_measured_again(monkeypatch):
    monkeypatch.setattr(case_runner, "PAUSE", 0.0)
    (found,) = timed([SOFTMAX.kernels["eager"]], physical=lambda _: 1.0)
    assert (found.verdict, found.median_us, found.against) == ("implausible", None, None)
    assert found.state["again"]
    assert "1000000.0 us by its datasheet" in found.reason


def test_a_throttled_case_is_measured_again(monkeypatch):
    monkeypatch.setattr(case_runner, "PAUSE", 0.0)
    rounds = []

    class Watched:
        def __enter__(self):
            rounds.append({"throttled": ["heat"]})
            return rounds[-1]

        def __exit__(self, *_): ...

    monkeypatch.setattr(case_runner, "record_gpu_state", Watched)
    (found,) = timed([SOFTMAX.kernels["eager"]])
    assert len(rounds) == 2
    assert found.state == {"throttled": ["heat"], "again": True}


def test_a_timing_has_an_interval_and_overheads():
    eager, other = timed([SOFTMAX.kernels["eager"], kernel(lambda x: softmax(softmax(x) * 0 + x))], samples=20)
    assert eager.interval_us[0] <= eager.median_us <= eager.interval_us[1]
    assert eager.against == {"kernel": "eager", "ratio": 1.0, "interval": [1.0, 1.0]}
    low, high = other.against["interval"]
    assert low <= other.against["ratio"] <= high < 1.0
    assert other.host_us > 0
    assert {"floor_us", "overhead_us", "unqueued"} == set(other.timer)


def test_a_timing_records_whether_torch_runs():
    """The public function calls torch for small inputs."""
    found = timed([SOFTMAX.kernels["eager"], SOFTMAX.kernels["triton"], SOFTMAX.shipped])
    assert {t.kernel: t.runs_torch for t in found} == {"eager": False, "triton": False, "tilewright": True}


def test_values_and_addresses_change_from_sample_to_sample():
    seen = []

    def watching(x):
        if x.shape == (4, 33):
            seen.append((x.data_ptr(), float(x[0, 0])))
        return softmax(x)

    timed([kernel(watching)], samples=20)
    last = seen[-20:]
    assert len({address for address, _ in last}) == 3
    assert len({value for _, value in last}) > 4


def test_a_direction_without_work_is_skipped():
    total = registry.load("sum")
    case = points(M=(3,), N=(5,))[0].with_dtype("float32")
    assert cost_of(total, case, "backward").bytes == 0
    assert cost_of(total, case, "both").bytes == 0
    found = bench(
        total,
        [total.kernels["eager"]],
        clock=timer_for(DEVICE),
        cases=[case],
        directions=("forward", "backward", "both"),
        samples=3,
        device=DEVICE,
    )
    assert [t.direction for t in found] == ["forward"]


def test_the_cost_of_both_directions_is_the_sum():
    case = CASES[0]
    forward, backward, both = (cost_of(SOFTMAX, case, d) for d in ("forward", "backward", "both"))
    assert both.bytes == forward.bytes + backward.bytes
    assert both.flops["fp32"] == forward.flops["fp32"] + backward.flops["fp32"]


def test_a_case_that_the_reference_does_not_support_is_unsupported():
    odd = Op(
        "odd",
        lambda x: x.view(2, -1),
        cost=lambda x: Cost(x.nbytes, x.nbytes),
        inputs=lambda draw: (draw.randn("N"),),
        check=points(N=(2, 4)),
        bench=[],
        takes=lambda case: case["N"] % 2 == 0,
    )
    case = Case((("N", 3),), "float32")
    found = bench(odd, [odd.kernels["eager"]], clock=timer_for(DEVICE), cases=[case], samples=3, device=DEVICE)
    assert [(t.verdict, t.median_us) for t in found] == [("unsupported", None)]


def _no_memory(*_):
    raise torch.cuda.OutOfMemoryError("no")


@pytest.mark.parametrize("where", ["ReferenceRuns", "InputPool"])
def test_a_case_that_does_not_fit_into_memory_is_skipped(monkeypatch, where):
    real, made = getattr(case_runner, where), []

    def scarce(*args, **kwargs):
        """Run out of memory on the first case, for its reference or the copies of its inputs."""
        made.append(where)
        if len(made) == 1 and where == "InputPool":
            _no_memory()
        answers = real(*args, **kwargs)
        if len(made) == 1:
            monkeypatch.setattr(answers, "_run_reference", _no_memory)
        return answers

    monkeypatch.setattr(case_runner, where, scarce)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**31))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**30)
    found = timed([SOFTMAX.kernels["eager"]], cases=CASES * 2)
    assert [t.verdict for t in found] == ["unsupported", "right"]
    assert "inputs of 0.0 GiB" in found[0].reason
    assert found[0].reason.endswith("do not fit into the 1 GiB of GPU memory")


def test_step_count_matches_the_steps():
    found = []
    kernels = [SOFTMAX.kernels["eager"], kernel(softmax)]
    timed(kernels, directions=("forward",), on_step=found.append)
    assert len(found) == step_count(kernels, [], CASES, ("forward",))


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (Cost(4800 * 10**9, 0), 1.0),
        (Cost(4800 * 10**9, 60 * 2**20), 1.0),  # written bytes may stay in the L2
        (Cost(0, 60 * 2**20 + 4800 * 10**9), 1.0),
        (Cost(1, 0, {"tensor.bfloat16": 2 * 989.4e12}), 2.0),
        (Cost(4800 * 10**9, 0, {"fp32": 1e20, "special": 1e20}), 1.0),  # may run on another unit
    ],
)
def test_the_physical_floor_counts_reads_and_gemms(cost, seconds):
    assert physical_seconds({}, {"gpu": "h200", "l2": 60 * 2**20})(cost) == pytest.approx(seconds)


def test_without_a_datasheet_the_measured_ceilings_are_used():
    least = physical_seconds({"read": 1e12, "tensor.float16": 1e14}, {"gpu": "unheard-of", "l2": 0})
    assert least(Cost(10**12, 0)) == pytest.approx(1 / runner.IMPLAUSIBLE)


def test_peers_are_selected_by_name_and_reported_if_missing(monkeypatch):
    assert "liger" not in [k.name for k in registry.pick(SOFTMAX, [])]
    (liger,) = registry.pick(SOFTMAX, ["liger"])
    assert liger.is_baseline
    assert (liger.language, liger.origin) == ("triton", "peer")
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda _: None)
    assert registry.absent(liger) == "liger-kernel"
    assert registry.absent(SOFTMAX.kernels["eager"]) is None
    with pytest.raises(UnknownKernel, match="liger"):
        registry.pick(registry.load("add"), ["liger"])


def test_a_missing_peer_names_its_package():
    if registry.absent(registry.peers(SOFTMAX)["liger"]) is None:
        pytest.skip("liger-kernel is installed")
    with pytest.raises(Exception, match="pip install liger-kernel"):
        registry.peers(SOFTMAX)["liger"].fn(torch.ones(1, 2))


def test_a_peer_declines_what_its_library_would_reject():
    quack = registry.peers(SOFTMAX)["quack"]
    assert quack.differentiable
    assert (quack.language, registry.peers(registry.load("layer_norm"))["quack"].differentiable) == ("cuda", False)
    make = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")
    assert quack.fits(make(3, 1001)), "odd rows start anywhere"
    assert not quack.fits(make(3, 1001)[:, 1:]), "an even length would start at an odd address"
    assert quack.fits(make(3, 1024)[:, :1000])
    assert not quack.fits(make(1000, 3).t())
    norm = registry.peers(registry.load("layer_norm"))["quack"]
    wide = make(1000, dtype=torch.float32)
    assert norm.fits(make(3, 1000), wide, wide)
    assert not norm.fits(make(3, 1000), make(1000), make(1000)), "its parameters are fp32"
    assert not norm.fits(make(3, 1000), None, None)
    loss = registry.peers(registry.load("cross_entropy"))["quack"]
    target = torch.empty(3, dtype=torch.int64, device="meta")
    assert loss.fits(make(3, 1000), target, None, -100, "mean", 0.0, 0.0, None)
    assert not loss.fits(make(3, 1000), target, None, -100, "mean", 0.1, 0.0, None)


@pytest.mark.gpu
def test_short_kernels_are_timed_back_to_back():
    (found,) = timed([SOFTMAX.kernels["eager"]])
    assert found.calls == case_runner.BACK_TO_BACK
    assert 0.5 < found.median_us < 10


@pytest.mark.gpu
def test_gpu_samples_are_queued_and_memory_is_counted():
    cases = [case.with_dtype("bfloat16") for case in points(M=(16384,), N=(4096,))]
    kernels = [SOFTMAX.kernels["eager"], SOFTMAX.kernels["triton"], SOFTMAX.kernels["manual"]]
    eager, triton, manual = timed(kernels, cases=cases, samples=9)
    assert all(t.timer["unqueued"] == 0 and t.calls == 1 for t in (eager, triton, manual))
    assert triton.extra_bytes == 0
    assert manual.extra_bytes > 16384 * 4096 * 4


def test_the_host_timer_counts_no_memory():
    assert HostTimer().extra_bytes(lambda: None) is None


@pytest.mark.parametrize("builds_per_case", [False, True])
def test_allocations_of_a_compiler_are_not_tracked(builds_per_case):
    real, seen = torch.empty, set()

    def fn(x):
        seen.add(torch.empty is real)
        return softmax(x)

    (found,) = timed([kernel(fn, builds_per_case=builds_per_case)])
    assert found.verdict == "right"
    assert seen == ({True} if builds_per_case else {True, False})


@pytest.mark.gpu
def test_calls_in_a_graph_are_right_and_faster_than_calls_from_the_host():
    case = CheckCase(Case((("M", 16), ("N", 1000)), "bfloat16"))
    options = {"clock": timer_for("cuda"), "cases": [case], "effort": QUICK}
    kernels = [SOFTMAX.kernels["eager"], SOFTMAX.kernels["triton"], SOFTMAX.shipped]
    plain, captured = ([*bench(SOFTMAX, kernels, **options, captured=c)] for c in (False, True))
    assert {(t.kernel, t.verdict, t.captured, t.calls) for t in captured} == {
        (kernel.name, "right", True, GRAPH_CALLS) for kernel in kernels
    }
    assert sum(t.median_us for t in captured) < sum(t.median_us for t in plain)


@pytest.mark.gpu
def test_a_wrong_kernel_in_a_graph_has_no_time():
    case = CheckCase(Case((("M", 16), ("N", 1000)), "bfloat16"))
    options = {"clock": timer_for("cuda"), "cases": [case], "effort": QUICK}
    (found,) = bench(SOFTMAX, [kernel(lambda x: torch.zeros_like(x), origin="baseline")], **options, captured=True)
    assert (found.verdict, found.median_us) == ("wrong", None)


@pytest.mark.parametrize(("error", "expected"), [(0.0, "right"), (0.1, "wrong")])
def test_a_kernel_that_no_quick_case_suits_is_checked_on_all_cases(error, expected):
    """A kernel for lengths that are multiples of a block, for example."""
    op = registry.load("softmax")
    kernel = Kernel("mine", lambda x: torch.softmax(x, -1) + error, "torch", lambda x: x.shape[-1] == 781, True)
    of_length = lambda *lengths: [Case((("M", 3), ("N", n)), "float32") for n in lengths]
    for cases, verdict in ((of_length(781), expected), (of_length(4096), "unsupported")):
        found = runner._op_candidates(op, [kernel], (), cases, ["forward"], "cpu", lambda _: None)
        assert [candidate.verdict.verdict for candidate in found] == [verdict]

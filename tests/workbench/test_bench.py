"""No time without a proof, and every sample kept. Without a GPU the host's clock stands in for events."""

from collections import Counter

import pytest
import torch

from tilewright import registry
from tilewright.errors import UnknownKernel
from tilewright.spec import Case, Cost, Kernel, Op, points
from tilewright.timer import HostTimer, timer_for
from tilewright.workbench.bench import contest
from tilewright.workbench.bench.runner import bench, cost_of, physical_seconds, steps

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


def test_only_right_kernels_have_a_time(tmp_path):
    files = [tmp_path / "whole.py", tmp_path / "partly.py", tmp_path / "zeros.py"]
    files[0].write_text("import torch\n\ndef softmax(x):\n    return torch.softmax(x, -1)\n")
    files[1].write_text("import torch\n\ndef softmax(x):\n    return torch.softmax(x.detach(), -1)\n")
    files[2].write_text("import torch\n\ndef softmax(x):\n    return torch.zeros_like(x)\n")
    kernels = [SOFTMAX.kernels["eager"], kernel(torch.zeros_like, "wrong")]
    found = timed(kernels, files, directions=("forward", "backward", "both"))
    told = {(t.direction, t.kernel): (t.verdict, len(t.samples_us)) for t in found}
    without = {"backward": ("unsupported", 0), "both": ("unsupported", 0), "forward": ("right", 3)}
    assert told == {
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
    """Softmax, except where the shape says otherwise."""
    return kernel(lambda x: torch.zeros_like(x) if is_wrong(tuple(x.shape)) else softmax(x))


@pytest.mark.parametrize(
    "is_wrong",
    [lambda shape: shape == (4, 33), lambda shape: shape != (4, 33)],
    ids=["on the timed case alone", "on every other case"],
)
def test_being_right_elsewhere_earns_no_time(is_wrong):
    (told,) = timed([wrong_when(is_wrong)])
    assert (told.verdict, told.samples_us, told.median_us) == ("wrong", [], None)


def test_a_kernel_that_is_right_until_it_is_timed_is_found_out():
    calls = Counter()

    def lazy(x):
        """Right for as long as a check lasts; then the last result serves for all that come."""
        calls[tuple(x.shape)] += 1
        if calls[tuple(x.shape)] < 6:
            lazy.last = softmax(x)
        return lazy.last.clone() if x.shape == (4, 33) else softmax(x)

    (told,) = timed([kernel(lazy)], samples=20)
    assert told.verdict == "wrong"
    assert "right when it was checked" in told.reason
    assert told.median_us is None


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
    while frame is not None and not {"calls", "ahead"} <= frame.f_locals.keys():
        frame = frame.f_back
    return frame


def softmax(x):"""


@pytest.mark.parametrize("trick", TRICKS)
def test_a_file_gains_nothing_from_knowing_that_it_is_timed(tmp_path, trick):
    (tmp_path / "trick.py").write_text(TRICK + TRICKS[trick])
    (told,) = timed([], [tmp_path / "trick.py"], samples=20)
    honest = trick == "right only where someone will look"  # for there is no telling
    assert (told.verdict == "right") == honest, told.reason


REPLACED = {
    "the guard and the clock": "tampering.Fingerprint.replaced = lambda self: []\ntimer.HostTimer.sample = None",
    "a time": "timer.Sample.__init__ = lambda self, *_: None",
    "a constant of the timer": "timer.CACHES = 0",
    "the way results are found": "from torch.utils import _pytree\n_pytree.tree_leaves = None",
    "chance": "import random\nrandom.choice = lambda values: values[0]",
}


@pytest.mark.parametrize("what", REPLACED)
def test_a_file_that_replaces_what_times_it_is_found_out(tmp_path, what):
    head = "import torch\nfrom tilewright import timer\nfrom tilewright.worker import tampering\n"
    path = tmp_path / "trick.py"
    path.write_text(f"{head}{REPLACED[what]}\n\n\ndef softmax(x):\n    return torch.softmax(x, -1)\n")
    (told,) = timed([], [path])
    assert (told.verdict, told.median_us) == ("tampered", None)


def test_a_kernel_that_fails_in_one_case_only_has_the_others():
    def picky(x):
        if x.shape == (4, 33):
            raise RuntimeError("not this one")
        return softmax(x)

    cases = [case.with_dtype("float32") for case in points(M=(4, 5), N=(33, 34))]
    told = timed([kernel(picky)], cases=cases)
    assert [(t.case["N"], t.verdict, bool(t.median_us)) for t in told] == [(33, "crashed", False), (34, "right", True)]
    assert "not this one" in told[0].reason


def test_a_kernel_that_fails_only_while_it_is_timed_is_told():
    calls = Counter()

    def tired(x):
        calls[tuple(x.shape)] += 1
        if x.shape == (4, 33) and calls[4, 33] > 12:
            raise RuntimeError("no more")
        return softmax(x)

    told = timed([SOFTMAX.kernels["eager"], kernel(tired)])
    assert {t.kernel: t.verdict for t in told} == {"eager": "right", "mine": "crashed"}


def test_faster_than_the_hardware_is_implausible_measured_again_and_never_ranked(monkeypatch):
    monkeypatch.setattr(contest, "PAUSE", 0.0)
    (told,) = timed([SOFTMAX.kernels["eager"]], physical=lambda _: 1.0)
    assert (told.verdict, told.median_us, told.against) == ("implausible", None, None)
    assert told.state["again"]
    assert "1000000.0 us by its datasheet" in told.reason


def test_a_throttled_case_is_measured_again_and_says_so(monkeypatch):
    monkeypatch.setattr(contest, "PAUSE", 0.0)
    rounds = []

    class Watched:
        def __enter__(self):
            rounds.append({"throttled": ["heat"]})
            return rounds[-1]

        def __exit__(self, *_): ...

    monkeypatch.setattr(contest, "watched", Watched)
    (told,) = timed([SOFTMAX.kernels["eager"]])
    assert len(rounds) == 2
    assert told.state == {"throttled": ["heat"], "again": True}


def test_a_timing_says_how_sure_it_is_and_what_it_cost():
    eager, other = timed([SOFTMAX.kernels["eager"], kernel(lambda x: softmax(softmax(x) * 0 + x))], samples=20)
    assert eager.interval_us[0] <= eager.median_us <= eager.interval_us[1]
    assert eager.against == {"kernel": "eager", "ratio": 1.0, "interval": [1.0, 1.0]}
    low, high = other.against["interval"]
    assert low <= other.against["ratio"] <= high < 1.0
    assert other.host_us > 0
    assert {"floor_us", "overhead_us", "unqueued"} == set(other.timer)


def test_a_timing_says_when_torch_does_the_work():
    """Which a user's call leaves to it where the input is small."""
    found = timed([SOFTMAX.kernels["eager"], SOFTMAX.kernels["triton"], SOFTMAX.shipped])
    assert {t.kernel: t.is_torchs for t in found} == {"eager": False, "triton": False, "tilewright": True}


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


def test_a_case_without_work_in_a_direction_is_left_out():
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


def test_both_directions_cost_what_each_costs():
    case = CASES[0]
    forward, backward, both = (cost_of(SOFTMAX, case, d) for d in ("forward", "backward", "both"))
    assert both.bytes == forward.bytes + backward.bytes
    assert both.flops["fp32"] == forward.flops["fp32"] + backward.flops["fp32"]


def test_a_reference_that_does_not_take_the_case_is_told():
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


@pytest.mark.parametrize("where", ["Answers", "Inputs"])
def test_a_case_that_does_not_fit_is_skipped_with_its_size_and_the_rest_goes_on(monkeypatch, where):
    real, made = getattr(contest, where), []

    def scarce(*args, **kwargs):
        """No memory for the first case: neither for its truth, nor for copies of its inputs."""
        made.append(where)
        if len(made) == 1 and where == "Inputs":
            _no_memory()
        answers = real(*args, **kwargs)
        if len(made) == 1:
            monkeypatch.setattr(answers, "_answer", _no_memory)
        return answers

    monkeypatch.setattr(contest, where, scarce)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**31))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**30)
    told = timed([SOFTMAX.kernels["eager"]], cases=CASES * 2)
    assert [t.verdict for t in told] == ["unsupported", "right"]
    assert "inputs of 0.0 GiB" in told[0].reason
    assert told[0].reason.endswith("do not fit in the 1 GiB of GPU memory")


def test_every_step_is_counted():
    told = []
    kernels = [SOFTMAX.kernels["eager"], kernel(softmax)]
    timed(kernels, directions=("forward",), on_step=told.append)
    assert len(told) == steps(kernels, [], CASES, ("forward",))


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (Cost(4800 * 10**9, 0), 1.0),
        (Cost(4800 * 10**9, 60 * 2**20), 1.0),  # what is written may still be in the L2
        (Cost(0, 60 * 2**20 + 4800 * 10**9), 1.0),
        (Cost(1, 0, {"tensor.bfloat16": 2 * 989.4e12}), 2.0),
        (Cost(4800 * 10**9, 0, {"fp32": 1e20, "special": 1e20}), 1.0),  # other units can do it
    ],
)
def test_the_physical_floor_counts_only_what_nothing_can_avoid(cost, seconds):
    assert physical_seconds({}, {"gpu": "h200", "l2": 60 * 2**20})(cost) == pytest.approx(seconds)


def test_without_a_datasheet_the_measured_ceilings_decide():
    least = physical_seconds({"read": 1e12, "tensor.float16": 1e14}, {"gpu": "unheard-of", "l2": 0})
    assert least(Cost(10**12, 0)) == pytest.approx(1 / contest.UNMEASURABLE)


def test_peers_are_picked_by_name_alone_and_told_when_absent(monkeypatch):
    assert "liger" not in [k.name for k in registry.pick(SOFTMAX, [])]
    (liger,) = registry.pick(SOFTMAX, ["liger"])
    assert liger.is_baseline
    assert liger.language == "peer"
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda _: None)
    assert registry.absent(liger) == "liger-kernel"
    assert registry.absent(SOFTMAX.kernels["eager"]) is None
    with pytest.raises(UnknownKernel, match="liger"):
        registry.pick(registry.load("add"), ["liger"])


def test_an_absent_peer_is_unsupported_not_crashed():
    if registry.absent(registry.peers(SOFTMAX)["liger"]) is None:
        pytest.skip("liger-kernel is installed")
    with pytest.raises(Exception, match="pip install liger-kernel"):
        registry.peers(SOFTMAX)["liger"].fn(torch.ones(1, 2))


@pytest.mark.gpu
def test_short_kernels_are_timed_back_to_back():
    (told,) = timed([SOFTMAX.kernels["eager"]])
    assert told.calls == contest.BACK_TO_BACK
    assert 0.5 < told.median_us < 10


@pytest.mark.gpu
def test_gpu_times_are_queued_and_have_memory_counted():
    cases = [case.with_dtype("bfloat16") for case in points(M=(16384,), N=(4096,))]
    kernels = [SOFTMAX.kernels["eager"], SOFTMAX.kernels["triton"], SOFTMAX.kernels["manual"]]
    eager, triton, manual = timed(kernels, cases=cases, samples=9)
    assert all(t.timer["unqueued"] == 0 and t.calls == 1 for t in (eager, triton, manual))
    assert triton.extra_bytes == 0
    assert manual.extra_bytes > 16384 * 4096 * 4


def test_the_host_timer_counts_no_memory():
    assert HostTimer().extra_bytes(lambda: None) is None


@pytest.mark.parametrize("builds_per_case", [False, True])
def test_what_a_compiler_does_to_memory_is_not_watched(builds_per_case):
    real, seen = torch.empty, set()

    def fn(x):
        seen.add(torch.empty is real)
        return softmax(x)

    (told,) = timed([kernel(fn, builds_per_case=builds_per_case)])
    assert told.verdict == "right"
    assert seen == ({True} if builds_per_case else {True, False})

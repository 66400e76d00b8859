"""Benchmarks of any callable; a wrong one has no time. No test depends on how fast anything is."""

import inspect
import time
from statistics import mean, median

import pytest
import torch

import tilewright as tw
from tilewright import hardware, notebook
from tilewright.notebook import Benchmark, Entry
from tilewright.spec import Cost
from tilewright.timer import HostTimer, Sample


def softmax(x):
    return torch.softmax(x, -1)


def in_steps(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def broken(x):
    raise ValueError("no rows\nand more")


def timed(fn, *args, **more):
    return tw.benchmark(fn, *args, **{"samples": 5} | more)


@pytest.fixture
def x(device):
    return torch.randn(8, 33, device=device)


def test_a_right_one_has_a_time_and_a_ratio_with_intervals(x):
    found = timed(in_steps, x, against=softmax)
    entry_of_fn, baseline = found.entries
    assert [(e.name, e.verdict, e.reason) for e in found.entries] == [
        ("in_steps", "right", ""),
        ("softmax", "right", ""),
    ]
    assert len(entry_of_fn.samples_us) == len(baseline.samples_us) == 5
    assert entry_of_fn.interval_us[0] <= entry_of_fn.us == median(entry_of_fn.samples_us) <= entry_of_fn.interval_us[1]
    assert entry_of_fn.ratio == baseline.us / entry_of_fn.us
    assert entry_of_fn.ratio_interval[0] <= entry_of_fn.ratio <= entry_of_fn.ratio_interval[1]
    assert entry_of_fn.host_us > 0
    assert (found.baseline, baseline.ratio) == ("softmax", None)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (torch.zeros_like, r"output\[0, 0\] is 0, expected"),
        (lambda x: softmax(x.bfloat16()).float(), "elements are off"),
        (lambda x: softmax(x)[1:], "shape"),
        (lambda x: softmax(x).double(), "dtype"),
        (lambda x: (softmax(x),), "returned tuple, not a tensor"),
        (lambda x: 1.0, "returned float, not a tensor"),
        (lambda x: softmax(x.add_(0.5)), "its argument 1 was changed"),
    ],
)
def test_a_wrong_callable_has_no_time_and_a_reason(x, fn, message):
    found = timed(fn, x, against={"right": softmax})
    wrong, baseline = found.entries
    assert (wrong.verdict, wrong.us, wrong.samples_us, wrong.ratio) == ("wrong", None, (), None)
    assert baseline.us
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(wrong.reason)
    assert f"{wrong.name}: wrong, {wrong.reason}" in str(found)


def test_the_first_of_several_baselines_is_the_reference(x):
    found = timed(softmax, x, against={"torch": softmax, "steps": in_steps, "zeros": torch.zeros_like})
    assert [(e.name, e.verdict) for e in found.entries] == [
        ("softmax", "right"),
        ("torch", "right"),
        ("steps", "right"),
        ("zeros", "wrong"),
    ]
    assert [e.ratio is not None for e in found.entries] == [True, False, True, False]
    swapped = timed(softmax, x, against={"zeros": torch.zeros_like, "torch": softmax})
    assert [e.verdict for e in swapped.entries] == ["wrong", "right", "wrong"]


@pytest.mark.parametrize(
    ("fn", "reference", "reason"),
    [
        (torch.clone, torch.relu, "random signs: output"),
        (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), softmax, "far below zero: output"),
    ],
)
def test_what_fails_on_other_values_is_right_on_these_only(fn, reference, reason):
    values = torch.rand(16, 64)
    entry, baseline = timed(fn, values, against=reference).entries
    assert (entry.verdict, baseline.verdict) == ("right on these values only", "right")
    assert reason in entry.reason
    assert entry.us
    found = timed(fn, inputs=lambda: (torch.rand(16, 64),), against=reference)
    assert found.entries[0].verdict == "right"


@pytest.mark.parametrize("values", [torch.ones(8, 8), torch.arange(64)])
def test_values_that_never_change_prove_little(values):
    known = values * values
    found = tw.benchmark(lambda x: known.clone(), values, against=lambda x: x * x, samples=5)
    assert found.entries[0].verdict == "right on these values only"
    assert "a constant would be right, too: pass inputs=" in found.entries[0].reason
    drawn = lambda: (torch.randint(0, 9, (64,)),)
    assert tw.benchmark(lambda x: x * x, against=lambda x: x * x, samples=5, inputs=drawn).entries[0].verdict == "right"


def test_integers_are_reversed_if_nothing_else_changes():
    labels = torch.randint(0, 9, (64,))
    known = labels.cumsum(0)
    found = tw.benchmark(lambda n: known.clone(), labels, against=lambda n: n.cumsum(0), samples=5)
    assert found.entries[0].verdict == "wrong"


def test_a_baseline_that_refuses_other_values_is_asked_the_given_ones_only():
    roots = timed(lambda x: x**0.5, torch.rand(16, 64) + 1, against=torch.sqrt)
    assert [entry.verdict for entry in roots.entries] == ["right", "right"]


def test_a_callable_that_replaces_the_clock_is_tampered(x, monkeypatch):
    monkeypatch.setattr("time.perf_counter", time.perf_counter)  # restores it

    def patching(x):
        time.perf_counter = lambda: 0.0
        return softmax(x)

    entry = timed(patching, x, against=softmax).entries[0]
    assert (entry.verdict, entry.us, entry.reason) == ("tampered", None, "time.perf_counter was replaced")


def test_equal_names_are_distinguished(x):
    found = timed(lambda x: x + 1, x, against=lambda x: x + 1)
    assert [e.name for e in found.entries] == ["<lambda> (fn)", "<lambda>"]


def test_without_a_baseline_nothing_is_checked_and_the_text_says_so(x):
    found = timed(torch.zeros_like, x)
    (entry,) = found.entries
    assert (entry.verdict, len(entry.samples_us), entry.ratio) == ("not checked", 5, None)
    assert entry.us
    assert "against=" in str(found)
    assert " vs " not in str(found)


@pytest.mark.parametrize(
    ("baseline", "why"),
    [
        (lambda x: float(x.sum()), "returns float, and only real tensors are compared"),
        (lambda x: (x.sin(), 3), "returns int, and only real tensors are compared"),
        (lambda x: None, "returns NoneType, and only real tensors are compared"),
        (lambda x: (), "returns nothing"),
        (lambda x: x + 1j, "returns complex numbers, and only real tensors are compared"),
        (lambda x: torch.nn.functional.dropout(x, 0.1), "draws random numbers"),
        (lambda x: x @ torch.ones(33, 2, device=x.device), "does not run in float64"),
        (lambda x: x.sum() if x[0, 0].item() > 6 else 1 / 0, "does not accept the values in reverse"),
        (lambda x: (-x.abs() - 1).log(), "returns only NaN and infinities"),
    ],
)
def test_nothing_is_checked_if_the_baseline_cannot_be_the_reference(x, baseline, why):
    x[0, 0] = 7
    found = timed(softmax, x, against=baseline)
    assert {e.verdict for e in found.entries} == {"not checked"}
    assert all(e.us for e in found.entries)
    assert why in found.entries[0].reason


@pytest.mark.parametrize("against", [broken, {"broken": broken}])
def test_an_exception_is_a_verdict(x, against):
    found = timed(broken, x, against=softmax)
    crashed, _ = found.entries
    assert (crashed.verdict, crashed.reason, crashed.us) == ("crashed", "ValueError: no rows", None)
    found = timed(softmax, x, against=against)
    entry_of_fn, baseline = found.entries
    assert (baseline.verdict, baseline.reason, baseline.us) == ("crashed", "ValueError: no rows", None)
    assert (entry_of_fn.verdict, entry_of_fn.ratio) == ("not checked", None)
    assert "broken cannot be the reference: ValueError: no rows" in str(found)
    assert timed(broken, x).entries[0].verdict == "crashed"


def test_a_callable_that_is_right_only_when_checked_is_wrong(x):
    calls = []

    def tires(x):
        calls.append(x)
        return softmax(x) if len(calls) < 3 else x.clone()

    entry_of_fn, baseline = timed(tires, x, against=softmax).entries
    assert (entry_of_fn.verdict, entry_of_fn.us, entry_of_fn.ratio) == ("wrong", None, None)
    assert entry_of_fn.reason.startswith("right when it was checked, ")
    assert baseline.us


def test_a_crash_while_timed_does_not_affect_the_others(x, monkeypatch):
    monkeypatch.setattr("tilewright.timer.MAX_WARM_UP", 0)
    calls = []

    def breaks(x):
        calls.append(1)
        if len(calls) > 60:
            raise RuntimeError("enough")
        return softmax(x)

    entry_of_fn, baseline = timed(breaks, x, against=softmax, samples=60).entries
    assert (entry_of_fn.verdict, entry_of_fn.reason) == ("crashed", "RuntimeError: enough")
    assert len(baseline.samples_us) == 60


def test_a_callable_that_replays_its_last_result_is_wrong(x):
    kept = []

    def remembers(x):
        kept.append(softmax(x) if not kept else kept[0])
        return kept[0].clone()

    (entry_of_fn, _) = timed(remembers, x, against=softmax).entries
    assert (entry_of_fn.verdict, entry_of_fn.reason[:18]) == ("wrong", "with other values,")


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.t(), lambda t: t[1:, ::2], lambda t: t[:1].expand(8, 33)])
def test_arguments_are_copies_with_the_same_strides(x, view):
    given = view(x)
    before, seen = x.clone(), set()

    def watching(a, factor):
        assert (a.shape, a.stride(), a.dtype) == (given.shape, given.stride(), given.dtype)
        seen.add(a.data_ptr())
        return a * factor

    found = timed(watching, given, 3, against=lambda a, factor: a * factor)
    assert [e.verdict for e in found.entries] == ["right", "right"]
    assert len(seen) >= 3
    assert given.data_ptr() not in seen
    assert torch.equal(x, before)


def test_arguments_that_are_written_to_count_as_outputs(x):
    before = x.clone()

    def into(x, out):
        torch.add(x, 1, out=out)

    others = {"into": into, "nothing": lambda x, out: None}
    others["half"] = lambda x, out: (out[:4].copy_(x[:4] + 1), None)[1]
    found = timed(lambda x, out: (out.copy_(x).add_(1), None)[1], x, torch.zeros_like(x), against=others)
    assert [e.verdict for e in found.entries] == ["right", "right", "wrong", "wrong"]
    doubled = timed(lambda x: x.mul_(2), x, against=lambda x: x.add_(x))
    assert [e.verdict for e in doubled.entries] == ["right", "right"]
    assert torch.equal(x, before)


def test_inputs_replace_arguments_if_reversed_values_make_no_sense(device):
    made = []

    def sorted_rows():
        made.append(torch.randn(6, 50, device=device).sort(-1).values)
        return made[-1], 3

    found = timed(lambda x, k: x[:, -k:].flip(-1), inputs=sorted_rows, against=lambda x, k: x.topk(k, -1).values)
    assert [e.verdict for e in found.entries] == ["right", "right"]
    assert len(made) == 2


def test_invalid_arguments_are_reported_in_one_line(x):
    with pytest.raises(TypeError, match=r"as benchmark\(fn, x\), or inputs="):
        tw.benchmark(softmax)
    with pytest.raises(TypeError, match="or inputs="):
        tw.benchmark(softmax, x, inputs=lambda: (x,))
    with pytest.raises(TypeError, match="none of the arguments is a tensor"):
        tw.benchmark(softmax, 3)
    with pytest.raises(TypeError, match=r"tuple of arguments, as \(x,\)"):
        tw.benchmark(softmax, inputs=lambda: x)
    with pytest.raises(TypeError, match="is not callable"):
        tw.benchmark(softmax, x, against=3)
    with pytest.raises(ValueError, match="on cpu and meta: move all to one"):
        tw.benchmark(torch.add, x.cpu(), torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="on meta: move all to one"):
        tw.benchmark(softmax, x.to("meta"))
    with pytest.raises(ValueError, match="samples must be at least 5"):
        tw.benchmark(softmax, x, samples=1)
    sizes = iter((3, 4))
    with pytest.raises(ValueError, match="only values may change"):
        tw.benchmark(softmax, inputs=lambda: (torch.randn(next(sizes), 5),))


def entry(name, us, edges, **more):
    return Entry(name, "right", us=us, interval_us=edges, samples_us=(us,), host_us=4.0, extra_bytes=2**21, **more)


TABLE = Benchmark(
    [
        entry("<img onerror=alert(1)>", 12.0, (11.9, 12.1), ratio=1.5, ratio_interval=(1.49, 1.51), calls=16),
        entry("slow & late", 18.1, (17.9, 18.3), ratio=0.99, ratio_interval=(0.98, 1.01), is_tie=True, is_queued=False),
        Entry("bad", "wrong", "output[0] is <b>1</b>"),
        entry('"torch"', 18.0, (17.8, 18.2)),
    ],
    '"torch"',
    "a clock",
    1.25,
    ("heat",),
)


def test_the_text_shows_everything():
    assert str(TABLE) == repr(TABLE)
    assert str(TABLE).splitlines() == [
        'kernel                  time      95 %          host     extra memory  vs "torch"                 verdict',
        "<img onerror=alert(1)>  12.0 us*  11.9 to 12.1  4.00 us  2.0 MiB       1.50x (1.49 to 1.51)       right",
        "slow & late             18.1 us   17.9 to 18.3  4.00 us  2.0 MiB       0.99x (0.98 to 1.01), tie  right",
        "bad                     -                                                                         wrong",
        '"torch"                 18.0 us   17.8 to 18.2  4.00 us  2.0 MiB       baseline                   right',
        "bad: wrong, output[0] is <b>1</b>",
        "a clock; an empty call takes 1.25 us, which is not subtracted",
        "* 16 calls back to back per sample, each on its own arguments",
        "samples of slow & late include host time: the call synchronizes with the GPU",
        "the GPU was throttled: heat",
    ]


def test_html_is_an_escaped_table():
    html = TABLE._repr_html_()
    assert "<img" not in html
    assert "<b>" not in html
    for message in (
        "&lt;img onerror=alert(1)&gt;",
        "slow &amp; late",
        "&lt;b&gt;1&lt;/b&gt;",
        "vs &quot;torch&quot;",
        "tie",
    ):
        assert message in html
    assert html.count("<tr>") == 5
    assert html.count("<th>") == html.count("<td>") / 4 == 7


def test_intervals_that_overlap_are_a_tie():
    base = entry("base", 10.0, (9.0, 11.0))
    ties = {
        low: notebook._against(entry("one", low, (low - 1, low + 1)), base).is_tie for low in (7.0, 8.0, 12.0, 13.0)
    }
    assert ties == {7.0: False, 8.0: True, 12.0: True, 13.0: False}


def test_cpu_tensors_are_timed_by_the_host_clock():
    assert "host clock, CPU" in str(timed(softmax, torch.randn(3, 5)))


def test_do_bench_has_tritons_signature():
    testing = pytest.importorskip("triton.testing")
    ours, theirs = (
        {p.name: p.default for p in inspect.signature(fn).parameters.values()} for fn in (tw.do_bench, testing.do_bench)
    )
    assert ours == theirs
    assert [*ours] == [*theirs]


class Counted(HostTimer):
    """A timer whose samples take 1000, 2000, ... us."""

    def __init__(self, is_queued=True):
        self.taken, self.is_queued = 0, is_queued

    def sample(self, calls, head_start, fill=lambda: None, keep=None):
        self.taken += 1
        for call in calls:
            call()
        return Sample(1e3 * self.taken, self.is_queued)


@pytest.fixture
def samples_of_do_bench(monkeypatch):
    """Return a function that runs do_bench with the timer above."""
    monkeypatch.setattr(notebook, "timer_for", lambda _: Counted())
    monkeypatch.setattr("tilewright.timer.MAX_WARM_UP", 0)

    def run(**more):
        return notebook.do_bench(lambda: None, **{"warmup": 0, "rep": 0} | more)

    return run


def test_do_bench_returns_the_requested_statistics(samples_of_do_bench):
    taken = samples_of_do_bench(return_mode="all")
    assert taken == [taken[0] + n for n in range(5)]
    assert samples_of_do_bench() == samples_of_do_bench(return_mode="mean") == mean(taken)
    assert samples_of_do_bench(return_mode="median") == median(taken)
    assert (samples_of_do_bench(return_mode="min"), samples_of_do_bench(return_mode="max")) == (taken[0], taken[-1])
    assert samples_of_do_bench(quantiles=[0.5]) == median(taken)
    assert samples_of_do_bench(quantiles=[0, 0.125, 1]) == [taken[0], taken[0] + 0.5, taken[-1]]
    assert samples_of_do_bench(quantiles=(0.5, 0.2), return_mode="all") == [median(taken), taken[0] + 0.8]
    with pytest.raises(ValueError, match="return_mode must be one of min, max, mean, median, all, not 'best'"):
        samples_of_do_bench(return_mode="best")
    with pytest.raises(ValueError, match="range"):
        samples_of_do_bench(quantiles=[2])


def test_do_bench_warms_up_and_repeats_for_the_given_times(samples_of_do_bench):
    at_once = samples_of_do_bench(return_mode="all")
    assert len(samples_of_do_bench(rep=20, return_mode="all")) > 5
    assert samples_of_do_bench(warmup=20, return_mode="min") > at_once[0]


def test_do_bench_clears_gradients_before_each_call():
    x = torch.randn(4, requires_grad=True)
    seen = []

    def step():
        seen.append(x.grad is None)
        x.sum().backward()

    tw.do_bench(step, warmup=0, rep=1, grad_to_none=[x])
    assert seen
    assert all(seen)


def test_do_bench_warns_of_host_time(monkeypatch):
    monkeypatch.setattr(notebook, "timer_for", lambda _: Counted(is_queued=False))
    monkeypatch.setattr("tilewright.timer.MAX_WARM_UP", 0)
    with pytest.warns(UserWarning, match="synchronizes with the GPU"):
        notebook.do_bench(lambda: None, warmup=0, rep=0)


def test_do_bench_propagates_errors():
    with pytest.raises(ZeroDivisionError):
        tw.do_bench(lambda: 1 / 0)


@pytest.mark.gpu
def test_short_calls_are_timed_back_to_back_and_memory_is_counted():
    x = torch.randn(64, 64, device="cuda")
    short = timed(in_steps, x, against=softmax)
    assert {e.calls for e in short.entries} == {16}
    assert torch.cuda.get_device_name() in str(short)
    assert "back to back" in str(short)
    wide = torch.randn(8192, 8192, device="cuda")
    long = timed(lambda x: (x + 1).exp(), wide, against=lambda x: x.add(1).exp_())
    assert {e.calls for e in long.entries} == {1}
    assert all(e.is_queued for e in long.entries)
    assert [e.extra_bytes for e in long.entries] == [wide.nbytes, 0]


@pytest.mark.gpu
def test_a_time_below_the_datasheet_minimum_is_implausible():
    if hardware.current_gpu()["gpu"] not in hardware.DATASHEETS:
        pytest.skip("needs a GPU with a datasheet")
    x = torch.randn(64, 64, device="cuda")
    entry_of_fn, baseline = timed(in_steps, x, against=softmax, cost=Cost(10**15, 0)).entries
    assert (entry_of_fn.verdict, entry_of_fn.us, entry_of_fn.ratio) == ("implausible", None, None)
    assert "by its datasheet" in baseline.reason
    assert timed(softmax, x, against=softmax, cost=Cost(x.nbytes, x.nbytes)).entries[0].verdict == "right"


@pytest.mark.gpu
def test_a_callable_that_synchronizes_is_reported():
    x = torch.randn(64, 64, device="cuda")

    def waits(x):
        torch.cuda.synchronize()
        return softmax(x)

    found = timed(waits, x, against=softmax)
    assert [e.is_queued for e in found.entries] == [False, True]
    assert "samples of waits include host time" in str(found)
    with pytest.warns(UserWarning, match="synchronizes with the GPU"):
        tw.do_bench(lambda: waits(x))


@pytest.mark.gpu
def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="on cpu and cuda:0"):
        tw.benchmark(torch.add, torch.ones(3), torch.ones(3, device="cuda"))

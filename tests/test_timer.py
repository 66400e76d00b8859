"""What takes a sample, who takes turns, and when warming up ends. Without a GPU a pretended clock stands in for one."""

import gc
from itertools import count, cycle
from types import SimpleNamespace

import pytest
import torch

from tilewright import timer
from tilewright.timer import HostTimer, Lane, Sample, Timer, floor_us, interleave, timer_for, turns


class Pretended:
    """A clock that says what it is told: `us` one after the other, queued from a head start of `needs` seconds on."""

    def __init__(self, us=(7.0,), needs: float = 0.0):
        self._us, self._needs = cycle(us), needs
        self.ahead: list[float] = []
        self.counts: list[int] = []
        self.settled = 0

    def sample(self, calls, ahead, fill=lambda: None, then=None):
        fill()
        self.ahead.append(ahead)
        self.counts.append(len(calls))
        results = [call() for call in calls]
        return Sample(next(self._us), ahead >= self._needs, then(results) if then else None)

    def settle(self):
        self.settled += 1

    def extra_bytes(self, call):
        return len(call())


@pytest.fixture
def hours(monkeypatch):
    """Every look at the clock finds it a tenth of a second later."""
    looks = count()

    def now():
        return next(looks) * 0.1

    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=now, perf_counter=now))
    return looks


def test_every_round_has_every_name_once_in_an_order_of_its_own():
    names = dict.fromkeys("abcde")
    taken = list(turns(names, 60))
    rounds = [tuple(taken[n : n + 5]) for n in range(0, len(taken), 5)]
    assert len(rounds) == 60
    assert all(sorted(one) == list("abcde") for one in rounds)
    assert len(set(rounds)) > 20
    assert {one[0] for one in rounds} == set("abcde")
    assert list(names) == list("abcde")


def test_a_sample_is_taken_again_with_twice_the_head_start_until_it_is_queued():
    clock, prepared = Pretended(us=count(), needs=300e-6), []
    lane = Lane(clock, lambda: prepared.append(0) or [lambda: None])
    assert lane.sample() == Sample(3, True)
    assert clock.ahead == [50e-6, 100e-6, 200e-6, 400e-6]
    assert len(prepared) == 4, "each attempt has inputs of its own"
    lane.sample()
    assert clock.ahead[4:] == [400e-6], "what was learned is kept"


def test_a_call_that_is_never_queued_is_given_up_and_the_head_start_does_not_grow():
    """One that waits for the GPU on its way: no head start helps it."""
    clock = Pretended(needs=float("inf"))
    lane = Lane(clock, lambda: [lambda: None])
    assert not lane.sample().is_queued
    assert len(clock.ahead) == 1 + timer.ATTEMPTS
    for _ in range(50):
        assert not lane.sample().is_queued
    assert len(clock.ahead) == 51 + timer.ATTEMPTS
    assert sum(clock.ahead) < 0.1


def test_no_head_start_is_longer_than_any_host_needs(hours):
    """The host time of a call that waits for a slow kernel says nothing of how long queuing takes."""
    clock = Pretended(needs=float("inf"))
    Lane(clock, lambda: [lambda: None]).warm_up()
    assert max(clock.ahead) == timer.LONGEST_AHEAD


def test_warming_up_begins_with_a_call_and_gives_a_head_start_for_its_host_time(monkeypatch, hours):
    monkeypatch.setattr(timer, "LONGEST_AHEAD", 1e9)
    clock, called = Pretended(), []
    lane = Lane(clock, lambda: [lambda: called.append(len(clock.ahead))] * 4)
    lane.warm_up()
    assert called[:4] == [0] * 4
    assert clock.ahead == [pytest.approx(50e-6 + 1.5 * 0.1 * 4)] * len(clock.ahead)


def test_warming_up_ends_when_two_groups_agree():
    clock = Pretended(us=[90.0] * 5 + [50.0] * 5 + [40.0] * 5 + [40.3] * 5 + [0.0] * 5)
    assert Lane(clock, lambda: [lambda: None]).warm_up() == 40.3
    assert len(clock.ahead) == 4 * timer.GROUP


def test_one_slow_sample_in_a_group_keeps_no_one_waiting():
    clock = Pretended(us=[40.0, 40.0, 900.0, 40.0, 40.0])
    assert Lane(clock, lambda: [lambda: None]).warm_up() == 40.0
    assert len(clock.ahead) == 2 * timer.GROUP


def test_warming_up_ends_even_if_no_two_groups_agree(hours):
    clock = Pretended(us=(2.0**-n for n in count()))
    assert Lane(clock, lambda: [lambda: None]).warm_up() > 0
    assert timer.GROUP < len(clock.ahead) < 10 * timer.GROUP


def test_what_is_kept_is_made_of_the_results_of_that_sample():
    lane = Lane(Pretended(), lambda: [lambda: "first", lambda: "second"])
    assert lane.sample(then=lambda results: results).kept == ["first", "second"]
    assert lane.sample().kept is None


def test_the_host_timer_takes_the_time_of_the_calls_alone(hours):
    made = []
    calls = [lambda: made.append("call") or len(made)] * 4
    taken = HostTimer().sample(calls, 1e9, then=lambda results: made.append("then") or results)
    assert taken == Sample(pytest.approx(0.1e6 / 4), True, [1, 2, 3, 4])
    assert made == ["call"] * 4 + ["then"]
    assert HostTimer().sample([], 0.0).us == pytest.approx(0.1e6)
    assert isinstance(timer_for("cpu"), HostTimer)


def test_the_floor_is_the_median_of_nothing_at_all():
    clock = Pretended(us=[1.0, 2.0, 99.0])
    assert floor_us(clock) == 2.0
    assert set(clock.counts) == {0}


def test_interleaving_returns_every_sample_of_every_call():
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    order: list[str] = []
    taken = interleave(Pretended(us=count(1)), calls, 9)
    assert {name: len(samples) for name, samples in taken.items()} == dict.fromkeys("abc", 9)
    timed = order[-27:]
    assert all(set(timed[n : n + 3]) == set("abc") for n in range(0, 27, 3))
    ordered = sorted((us, name) for name, samples in taken.items() for us in samples)
    assert [name for _, name in ordered] == timed, "a sample is told under the name of its call"


def test_host_time_is_of_a_call_with_nothing_before_it_and_no_garbage_collected(hours):
    clock, collects = Pretended(), []
    lane = Lane(clock, lambda: [lambda: collects.append(gc.isenabled())] * 8)
    assert gc.isenabled()
    assert lane.host_us() == pytest.approx(0.1e6)
    assert gc.isenabled()
    assert collects == [False] * 24, "whole samples, at least so many calls"
    assert clock.settled == 25


def test_host_time_in_a_row_is_of_the_second_of_two_calls(hours):
    clock, calls = Pretended(), count()

    def slow_after_a_wait():
        if next(calls) % 2 == 0:
            next(hours)

    lane = Lane(clock, lambda: [slow_after_a_wait])
    assert lane.host_us(in_a_row=True) == pytest.approx(0.1e6)
    assert next(calls) == 40
    assert clock.settled == 21


def test_what_else_the_machine_does_is_not_host_time(hours):
    calls = count()

    def now_and_then_slow():
        for _ in range(next(calls) % 3):
            next(hours)

    assert Lane(Pretended(), lambda: [now_and_then_slow]).host_us() == pytest.approx(0.1e6)


def test_garbage_is_collected_again_after_a_call_that_fails():
    def broken():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        Lane(Pretended(), lambda: [broken]).host_us()
    assert gc.isenabled()


def test_garbage_that_nobody_collected_is_not_collected_after():
    gc.disable()
    try:
        Lane(Pretended(), lambda: [lambda: None]).host_us()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_memory_is_counted_of_one_call():
    assert Lane(Pretended(), lambda: [lambda: "four", lambda: "others"]).extra_bytes() == 4


@pytest.mark.parametrize(
    ("made", "peak", "extra"),
    [
        (lambda x: x, 400, 0),
        (lambda x: x, 900, 500),
        (lambda x: [x, {"view": x[50:], "none": None, "number": 3}], 900, 500),  # one memory, counted once
        (lambda x: (x, torch.ones(25)), 900, 400),
        (lambda x: None, 900, 900),
        (lambda x: x, 300, 0),
    ],
)
def test_memory_beyond_what_is_returned(monkeypatch, made, peak, extra):
    """With an allocator that has given out 1000 bytes before, and so many more at the peak."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000 + peak)
    assert object.__new__(Timer).extra_bytes(lambda: made(torch.ones(100))) == extra


@pytest.mark.gpu
def test_a_floor_below_ten_microseconds():
    assert 0 < floor_us(Timer()) < 10


@pytest.mark.gpu
def test_samples_are_queued_and_see_the_device_alone():
    x = torch.randn(2**26, device="cuda")
    lane = Lane(Timer(), lambda: [lambda: x + 1])
    us = lane.warm_up()
    samples = [lane.sample() for _ in range(20)]
    assert all(sample.is_queued for sample in samples)
    assert 2 * x.nbytes / 10e12 < us * 1e-6 < 2 * x.nbytes / 0.1e12


@pytest.mark.gpu
def test_a_call_that_waits_for_the_gpu_is_told_and_soon_over():
    x = torch.randn(2**20, device="cuda")
    lane = Lane(Timer(), lambda: [lambda: x.sum().item()])
    lane.warm_up()
    assert not any(lane.sample().is_queued for _ in range(5))


@pytest.mark.gpu
def test_a_small_read_is_slower_from_memory_than_from_the_cache():
    x = torch.randn(2**22, device="cuda")  # 16 MB: it stays in the L2 of all that have 24 MB or more
    total = torch.empty((), device="cuda")
    times = {}
    for flush in ("read", "none"):
        (samples,) = Timer(flush=flush).interleave({"sum": lambda: torch.sum(x, dim=0, out=total)}, 30).values()
        times[flush] = sorted(samples)[15]
    assert times["read"] > 1.1 * times["none"]


@pytest.mark.gpu
def test_without_a_head_start_the_host_is_timed():
    x = torch.randn(16, device="cuda")
    calls = [lambda: x + 1] * 20
    apart = {queues: Lane(Timer(queues=queues), lambda: calls).warm_up() for queues in (True, False)}
    assert apart[True] < apart[False]


@pytest.mark.gpu
def test_results_are_copied_before_the_next_sample_can_change_them():
    buffer = torch.zeros(2**20, device="cuda")
    lane = Lane(Timer(), lambda: [lambda: buffer.add_(1)])
    lane.warm_up()
    kept = [lane.sample(then=lambda results: results[0].clone()).kept for _ in range(3)]
    first = float(kept[0][0])
    assert [float(k.min()) for k in kept] == [first, first + 1, first + 2]


@pytest.mark.gpu
def test_memory_of_a_call_on_a_gpu():
    x = torch.randn(2**20, device="cuda")
    assert Timer().extra_bytes(lambda: x + 1) == 0
    assert Timer().extra_bytes(lambda: (x + 1) * 2) == x.nbytes


def test_inputs_are_in_place_before_the_clock_starts(monkeypatch):
    order = []
    monkeypatch.setattr(timer.time, "perf_counter", lambda: order.append("clock") or 0.0)
    HostTimer().sample([lambda: order.append("call")], 0.0, lambda: order.append("fill"))
    assert order == ["fill", "clock", "call", "clock"]

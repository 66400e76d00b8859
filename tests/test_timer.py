"""Samples, their order and the end of warm-up, with a fake clock on a machine without a GPU."""

import gc
from itertools import count, cycle
from types import SimpleNamespace

import pytest
import torch

from tilewright import timer
from tilewright.timer import HostTimer, Sample, Sampler, Timer, floor_us, interleave, shuffled_rounds, timer_for


class FakeClock:
    """A clock that returns `us` one after the other; samples with a head start of `needs` seconds are queued."""

    def __init__(self, us=(7.0,), needs: float = 0.0):
        self._us, self._needs = cycle(us), needs
        self.head_starts: list[float] = []
        self.counts: list[int] = []
        self.synchronized = 0

    def sample(self, calls, head_start, fill=lambda: None, keep=None):
        fill()
        self.head_starts.append(head_start)
        self.counts.append(len(calls))
        results = [call() for call in calls]
        return Sample(next(self._us), head_start >= self._needs, keep(results) if keep else None)

    def synchronize(self):
        self.synchronized += 1

    def extra_bytes(self, call):
        return len(call())


@pytest.fixture
def ticks(monkeypatch):
    """Advance the clock by a tenth of a second per reading; the test may advance it further."""
    readings = count()

    def now():
        return next(readings) * 0.1

    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=now, perf_counter=now))
    return readings


def test_every_round_has_every_name_once_in_random_order():
    names = dict.fromkeys("abcde")
    taken = list(shuffled_rounds(names, 60))
    rounds = [tuple(taken[n : n + 5]) for n in range(0, len(taken), 5)]
    assert len(rounds) == 60
    assert all(sorted(one) == list("abcde") for one in rounds)
    assert len(set(rounds)) > 20
    assert {one[0] for one in rounds} == set("abcde")
    assert list(names) == list("abcde")


def test_a_sample_is_retried_with_twice_the_head_start_until_it_is_queued():
    clock, prepared = FakeClock(us=count(), needs=300e-6), []
    sampler = Sampler(clock, lambda: prepared.append(0) or [lambda: None])
    assert sampler.sample() == Sample(3, True)
    assert clock.head_starts == [50e-6, 100e-6, 200e-6, 400e-6]
    assert len(prepared) == 4, "each attempt has its own inputs"
    sampler.sample()
    assert clock.head_starts[4:] == [400e-6], "the next sample begins with the last head start"


def test_a_call_that_is_never_queued_is_not_retried_again():
    """No head start helps a call that synchronizes with the GPU."""
    clock = FakeClock(needs=float("inf"))
    sampler = Sampler(clock, lambda: [lambda: None])
    assert not sampler.sample().is_queued
    assert len(clock.head_starts) == 1 + timer.ATTEMPTS
    for _ in range(50):
        assert not sampler.sample().is_queued
    assert len(clock.head_starts) == 51 + timer.ATTEMPTS
    assert sum(clock.head_starts) < 0.1


def test_the_head_start_is_limited(ticks):
    """The host time of a call that waits for a slow kernel is not the time to queue it."""
    clock = FakeClock(needs=float("inf"))
    Sampler(clock, lambda: [lambda: None]).warm_up()
    assert max(clock.head_starts) == timer.MAX_HEAD_START


def test_warm_up_derives_the_head_start_from_the_host_time(monkeypatch, ticks):
    monkeypatch.setattr(timer, "MAX_HEAD_START", 1e9)
    clock, called = FakeClock(), []
    sampler = Sampler(clock, lambda: [lambda: called.append(len(clock.head_starts))] * 4)
    sampler.warm_up()
    assert called[:4] == [0] * 4
    assert clock.head_starts == [pytest.approx(50e-6 + 1.5 * 0.1 * 4)] * len(clock.head_starts)


def test_warm_up_ends_when_two_groups_agree():
    clock = FakeClock(us=[90.0] * 5 + [50.0] * 5 + [40.0] * 5 + [40.3] * 5 + [0.0] * 5)
    assert Sampler(clock, lambda: [lambda: None]).warm_up() == 40.3
    assert len(clock.head_starts) == 4 * timer.GROUP


def test_one_slow_sample_does_not_prolong_warm_up():
    clock = FakeClock(us=[40.0, 40.0, 900.0, 40.0, 40.0])
    assert Sampler(clock, lambda: [lambda: None]).warm_up() == 40.0
    assert len(clock.head_starts) == 2 * timer.GROUP


def test_warm_up_ends_even_if_no_two_groups_agree(ticks):
    clock = FakeClock(us=(2.0**-n for n in count()))
    assert Sampler(clock, lambda: [lambda: None]).warm_up() > 0
    assert timer.GROUP < len(clock.head_starts) < 10 * timer.GROUP


def test_keep_receives_the_results_of_the_sample():
    sampler = Sampler(FakeClock(), lambda: [lambda: "first", lambda: "second"])
    assert sampler.sample(keep=lambda results: results).kept == ["first", "second"]
    assert sampler.sample().kept is None


def test_the_host_timer_times_the_calls_alone(ticks):
    made = []
    calls = [lambda: made.append("call") or len(made)] * 4
    taken = HostTimer().sample(calls, 1e9, keep=lambda results: made.append("keep") or results)
    assert taken == Sample(pytest.approx(0.1e6 / 4), True, [1, 2, 3, 4])
    assert made == ["call"] * 4 + ["keep"]
    assert HostTimer().sample([], 0.0).us == pytest.approx(0.1e6)
    assert isinstance(timer_for("cpu"), HostTimer)


def test_the_floor_is_the_median_of_empty_samples():
    clock = FakeClock(us=[1.0, 2.0, 99.0])
    assert floor_us(clock) == 2.0
    assert set(clock.counts) == {0}


def test_interleaving_returns_every_sample_of_every_call():
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    order: list[str] = []
    taken = interleave(FakeClock(us=count(1)), calls, 9)
    assert {name: len(samples) for name, samples in taken.items()} == dict.fromkeys("abc", 9)
    timed = order[-27:]
    assert all(set(timed[n : n + 3]) == set("abc") for n in range(0, 27, 3))
    ordered = sorted((us, name) for name, samples in taken.items() for us in samples)
    assert [name for _, name in ordered] == timed, "a sample is returned under the name of its call"


def test_host_time_of_a_call_after_synchronization_without_garbage_collection(ticks):
    clock, collects = FakeClock(), []
    sampler = Sampler(clock, lambda: [lambda: collects.append(gc.isenabled())] * 8)
    assert gc.isenabled()
    assert sampler.host_us() == pytest.approx(0.1e6)
    assert gc.isenabled()
    assert collects == [False] * 24, "whole samples, at least HOST_CALLS calls"
    assert clock.synchronized == 25


def test_host_time_back_to_back_is_of_the_second_of_two_calls(ticks):
    clock, calls = FakeClock(), count()

    def slow_after_synchronization():
        if next(calls) % 2 == 0:
            next(ticks)

    sampler = Sampler(clock, lambda: [slow_after_synchronization])
    assert sampler.host_us(back_to_back=True) == pytest.approx(0.1e6)
    assert next(calls) == 40
    assert clock.synchronized == 21


def test_host_time_is_the_minimum_of_several_calls(ticks):
    calls = count()

    def sometimes_slow():
        for _ in range(next(calls) % 3):
            next(ticks)

    assert Sampler(FakeClock(), lambda: [sometimes_slow]).host_us() == pytest.approx(0.1e6)


def test_garbage_collection_is_enabled_again_after_a_failed_call():
    def broken():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        Sampler(FakeClock(), lambda: [broken]).host_us()
    assert gc.isenabled()


def test_garbage_collection_stays_disabled_if_it_was():
    gc.disable()
    try:
        Sampler(FakeClock(), lambda: [lambda: None]).host_us()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_extra_bytes_are_of_one_call():
    assert Sampler(FakeClock(), lambda: [lambda: "four", lambda: "others"]).extra_bytes() == 4


@pytest.mark.parametrize(
    ("made", "peak", "extra"),
    [
        (lambda x: x, 400, 0),
        (lambda x: x, 900, 500),
        (lambda x: [x, {"view": x[50:], "none": None, "number": 3}], 900, 500),  # one storage, counted once
        (lambda x: (x, torch.ones(25)), 900, 400),
        (lambda x: None, 900, 900),
        (lambda x: x, 300, 0),
    ],
)
def test_extra_bytes_exclude_what_is_returned(monkeypatch, made, peak, extra):
    """The fake allocator holds 1000 bytes before the call and `peak` more during it."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000 + peak)
    assert object.__new__(Timer).extra_bytes(lambda: made(torch.ones(100))) == extra


@pytest.mark.gpu
def test_the_floor_is_below_ten_microseconds():
    assert 0 < floor_us(Timer()) < 10


@pytest.mark.gpu
def test_samples_are_queued_and_exclude_host_time():
    x = torch.randn(2**26, device="cuda")
    sampler = Sampler(Timer(), lambda: [lambda: x + 1])
    us = sampler.warm_up()
    samples = [sampler.sample() for _ in range(20)]
    assert all(sample.is_queued for sample in samples)
    assert 2 * x.nbytes / 10e12 < us * 1e-6 < 2 * x.nbytes / 0.1e12


@pytest.mark.gpu
def test_a_call_that_synchronizes_is_marked_as_not_queued():
    x = torch.randn(2**20, device="cuda")
    sampler = Sampler(Timer(), lambda: [lambda: x.sum().item()])
    sampler.warm_up()
    assert not any(sampler.sample().is_queued for _ in range(5))


@pytest.mark.gpu
def test_a_small_read_is_slower_from_dram_than_from_the_l2():
    x = torch.randn(2**22, device="cuda")  # 16 MB, which fits an L2 of 24 MB or more
    total = torch.empty((), device="cuda")
    times = {}
    for flush in ("read", "none"):
        (samples,) = Timer(flush=flush).interleave({"sum": lambda: torch.sum(x, dim=0, out=total)}, 30).values()
        times[flush] = sorted(samples)[15]
    assert times["read"] > 1.1 * times["none"]


@pytest.mark.gpu
def test_without_queueing_the_host_is_timed():
    x = torch.randn(16, device="cuda")
    calls = [lambda: x + 1] * 20
    times = {queues: Sampler(Timer(queues=queues), lambda: calls).warm_up() for queues in (True, False)}
    assert times[True] < times[False]


@pytest.mark.gpu
def test_results_are_copied_before_the_next_sample_can_change_them():
    buffer = torch.zeros(2**20, device="cuda")
    sampler = Sampler(Timer(), lambda: [lambda: buffer.add_(1)])
    sampler.warm_up()
    kept = [sampler.sample(keep=lambda results: results[0].clone()).kept for _ in range(3)]
    first = float(kept[0][0])
    assert [float(k.min()) for k in kept] == [first, first + 1, first + 2]


@pytest.mark.gpu
def test_extra_bytes_on_a_gpu():
    x = torch.randn(2**20, device="cuda")
    assert Timer().extra_bytes(lambda: x + 1) == 0
    assert Timer().extra_bytes(lambda: (x + 1) * 2) == x.nbytes


def test_inputs_are_filled_before_the_clock_starts(monkeypatch):
    order = []
    monkeypatch.setattr(timer.time, "perf_counter", lambda: order.append("clock") or 0.0)
    HostTimer().sample([lambda: order.append("call")], 0.0, lambda: order.append("fill"))
    assert order == ["fill", "clock", "call", "clock"]

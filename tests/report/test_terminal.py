"""Timings in a terminal: the table, and the notes below it."""

import io

import pytest
from rich.console import Console

from sample_records import timing_record
from tilewright.cost import amount, size
from tilewright.report import terminal
from tilewright.report.timings import timing_rows


def printed(renderable, width: int = 300) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def shown(*records) -> str:
    return printed(terminal.timings(list(timing_rows(list(records))), "a title"))


def conditions(*records, **state) -> str:
    return printed(terminal.conditions(list(records), state))


def line(text: str, word: str) -> str:
    (found,) = [line for line in text.splitlines() if word in line]
    return found


def timing(kernel: str, us: float | None, low: float = 0.0, high: float = 0.0, **more):
    timer = {"floor_us": 2.5, "overhead_us": 40.0, "unqueued": 0}
    interval = {"interval_us": [low, high]} if high else {}
    return timing_record(kernel, us, **{"timer": timer} | interval | more)


def test_a_row_has_every_figure_of_a_kernel():
    against = {"kernel": "eager", "ratio": 1.5, "interval": [1.4, 1.6]}
    text = shown(timing("triton", 2.0, 1.94, 2.06, against=against, extra_bytes=4096, host_us=7.4))
    assert "a title" in text
    assert "vs eager" in text
    cells = (
        "triton ★",
        "2.00",
        "1.94 – 2.06",
        "1,000",
        "50",
        "1.50x",
        "0.00410",
        "7.40",
        "right",
    )
    found = line(text, "triton")
    places = [found.index(cell) for cell in cells]
    assert places == sorted(places)
    header = line(text, "kernel")
    assert "GB/s" in header
    assert "extra MB" in header
    assert "M=3, N=50 float32" in text


def test_a_narrow_terminal_drops_the_least_important_columns():
    row = timing("triton", 2.0, 1.94, 2.06, extra_bytes=4096, host_us=7.4)
    text = printed(terminal.timings(list(timing_rows([row])), "a title", 60), 60)
    assert all(cell in text for cell in ("M=3, N=50 float32", "triton ★", "2.00", "50", "right"))
    assert "0.00410" not in text
    assert max(map(len, text.splitlines())) <= 60


def test_the_fastest_is_starred_and_ties_are_marked():
    text = shown(timing("eager", 4.0, 3.9, 4.1), timing("triton", 2.0, 1.9, 2.1), timing("cuda", 2.1, 2.0, 2.2))
    assert "triton ≈" in text
    assert "cuda ≈" in text
    assert "★" not in text
    text = shown(timing("eager", 4.0, 3.9, 4.1), timing("triton", 2.0, 1.9, 2.1))
    assert "triton ★" in text
    assert "≈" not in text


def test_a_loss_names_the_baseline():
    text = shown(timing("eager", 1.0, 0.9, 1.1), timing("triton", 2.0, 1.9, 2.1), timing("cuda", 3.0, 2.9, 3.1))
    assert "eager ★" in text
    assert "right, loses to eager (0.50x)" in line(text, "triton")
    assert text.count("loses to") == 1
    old = timing("triton", 2.0, 1.9, 2.1) | {"source": "0" * 16}
    assert "(0.50x), stale" in shown(timing("eager", 1.0, 0.9, 1.1), old)


def test_a_call_that_runs_torch_is_marked():
    text = shown(timing("eager", 1.0, 0.9, 1.1), timing("triton", 2.0, 1.9, 2.1, is_torchs=True))
    assert "right, runs torch, loses to eager" in line(text, "triton")
    assert text.count("runs torch") == 1


def test_a_kernel_without_a_time_has_a_reason_below():
    text = shown(timing("eager", 1.0), timing("triton", None, verdict="implausible", reason="too fast"))
    assert "triton: implausible, too fast" in text
    assert line(text, "triton  ").split()[:2] == ["triton", "-"]


def test_directions_other_than_forward_are_named():
    text = shown(
        timing("eager", 1.0), timing("eager", 2.0, direction="backward"), timing("eager", 3.0, direction="both")
    )
    assert "M=3, N=50 float32 backward" in text
    assert "M=3, N=50 float32 both" in text
    assert "float32 forward" not in text


def test_a_stale_record_is_marked():
    text = shown(timing("eager", 1.0) | {"source": "0" * 16})
    assert "right, stale" in text
    assert "the source of the kernel changed after the measurement" in text
    assert "stale" not in shown(timing("eager", 1.0))


def test_a_speedup_over_another_baseline_names_it():
    one, other = ({"kernel": kernel, "ratio": 2.0, "interval": [2.0, 2.0]} for kernel in ("eager", "compile"))
    text = shown(timing("triton", 1.0, against=one), timing("cuda", 3.0, against=other))
    assert "vs eager" in text
    assert "2.00x compile" in line(text, "cuda")
    assert "2.00x eager" not in text


def test_calls_back_to_back_are_starred_and_explained():
    many = timing("triton", 2.0, calls=16)
    assert "2.00*" in shown(many)
    assert "* several calls back to back" in conditions(many)
    assert "*" not in shown(timing("triton", 2.0)) + conditions(timing("triton", 2.0))


def test_ceilings_are_compared_with_the_datasheet():
    measured = {"copy": 4.0e12, "read": 2.4e12, "fp32": 33.45e12, "odd": 1e12}
    text = conditions(timing("triton", 2.0, ceilings=measured))
    assert "read 2,400 GB/s (50%)" in text
    assert "fp32 33.5 TFLOP/s (50%)" in text or "fp32 33.4 TFLOP/s (50%)" in text
    assert "odd 1.0 TFLOP/s" in text
    assert "(" not in text.partition("odd")[2].partition("Timer")[0]
    assert "%" not in conditions(timing("triton", 2.0, gpu="unheard-of", ceilings=measured))


def test_the_overhead_of_the_timer_is_named():
    overheads = [{"floor_us": 2.5, "overhead_us": us, "unqueued": 0} for us in (10.0, 30.0, 500.0)]
    text = conditions(*(timing("triton", 2.0, timer=timer) for timer in overheads))
    assert "2.5 us apart" in text
    assert "each sample adds 30 us of overhead" in text


def test_kernels_whose_samples_include_host_time_are_named():
    late = {"floor_us": 2.5, "overhead_us": 40.0, "unqueued": 3}
    text = conditions(timing("triton", 2.0), timing("b.py", 2.0, timer=late), timing("a.py", 2.0, timer=late))
    assert "Samples of a.py, b.py include host time:" in text
    assert "host time" not in conditions(timing("triton", 2.0))


def test_throttled_timings_are_counted():
    throttled = timing("triton", 2.0, state={"throttled": ["power cap", "heat"]})
    text = conditions(timing("eager", 2.0, state={"throttled": []}), throttled, timing("cuda", None))
    assert "Throttled (heat, power cap) in 1 of 2 timings, after a second attempt." in text
    assert "Throttled" not in conditions(timing("eager", 2.0, state={"throttled": []}))


def test_throttled_ceilings_are_named():
    text = conditions(timing("eager", 2.0), throttled=["power cap"])
    assert "Throttled (power cap) while the ceilings were measured" in text
    assert "attempt" not in text
    assert "Throttled" not in conditions(timing("eager", 2.0), throttled=[])


def test_records_of_schema_1_have_fewer_figures():
    old = timing("triton", 2.0, timer={}, interval_us=None, host_us=None, extra_bytes=None)
    assert "Measured ceilings" in conditions(old)
    assert "Timer" not in conditions(old)
    assert "2.00" in shown(old)
    assert not conditions().strip()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "0.000999"), (4096, "0.00410"), (33_554_432, "33.6"), (2.5e9, "2,500")]
)
def test_extra_memory_is_in_megabytes(count, text):
    assert text in line(shown(timing("triton", 7.7, extra_bytes=count)), "triton").split()


@pytest.mark.parametrize(
    ("count", "bytes_", "operations"),
    [(0, "0 B", "0"), (999, "999 B", "999"), (10240, "10.2 KB", "10.2 K"), (1.1e12, "1100.0 GB", "1.1 T")],
)
def test_byte_and_operation_counts_have_the_same_form(count, bytes_, operations):
    assert (size(count), amount(count)) == (bytes_, operations)

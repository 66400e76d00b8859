"""Timings in a terminal: what stands in the table, and what is said below it."""

import io

import pytest
from rich.console import Console

from support import timing_record
from tilewright.cost import amount, size
from tilewright.report import terminal
from tilewright.report.timings import timing_rows
from tilewright.spec import Case, Cost


def printed(renderable, width: int = 300) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def shown(*records) -> str:
    return printed(terminal.timings(list(timing_rows(list(records))), "a title"))


def said(*records, **state) -> str:
    return printed(terminal.conditions(list(records), state))


def line(text: str, word: str) -> str:
    (found,) = [line for line in text.splitlines() if word in line]
    return found


def timing(kernel: str, us: float | None, low: float = 0.0, high: float = 0.0, **more):
    timer = {"floor_us": 2.5, "overhead_us": 40.0, "unqueued": 0}
    interval = {"interval_us": [low, high]} if high else {}
    return timing_record(kernel, us, **{"timer": timer} | interval | more)


def test_a_line_says_all_of_a_kernel():
    against = {"kernel": "eager", "ratio": 1.5, "interval": [1.4, 1.6]}
    text = shown(timing("triton", 2.0, 1.94, 2.06, against=against, extra_bytes=4096, host_us=7.4))
    assert "a title" in text
    assert "vs eager" in text
    cells = (
        "triton ★",
        "2.0 us",
        "1.9–2.1",
        "1000 GB/s",
        "50%",
        "1.50x",
        "4.1 KB",
        "7 us",
        "right",
    )
    found = line(text, "triton")
    places = [found.index(cell) for cell in cells]
    assert places == sorted(places)
    assert "M=3, N=50 float32" in text


def test_a_narrow_terminal_loses_what_matters_least():
    row = timing("triton", 2.0, 1.94, 2.06, extra_bytes=4096, host_us=7.4)
    text = printed(terminal.timings(list(timing_rows([row])), "a title", 60), 60)
    assert all(cell in text for cell in ("M=3, N=50 float32", "triton ★", "2.0 us", "50%", "right"))
    assert "4.1 KB" not in text
    assert max(map(len, text.splitlines())) <= 60


def test_the_fastest_is_starred_and_ties_are_marked_as_such():
    text = shown(timing("eager", 4.0, 3.9, 4.1), timing("triton", 2.0, 1.9, 2.1), timing("cuda", 2.1, 2.0, 2.2))
    assert "triton ≈" in text
    assert "cuda ≈" in text
    assert "★" not in text
    text = shown(timing("eager", 4.0, 3.9, 4.1), timing("triton", 2.0, 1.9, 2.1))
    assert "triton ★" in text
    assert "≈" not in text


def test_a_loss_is_said_plainly():
    text = shown(timing("eager", 1.0, 0.9, 1.1), timing("triton", 2.0, 1.9, 2.1), timing("cuda", 3.0, 2.9, 3.1))
    assert "eager ★" in text
    assert "right, loses here: eager takes 0.50 of its time" in line(text, "triton")
    assert text.count("loses here") == 1
    old = timing("triton", 2.0, 1.9, 2.1) | {"source": "0" * 16}
    assert "of its time, stale" in shown(timing("eager", 1.0, 0.9, 1.1), old)


def test_work_that_torch_does_is_said_to_be_torchs():
    text = shown(timing("eager", 1.0, 0.9, 1.1), timing("triton", 2.0, 1.9, 2.1, is_torchs=True))
    assert "right, by torch, loses here: eager" in line(text, "triton")
    assert text.count("by torch") == 1


def test_what_has_no_time_has_a_reason_below():
    text = shown(timing("eager", 1.0), timing("triton", None, verdict="implausible", reason="too fast"))
    assert "triton: implausible, too fast" in text
    assert line(text, "triton  ").split()[:2] == ["triton", "-"]


def test_directions_but_forward_are_named():
    text = shown(
        timing("eager", 1.0), timing("eager", 2.0, direction="backward"), timing("eager", 3.0, direction="both")
    )
    assert "M=3, N=50 float32 backward" in text
    assert "M=3, N=50 float32 both" in text
    assert "float32 forward" not in text


def test_a_stale_record_is_said_to_be():
    text = shown(timing("eager", 1.0) | {"source": "0" * 16})
    assert "right, stale" in text
    assert "the kernel's source has changed" in text
    assert "stale" not in shown(timing("eager", 1.0))


def test_a_speed_held_against_another_kernel_than_the_rest_says_so():
    one, other = ({"kernel": kernel, "ratio": 2.0, "interval": [2.0, 2.0]} for kernel in ("eager", "compile"))
    text = shown(timing("triton", 1.0, against=one), timing("cuda", 3.0, against=other))
    assert "vs eager" in text
    assert "2.00x compile" in line(text, "cuda")
    assert "2.00x eager" not in text


def test_calls_back_to_back_are_starred_and_explained():
    many = timing("triton", 2.0, calls=16)
    assert "2.0 us*" in shown(many)
    assert "* back to back" in said(many)
    assert "*" not in shown(timing("triton", 2.0)) + said(timing("triton", 2.0))


def test_ceilings_stand_beside_the_datasheet():
    measured = {"copy": 4.0e12, "read": 2.4e12, "fp32": 33.45e12, "odd": 1e12}
    text = said(timing("triton", 2.0, ceilings=measured))
    assert "read 2400 GB/s (50%)" in text
    assert "fp32 33.5 T/s (50%)" in text or "fp32 33.4 T/s (50%)" in text
    assert "odd 1.0 T/s" in text
    assert "(" not in text.partition("odd")[2].partition("Timer")[0]
    assert "%" not in said(timing("triton", 2.0, gpu="unheard-of", ceilings=measured))


def test_what_the_timer_itself_takes():
    overheads = [{"floor_us": 2.5, "overhead_us": us, "unqueued": 0} for us in (10.0, 30.0, 500.0)]
    text = said(*(timing("triton", 2.0, timer=timer) for timer in overheads))
    assert "2.5 us apart" in text
    assert "a sample costs 30 us beside what it times" in text


def test_kernels_whose_host_time_shows_are_named():
    late = {"floor_us": 2.5, "overhead_us": 40.0, "unqueued": 3}
    text = said(timing("triton", 2.0), timing("b.py", 2.0, timer=late), timing("a.py", 2.0, timer=late))
    assert "Host time is in samples of a.py, b.py:" in text
    assert "Host time" not in said(timing("triton", 2.0))


def test_throttling_is_told_of_timings():
    held = timing("triton", 2.0, state={"throttled": ["power cap", "heat"]})
    text = said(timing("eager", 2.0, state={"throttled": []}), held, timing("cuda", None))
    assert "Throttled by heat, power cap in 1 of 2 timings, each of which was measured again." in text
    assert "Throttled" not in said(timing("eager", 2.0, state={"throttled": []}))


def test_throttling_is_told_of_ceilings_apart():
    text = said(timing("eager", 2.0), throttled=["power cap"])
    assert "Throttled by power cap while the ceilings were measured" in text
    assert "measured again" not in text
    assert "Throttled" not in said(timing("eager", 2.0), throttled=[])


def test_records_of_an_earlier_version_say_what_they_know():
    old = timing("triton", 2.0, timer={}, interval_us=None, host_us=None, extra_bytes=None)
    assert "Ceilings measured" in said(old)
    assert "Timer" not in said(old)
    assert "2.0 us" in shown(old)
    assert not said().strip()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (4096, "4.1 KB"), (33_554_432, "33.6 MB"), (2.5e9, "2.5 GB")]
)
def test_bytes(count, text):
    assert text in shown(timing("triton", 1.0, extra_bytes=count))


def test_floors_name_what_binds():
    case = Case((("M", 3), ("N", 50)), "float32")
    table = terminal.floors([("softmax", case, "both", Cost(2 * 10**6, 10**6), "copy", 1.5e-6)], "a title")
    text = printed(table)
    found = line(text, "softmax")
    for cell in ("M=3,N=50 float32", "both", "2.0 MB", "1.0 MB", "1.5 us", "copy"):
        assert cell in found


@pytest.mark.parametrize(
    ("count", "bytes_", "operations"),
    [(0, "0 B", "0"), (999, "999 B", "999"), (10240, "10.2 KB", "10.2 K"), (1.1e12, "1100.0 GB", "1.1 T")],
)
def test_counts_are_written_alike(count, bytes_, operations):
    assert (size(count), amount(count)) == (bytes_, operations)

"""The roofline in characters: positions of ceilings, marks and labels."""

import pytest

from tilewright.report.ascii_roofline import HEIGHT, Mark, roofline

BANDWIDTH = 4e12
PEAKS = {"fp32": 64e12, "tensor.bfloat16": 800e12}


def drawn(marks=(), peaks=PEAKS, legend=None, width=100) -> list[str]:
    return roofline(BANDWIDTH, peaks, list(marks), legend or {}, width).splitlines()


def row_of(lines: list[str], text: str) -> int:
    (row,) = [row for row, line in enumerate(lines) if text in line]
    return row


def test_ceilings_are_labelled_with_the_highest_on_top():
    lines = drawn()
    high, low = row_of(lines, "tensor.bfloat16 800 T"), row_of(lines, "fp32 64 T")
    assert high < low < HEIGHT
    assert lines[high].index("─") > lines[low].index("─"), "the faster unit stays memory-bound up to a higher intensity"
    assert row_of(lines, "100 T/s │") in range(high, low)


def test_the_slope_ends_at_the_highest_ceiling():
    lines = drawn()[:HEIGHT]
    begins = [line.index("·") for line in lines if "·" in line]
    assert begins == sorted(begins, reverse=True)
    assert row_of(lines, "tensor.bfloat16") <= min(row for row, line in enumerate(lines) if "·" in line)


@pytest.mark.parametrize("width", [60, 100, 160])
def test_marks_are_drawn_on_a_ceiling_and_on_the_slope(width):
    bare = drawn(width=width)
    lines = drawn([Mark(500.0, 800e12, "X"), Mark(4.0, 16e12, "Y")], width=width)
    assert row_of(lines, "X") == row_of(bare, "tensor.bfloat16")
    row = row_of(lines, "Y")
    column = lines[row].index("Y")
    assert "·" in bare[row][column - 1 : column + 2]


def test_later_marks_cover_earlier_ones():
    (line,) = [line for line in drawn([Mark(100.0, 1e12, "a"), Mark(100.0, 1e12, "A")]) if "A" in line]
    assert "a" not in line


def test_units_with_the_same_rate_share_a_label():
    lines = drawn(peaks={"tensor.bfloat16": 800e12, "tensor.float16": 800e12})
    assert "tensor.bfloat16 800 T tensor.float16 800 T" in lines[row_of(lines, "float16 800 T")]
    assert max(map(len, lines[:HEIGHT])) <= 100


@pytest.mark.parametrize("width", [1, 40, 80, 200])
def test_the_chart_fits_the_console_down_to_a_minimum_width(width):
    lines = drawn([Mark(1e-6, 1.0, "a"), Mark(1e6, 1e15, "b")], width=width)
    assert max(map(len, lines[:HEIGHT])) <= max(width, 55)
    assert sum(line.partition("│")[2].count("a") for line in lines[:HEIGHT]) >= 1


def test_the_horizontal_axis_has_powers_of_two_and_a_legend_below():
    lines = drawn([Mark(1 / 8, 5e11, "A")], legend={"A": "add", "+": "the sweep"})
    assert "┴" in lines[HEIGHT]
    assert "1/8" in lines[HEIGHT + 1]
    assert "128" in lines[HEIGHT + 1]
    assert lines[HEIGHT + 2] == "  A add   + the sweep"

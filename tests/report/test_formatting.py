"""Numbers, labels, tables and provenance lines of every report."""

import pytest

from tilewright.report.formatting import date_range, digits, op_label, provenance, table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0, "0"),
        (2363.4, "2,360"),
        (999.6, "1,000"),
        (99.96, "100"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (1.0, "1.00"),
        (0.04996, "0.0500"),
        (0.000999, "0.000999"),
        (1.5e9, "1,500,000,000"),
    ],
)
def test_numbers_have_three_significant_digits_and_no_exponent(value, text):
    assert digits(value) == text


def test_more_digits():
    assert digits(18.0249, 4) == "18.02"


def test_forward_is_the_default_direction():
    labels = [op_label("relu", direction) for direction in ("forward", "backward", "both")]
    assert labels == ["relu", "relu backward", "relu forward + backward"]


def test_columns_are_right_aligned_on_request():
    assert table(("op", ">us"), [("relu", "1.00")]) == "| op | us |\n| --- | --: |\n| relu | 1.00 |"


def made(date: str, name: str = "NVIDIA H200", triton: str = "3.6.0"):
    return {"date": f"{date}T00:00:00", "device": {"name": name}, "versions": {"triton": triton}}


def test_provenance_has_a_line_per_device_and_versions_with_the_range_of_dates():
    records = [made("2026-01-03"), made("2026-01-02"), made("2026-01-02", "NVIDIA L4"), made("2026-01-05", triton="4")]
    assert provenance("Measured on", records, "triton", note="; bfloat16") == [
        "Measured on NVIDIA H200, 2026-01-02 to 2026-01-03, triton 3.6.0; bfloat16.",
        "Measured on NVIDIA L4, 2026-01-02, triton 3.6.0; bfloat16.",
        "Measured on NVIDIA H200, 2026-01-05, triton 4; bfloat16.",
    ]
    no_gpu = made("2026-01-02") | {"device": {}}
    assert provenance("Checked on", [no_gpu]) == ["Checked on a machine without a GPU, 2026-01-02."]


def test_one_day_is_not_a_range():
    assert date_range(["2026-01-02", "2026-01-02"]) == "2026-01-02"

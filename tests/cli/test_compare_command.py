"""Tests of `tilewright compare` and `tilewright floor`."""

import json

import pytest

from cli.command import assert_one_line, in_process
from sample_records import timing_record
from tilewright import record
from tilewright.hardware import DATASHEETS


@pytest.fixture
def compare(monkeypatch, capsys):
    return in_process("compare", monkeypatch, capsys)


@pytest.fixture
def floor(monkeypatch, capsys):
    return in_process("floor", monkeypatch, capsys)


def test_compare_uses_all_samples(compare, tmp_path):
    samples = {"old": [100.0, 101.0, 99.0] * 7, "new": [130.0, 131.0, 129.0] * 7}
    for name, values in samples.items():
        record.append(tmp_path / f"{name}.jsonl", [timing_record("triton", values[0], samples_us=values)])
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    done = compare(old, new)
    assert done.returncode == 1
    assert "1 slower" in done.stdout
    assert "1.300" in done.stdout
    assert compare(new, old).returncode == 0
    assert compare(old, new, "--threshold", 0.5).returncode == 0


def test_compare_needs_two_files(compare):
    assert_one_line(compare("a.jsonl", "b.jsonl"), 2, "cannot read 'a.jsonl'")
    assert_one_line(compare("a.jsonl"), 2, "NEW", "See: tilewright compare --help")


def test_floor_of_every_direction(floor):
    done = floor("softmax", "--gpu", "a100-80gb", "--direction", "all")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    # 16384 rows of 4096 in bfloat16, read and written, at 2039 GB/s
    assert ["M=16384,N=4096", "bfloat16", "forward", "134.2", "MB", "134.2", "MB", "132", "memory"] in rows
    assert {row[2] for row in rows if "bfloat16" in row} == {"forward", "backward", "both"}


def test_a_small_floor_is_not_rounded_to_zero(floor):
    line = floor("dot", "--gpu", "h200", "--case", "N=4096").stdout.splitlines()[2]
    # 32 KiB at 4800 GB/s
    assert line.split()[-2] == "0.00683"


def test_floor_covers_every_benched_dtype(floor):
    lines = floor("adamw", "--gpu", "a100-80gb", "--json").stdout.splitlines()
    assert {json.loads(line)["dtype"] for line in lines} == {"bfloat16", "float32"}


def test_floors_of_several_gpus_come_in_order(floor):
    call = ("softmax", "--case", "M=8192,N=8192", "--gpu", "all", "--json")
    found = [json.loads(line) for line in floor(*call).stdout.splitlines()]
    assert {one["gpu"] for one in found} == set(DATASHEETS)
    assert [one["us"] for one in found] == sorted(one["us"] for one in found)
    priced = floor(*call, "--price", "t4=0.1", "--price", "h100=100").stdout.splitlines()
    assert [json.loads(line)["gpu"] for line in priced[:2]] == ["t4", "h100-sxm"], "by price, then by time"
    assert json.loads(priced[0])["price_per_million_calls"] == pytest.approx(0.1 * 2**28 / 320e9 * 1e6 / 3600)
    assert "price_per_hour" not in json.loads(priced[-1])


def test_a_unit_without_a_rate_has_no_floor(floor):
    """A V100 has no bfloat16 tensor cores: its memory alone would make it look fast."""
    done = floor("linear", "--gpu", "v100", "--gpu", "h100", "--case", "M=4096,N=4096,K=4096,relu=True")
    assert "not available  no rate of tensor.bfloat16 on the datasheet" in done.stdout


def test_floor_as_json(floor):
    done = floor("softmax", "--gpu", "a100", "--json", "--case", "M=1024,N=1024", "-d", "float32")
    (found,) = map(json.loads, done.stdout.splitlines())
    size = 4 * 2**20
    assert (found["kind"], found["gpu"], found["read"], found["written"]) == ("floor", "a100-80gb", size, size)
    assert found["us"] == pytest.approx(2 * size / 2039e9 * 1e6, rel=1e-3)
    assert found["bound_by"] == "copy"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("softmax",), "'--gpu'"),
        (("softmax", "--gpu", "a1000"), "did you mean 'a100"),
        (("softmax", "--gpu", "a100", "--price", "h100=2"), "h100-sxm is not one of the compared GPUs"),
        (("softmax", "--gpu", "a100", "--price", "a100=low"), "'a100=low' is not a price"),
        (("softmax", "--gpu", "a100", "--price", "a100=-1"), "-1 is not a positive price"),
        (("sofmax", "--gpu", "h200"), "did you mean 'softmax'"),
        (("softmax", "--gpu", "h200", "--direction", "up"), "not one of forward, backward, both, all"),
    ],
)
def test_mistakes_are_one_line(floor, arguments, words):
    assert_one_line(floor(*arguments), 2, words)

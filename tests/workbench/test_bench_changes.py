"""Tests of `tilewright compare` and of the comparison behind it."""

import json

import pytest
import typer

from sample_records import timing_record
from tilewright import record
from tilewright.cli.compare import compare as compare_files
from tilewright.errors import CannotRead, CorruptRecords, NewerRecords, NoCommonTimings, NoTimings
from tilewright.workbench.bench.changes import compare


def timing(us: float | None = 100.0, spread: float = 0.01, kernel: str = "triton", **more):
    """Return a timing record with samples evenly around a median."""
    samples = [us * (1 + spread * (n - 10) / 10) for n in range(21)] if us else []
    return timing_record(kernel, us, samples_us=samples, **more)


def verdict(old, new, threshold: float = 0.02) -> str:
    (change,) = compare([old], [new], threshold)
    return change.verdict


@pytest.mark.parametrize(("us", "expected"), [(120.0, "slower"), (80.0, "faster"), (100.5, "same"), (99.5, "same")])
def test_a_verdict_for_each_kernel(us, expected):
    (change,) = compare([timing()], [timing(us)])
    assert (change.verdict, change.old_us, change.new_us) == (expected, 100.0, us)
    assert change.ratio == pytest.approx(us / 100.0)
    assert change.interval
    assert change.interval[0] <= change.ratio <= change.interval[1]
    assert change.is_regression == (expected == "slower")


def test_a_difference_within_the_noise_is_the_same():
    assert verdict(timing(100.0, spread=0.5), timing(110.0, spread=0.5)) == "same"
    assert verdict(timing(100.0, spread=0.5), timing(90.0, spread=0.5)) == "same"


def test_a_difference_below_the_threshold_is_the_same():
    assert verdict(timing(), timing(105.0), threshold=0.1) == "same"
    assert verdict(timing(), timing(95.0), threshold=0.1) == "same"
    assert verdict(timing(), timing(105.0), threshold=0.0) == "slower"


def test_a_kernel_that_became_wrong_is_a_regression():
    (change,) = compare([timing()], [timing(None, verdict="wrong", reason="output[0] is 1")])
    assert (change.verdict, change.now, change.is_regression) == ("missing", "wrong, output[0] is 1", True)


def test_a_missing_timing_is_reported_and_no_regression():
    changes = compare([timing(), timing(kernel="eager")], [timing(), timing(kernel="cuda")])
    assert [(c.kernel, c.verdict, c.is_regression) for c in changes] == [
        ("triton", "same", False),
        ("eager", "missing", False),
        ("cuda", "new", False),
    ]


def test_a_kernel_without_a_time_in_either_file_is_omitted():
    wrong = timing(None, verdict="wrong", reason="")
    assert compare([wrong], [wrong]) == []
    assert compare([wrong, timing(kernel="eager")], [timing(), timing(kernel="eager")])[-1].verdict == "new"


def test_only_the_same_call_is_compared():
    old, other = timing(), {"M": 4, "N": 50}
    for more in ({"case": other}, {"dtype": "float16"}, {"direction": "backward"}, {"kernel": "eager"}):
        assert {c.verdict for c in compare([old], [timing(150.0, **more)])} == {"missing", "new"}


def test_single_calls_are_not_comparable_with_back_to_back_ones():
    (change,) = compare([timing(12.0)], [timing(9.0, calls=20)])
    assert (change.verdict, change.ratio, change.is_regression) == ("not comparable", None, False)
    (change,) = compare([timing(6.0, calls=20)], [timing(60.0)])
    assert change.is_regression, "no way of counting calls explains that"
    (change,) = compare([timing(6.0, calls=20)], [timing(None, verdict="wrong", reason="")])
    assert change.is_regression


def test_the_newest_timing_of_each_file_counts():
    late, early = timing(100.0) | {"date": "2030-01-01"}, timing(150.0) | {"date": "2020-01-01"}
    assert compare([timing()], [late, early])[0].verdict == "same"


def test_different_gpus_are_not_compared():
    changes = compare([timing(gpu="h200"), timing(gpu="l4")], [timing(gpu="h200"), timing(300.0, gpu="b200")])
    assert [c.gpu for c in changes] == ["h200"]


def test_regressions_are_first():
    old = [timing(kernel=name) for name in ("eager", "compile", "triton", "cuda")]
    new = [
        timing(kernel="eager"),
        timing(50.0, kernel="compile"),
        timing(150.0, kernel="triton"),
        timing(None, kernel="cuda", verdict="crashed", reason=""),
    ]
    assert [c.verdict for c in compare(old, new)] == ["slower", "missing", "faster", "same"]


@pytest.fixture
def files(tmp_path):
    def write(old, new):
        paths = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
        for path, records in zip(paths, (old, new), strict=True):
            record.append(path, records)
        return paths

    return write


def test_a_regression_is_shown_first_and_exits_with_1(files, capsys):
    old, new = files([timing(), timing(kernel="eager")], [timing(150.0), timing(kernel="eager")])
    with pytest.raises(typer.Exit) as end:
        compare_files(old, new, 0.02, as_json=False)
    assert end.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    first = next(line for line in lines if line.startswith(("slower", "same")))
    assert "triton" in first
    assert "1.500" in first
    assert "slower" in first
    assert "0 no longer correct, 1 slower, 0 faster, 1 same, 0 not comparable, 0 missing, 0 new" in lines
    assert lines[-1].startswith("Next: tilewright bench softmax -k triton --case M=3,N=50")


def test_without_a_regression_it_returns(files, capsys):
    old, new = files([timing(), timing(gpu="l4")], [timing(50.0)])
    compare_files(old, new, 0.02, as_json=False)
    printed = capsys.readouterr()
    assert "1 faster" in printed.out
    assert printed.err == "tilewright: only one of the files has timings on l4; not compared\n"


def test_json_lines(files, capsys):
    old, new = files([timing(), timing(kernel="eager")], [timing(150.0), timing(kernel="eager")])
    with pytest.raises(typer.Exit):
        compare_files(old, new, 0.02, as_json=True)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["verdict"], first["is_regression"], first["ratio"]) == ("slower", True, pytest.approx(1.5))
    assert (second["kernel"], second["verdict"], second["is_regression"]) == ("eager", "same", False)


NEWER = timing() | {"schema": record.SCHEMA + 1}
VERDICT = record.stamp("verdict", "softmax", "triton", "x")


@pytest.mark.parametrize(
    ("new", "error", "words"),
    [
        ([], NoTimings, "has no timings"),
        ([VERDICT], NoTimings, "has no timings"),
        ([timing(), NEWER], NewerRecords, "line 2 was written by a newer version"),
        ([timing(), {"no": "record"}], CorruptRecords, "line 2 is not a record"),
        ([timing(gpu="l4")], NoCommonTimings, r"\(on h200\) and .* \(on l4\) have no timing in common"),
        ([timing(dtype="float16")], NoCommonTimings, "no timing in common"),
    ],
)
def test_errors_are_one_line(files, new, error, words):
    with pytest.raises(error, match=words) as found:
        compare_files(*files([timing()], new), 0.02, as_json=False)
    assert "\n" not in str(found.value)


def test_a_missing_file_is_one_line(files, tmp_path):
    with pytest.raises(CannotRead, match=r"missing.jsonl.*No such file"):
        compare_files(files([timing()], [])[0], tmp_path / "missing.jsonl", 0.02, as_json=False)

"""Rows of timing records: who wins, ties and loses, and the share of the ceiling."""

import pytest

from sample_records import timing_record
from tilewright import record
from tilewright.report.timings import timing_rows


def timing(kernel: str, us: float | None, low: float = 0.0, high: float = 0.0, **more):
    """A timing of one case, with an interval if both ends are given."""
    interval = {"interval_us": [low, high]} if high else {}
    return timing_record(kernel, us, **{"case": {"N": 1}} | interval | more)


def placed(*records) -> dict[str, str]:
    return {row.kernel: row.place for row in timing_rows(list(records))}


def lost(*records) -> dict[str, str]:
    return {row.kernel: row.loses_to.kernel for row in timing_rows(list(records)) if row.loses_to}


def test_rows_are_grouped_by_case_fastest_first_and_backward_last():
    found = list(
        timing_rows(
            [
                timing("eager", 4.0, direction="both"),
                timing("eager", 4.0, direction="backward"),
                timing("eager", 4.0),
                timing("eager", 8.0, case={"N": 2}),
                timing("triton", 2.0),
                timing("broken", None, verdict="wrong", reason="because"),
            ]
        )
    )
    assert [(r.direction, r.case, r.kernel) for r in found] == [
        ("forward", "N=1", "triton"),
        ("forward", "N=1", "eager"),
        ("forward", "N=1", "broken"),
        ("forward", "N=2", "eager"),
        ("backward", "N=1", "eager"),
        ("both", "N=1", "eager"),
    ]
    best, _, broken = found[:3]
    assert (best.share, best.achieved, best.rate_unit, best.bound_by) == (0.5, 1000, "GB/s", "copy")
    assert (broken.us, broken.share, broken.achieved, broken.verdict) == (None, None, None, "wrong")
    assert broken.reason == "because"


def test_a_row_has_the_values_of_its_record():
    against = {"kernel": "compile", "ratio": 1.5, "interval": [1.4, 1.6]}
    content = {"against": against, "host_us": 7.0, "extra_bytes": 512, "calls": 16, "state": {"throttled": ["heat"]}}
    (row,) = timing_rows([timing("triton", 2.0, 1.5, 2.5, **content)])
    assert (row.speedup_over, row.speedup, row.speedup_interval) == ("compile", 1.5, (1.4, 1.6))
    assert (row.interval_us, row.host_us, row.extra_bytes, row.calls) == ((1.5, 2.5), 7.0, 512, 16)
    assert row.throttled == ("heat",)


def test_a_compute_bound_case_is_compared_with_the_tensor_cores():
    cost = {"read": 2, "written": 1, "flops": {"tensor.bfloat16": 989.4e12}}
    (row,) = timing_rows([timing("triton", 2e6, cost=cost)])
    assert (row.bound_by, row.rate_unit) == ("tensor.bfloat16", "TFLOP/s")
    assert row.achieved == pytest.approx(494.7)
    assert row.share == pytest.approx(0.5, rel=1e-3)


def test_the_fastest_wins_unless_intervals_overlap():
    eager, triton = timing("eager", 4.0, 3.9, 4.1), timing("triton", 2.0, 1.9, 2.1)
    assert placed(eager, triton) == {"triton": "wins", "eager": ""}
    near = timing("cuda", 2.2, 2.1, 2.3)
    assert placed(eager, triton, near) == {"triton": "ties", "cuda": "ties", "eager": ""}
    far = timing("cuda", 2.2, 2.11, 2.3)
    assert placed(eager, triton, far) == {"triton": "wins", "cuda": "", "eager": ""}


def test_without_intervals_no_kernel_wins():
    old = {"interval_us": None}
    assert placed(timing("eager", 2.01, **old), timing("triton", 2.0, **old)) == {"triton": "", "eager": ""}


def test_a_small_difference_between_two_runs_is_a_tie():
    narrow = lambda us: {"interval_us": [us - 0.001, us + 0.001]}
    mine, other = timing("triton", 2.0, **narrow(2.0)), timing("eager", 2.02, **narrow(2.02))
    assert placed(mine, other) == {"triton": "wins", "eager": ""}
    assert placed(mine, other | {"ceilings": {"copy": 2.1e12}}) == {"triton": "ties", "eager": "ties"}
    assert placed(mine | {"run": "a"}, other | {"run": "b"}) == {"triton": "ties", "eager": "ties"}, "reused ceilings"
    assert placed(mine | {"run": "a"}, other | {"run": "a"}) == placed(mine, other)


def test_a_kernel_without_a_time_has_no_place():
    assert placed(timing("triton", None, verdict="wrong"), timing("cuda", None)) == {"triton": "", "cuda": ""}


def test_each_case_gpu_dtype_and_direction_has_its_own_winner():
    apart = [{"case": {"N": 2}}, {"gpu": "l4"}, {"dtype": "float16"}, {"direction": "backward"}]
    for more in apart:
        found = list(timing_rows([timing("triton", 2.0), timing("cuda", 3.0, **more)]))
        assert [row.place for row in found] == ["wins", "wins"], more


def test_only_our_fastest_kernel_loses_and_only_to_a_baseline():
    eager, compiled = timing("eager", 1.0, 0.9, 1.1), timing("compile", 2.0, 1.9, 2.1)
    triton, cuda = timing("triton", 3.0, 2.9, 3.1), timing("cuda", 4.0, 3.9, 4.1)
    assert lost(eager, compiled, triton, cuda) == {"triton": "eager"}
    assert lost(compiled, triton, cuda) == {"triton": "compile"}
    assert lost(triton, cuda) == {}
    assert lost(timing("eager", 9.0), triton, cuda) == {}
    assert lost(timing("eager", 2.9, 2.8, 3.0), triton) == {}, "a tie is not a loss"
    assert lost(timing("liger", 1.0, 0.9, 1.1, is_baseline=True), triton, cuda) == {"triton": "liger"}
    assert lost(eager, timing("triton", None, verdict="wrong")) == {}


def test_baselines_of_schema_1_are_recognised_by_name(tmp_path):
    made = [timing("compile", 1.0), timing("cuda", 2.0)]
    old = [{k: v for k, v in r.items() if k not in record.SINCE_2} | {"schema": 1} for r in made]
    record.append(tmp_path / "old.jsonl", old)
    found = list(timing_rows(record.read(tmp_path / "old.jsonl").records))
    assert [(row.kernel, row.is_baseline) for row in found] == [("compile", True), ("cuda", False)]

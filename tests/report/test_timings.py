"""What a reader wants of a record: who wins, who ties, who loses to what, and how far the ceiling is."""

import pytest

from support import timing_record
from tilewright import record
from tilewright.report.timings import timing_rows


def timing(kernel: str, us: float | None, low: float = 0.0, high: float = 0.0, **more):
    """Of one case; with an interval, if there is one."""
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
    assert (best.share, best.rate, best.binds) == (0.5, "1000 GB/s", "copy")
    assert (broken.us, broken.share, broken.rate, broken.verdict, broken.reason) == (None, None, "", "wrong", "because")


def test_what_a_record_says_is_what_a_row_says():
    against = {"kernel": "compile", "ratio": 1.5, "interval": [1.4, 1.6]}
    content = {"against": against, "host_us": 7.0, "extra_bytes": 512, "calls": 16, "state": {"throttled": ["heat"]}}
    (row,) = timing_rows([timing("triton", 2.0, 1.5, 2.5, **content)])
    assert (row.against, row.ratio, row.ratio_interval) == ("compile", 1.5, (1.4, 1.6))
    assert (row.interval_us, row.host_us, row.extra_bytes, row.calls) == ((1.5, 2.5), 7.0, 512, 16)
    assert row.throttled == ("heat",)


def test_a_product_of_matrices_is_held_against_the_matrix_unit():
    cost = {"read": 2, "written": 1, "flops": {"tensor.bfloat16": 989.4e12}}
    (row,) = timing_rows([timing("triton", 2e6, cost=cost)])
    assert (row.binds, row.rate) == ("tensor.bfloat16", "495 TFLOP/s")
    assert row.share == pytest.approx(0.5, rel=1e-3)


def test_the_fastest_wins_unless_others_are_as_fast_for_all_one_knows():
    eager, triton = timing("eager", 4.0, 3.9, 4.1), timing("triton", 2.0, 1.9, 2.1)
    assert placed(eager, triton) == {"triton": "wins", "eager": ""}
    near = timing("cuda", 2.2, 2.1, 2.3)
    assert placed(eager, triton, near) == {"triton": "ties", "cuda": "ties", "eager": ""}
    far = timing("cuda", 2.2, 2.11, 2.3)
    assert placed(eager, triton, far) == {"triton": "wins", "cuda": "", "eager": ""}


def test_without_intervals_nobody_wins():
    old = {"interval_us": None}
    assert placed(timing("eager", 2.01, **old), timing("triton", 2.0, **old)) == {"triton": "", "eager": ""}


def test_runs_may_differ_by_more_than_their_intervals_say():
    narrow = lambda us: {"interval_us": [us - 0.001, us + 0.001]}
    mine, other = timing("triton", 2.0, **narrow(2.0)), timing("eager", 2.02, **narrow(2.02))
    assert placed(mine, other) == {"triton": "wins", "eager": ""}
    assert placed(mine, other | {"ceilings": {"copy": 2.1e12}}) == {"triton": "ties", "eager": "ties"}


def test_what_has_no_time_has_no_place():
    assert placed(timing("triton", None, verdict="wrong"), timing("cuda", None)) == {"triton": "", "cuda": ""}


def test_cases_gpus_dtypes_and_directions_are_won_apart():
    apart = [{"case": {"N": 2}}, {"gpu": "l4"}, {"dtype": "float16"}, {"direction": "backward"}]
    for more in apart:
        found = list(timing_rows([timing("triton", 2.0), timing("cuda", 3.0, **more)]))
        assert [row.place for row in found] == ["wins", "wins"], more


def test_only_the_best_of_ours_loses_and_only_to_what_one_could_use_otherwise():
    eager, compiled = timing("eager", 1.0, 0.9, 1.1), timing("compile", 2.0, 1.9, 2.1)
    triton, cuda = timing("triton", 3.0, 2.9, 3.1), timing("cuda", 4.0, 3.9, 4.1)
    assert lost(eager, compiled, triton, cuda) == {"triton": "eager"}
    assert lost(compiled, triton, cuda) == {"triton": "compile"}
    assert lost(triton, cuda) == {}
    assert lost(timing("eager", 9.0), triton, cuda) == {}
    assert lost(timing("eager", 2.9, 2.8, 3.0), triton) == {}, "a tie is no loss"
    assert lost(timing("liger", 1.0, 0.9, 1.1, is_baseline=True), triton, cuda) == {"triton": "liger"}
    assert lost(eager, timing("triton", None, verdict="wrong")) == {}


def test_records_of_an_earlier_version_do_not_say_what_is_ours(tmp_path):
    made = [timing("compile", 1.0), timing("cuda", 2.0)]
    old = [{k: v for k, v in r.items() if k not in record.SINCE_2} | {"schema": 1} for r in made]
    record.append(tmp_path / "old.jsonl", old)
    found = list(timing_rows(record.read(tmp_path / "old.jsonl").records))
    assert [(row.kernel, row.is_baseline) for row in found] == [("compile", True), ("cuda", False)]

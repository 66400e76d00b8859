"""Summaries of random cases: the share of losses, the worst cases, the geometric mean."""

import math

from sample_records import DRAWN, timing_record
from tilewright import record
from tilewright.report import site
from tilewright.report.drawn import ALL, line, notes, summaries


def drawn(kernel, us, n, op="softmax", **more):
    content = {"case": {"M": 3, "N": n}, "is_baseline": kernel != "tilewright"}
    return timing_record(kernel, us, **content | more) | DRAWN | {"op": op}


RECORDS = [
    drawn("tilewright", 10.0, 1),
    drawn("eager", 20.0, 1),
    drawn("compile", 5.0, 1),
    drawn("tilewright", 10.0, 2),
    drawn("eager", 40.0, 2),
    drawn("tilewright", 10.1, 3),
    drawn("eager", 10.0, 3),
    drawn("tilewright", None, 4, verdict="wrong"),
    drawn("eager", 10.0, 4),
]


def test_the_best_baseline_decides():
    (summary,) = summaries([*RECORDS, timing_record("eager")])
    assert [(one.ours["case"]["N"], one.best["kernel"]) for one in summary.results] == [
        (1, "compile"),
        (3, "eager"),
        (2, "eager"),
    ]
    assert (summary.lost, summary.lost_much, summary.untimed) == (1, 1, 1), "1 % is no loss"
    assert summary.seconds == {"samples": 4.0}, "once per case, not per kernel"
    assert math.isclose(summary.geometric_mean, (0.5 * 4 / 1.01) ** (1 / 3))
    assert summary.sentence().startswith("1 of 3 cases (33 %) lose more than 2 %")
    assert summary.sentence().endswith("(seed 7)")
    assert "M=3,N=1 float32 padded" in summary.results[0].case


def test_small_cases_are_also_compared_in_a_loop_of_calls():
    """A call of compile takes the host 50 us, so its kernel of 5 us is no faster there."""
    records = [RECORDS[0], RECORDS[1], RECORDS[2] | {"host_us": 50.0}, *RECORDS[3:5]]
    (summary,) = summaries(records)
    assert [one.is_lost for one in summary.results] == [True, False]
    assert [one.is_lost_in_a_loop for one in summary.results] == [False, False]
    assert (
        "smaller: 1 of 2 lose on the device, 0 in a loop of calls, where a call takes the host's time if that is longer"
        in notes(summary)
    )


def test_several_operations_have_a_summary_of_all():
    others = [drawn("tilewright", 10.0, 9, op="sum"), drawn("eager", 9.0, 9, op="sum")]
    everything, *each = summaries([*RECORDS, *others])
    assert (everything.op, [one.op for one in each]) == (ALL, ["softmax", "sum"])
    assert [one.ours["op"] for one in everything.results] == ["softmax", "sum", "softmax", "softmax"]
    assert (everything.lost, everything.lost_much) == (2, 2)
    assert [line(one)[:4] for one in each] == [("softmax", "3", "1", "1"), ("sum", "1", "1", "1")]


def test_large_cases_are_compared_with_the_ceiling():
    """At 2 TB/s, 100 MB take 50 us."""
    large = {"cost": {"read": 5 * 10**7, "written": 5 * 10**7, "flops": {"fp32": 1.0}}}
    found = [
        drawn("tilewright", 52.0, 1, **large),
        drawn("tilewright", 100.0, 2, **large),
        drawn("tilewright", 60.0, 3, **large) | {"aligned": False},
        drawn("tilewright", 50.0, 4, **large) | {"layout": "expanded"},
        drawn("tilewright", 55.0, 5, **large, direction="backward"),
        drawn("tilewright", 55.0, 5, op="rms_norm", **large, direction="backward"),
        drawn("tilewright", 99.0, 6),
    ]
    baselines = [r | {"kernel": "eager", "is_baseline": True} for r in found]
    everything, *_ = summaries([*found, *baselines])
    large, ceiling = "of at least 64 MB reach", "of the ceiling in the median"
    assert "at least 64 MB: 0 of 6 cases lose more than 2 %, 0 more than 10 %" in notes(everything)
    assert [reach.sentence() for reach in everything.reaches] == [
        f"backward: 1 {large} 91 % {ceiling}, 91 % at least; 0 miss 88 %",
        f"backward, norms: 1 {large} 91 % {ceiling}, 91 % at least; 0 miss 85 %",
        f"forward, aligned rows: 2 {large} 73 % {ceiling}, 50 % at least; 1 miss 92 %",
        f"forward, other rows: 1 {large} 83 % {ceiling}, 83 % at least; 0 miss 80 %",
    ]


def test_host_time_is_compared_with_eager():
    slow = [drawn("tilewright", 9.0, n) | {"host_us": us} for n, us in ((1, 7.5), (2, 7.6), (3, 2.0), (4, 3.0))]
    (summary,) = summaries([*slow, *(drawn("eager", 9.0, n) for n in range(1, 5))])
    assert summary.host_shares == {"forward": 0.75}, "eager takes 5 us, so 7.6 us are too many"
    assert "host time at most 1.5 of eager's in 75 % of forward calls; the goal is 95 %" in notes(summary)
    assert summary.as_json()["host"] == {"forward": 0.75}
    (captured,) = summaries([r | {"captured": True} for r in [*slow, drawn("eager", 9.0, 1)]])
    assert captured.host_shares == {}


def test_a_record_without_the_fields_of_a_drawn_case_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    record.append(path, [RECORDS[0], {key: value for key, value in RECORDS[0].items() if key != "aligned"}])
    assert record.read(path).corrupt == [2]


def test_nothing_timed_is_said():
    (summary,) = summaries(RECORDS[-2:])
    assert summary.sentence() == "no case of softmax has a time of both tilewright and a baseline"


def test_the_site_has_a_page(tmp_path):
    site.build([*RECORDS, timing_record("triton")], tmp_path)
    text = (tmp_path / "random.html").read_text()
    assert "1 of 3 cases (33 %)" in text
    assert text.count("<tr>") == 1 + 3
    assert "Random shapes" in (tmp_path / "index.html").read_text()
    assert len((tmp_path / "raw" / "random.jsonl").read_text().splitlines()) == len(RECORDS)
    site.build([timing_record("triton")], tmp_path / "other")
    assert not (tmp_path / "other" / "random.html").exists()

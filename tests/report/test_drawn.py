"""Summaries of random cases: the share of losses, the worst cases, the geometric mean."""

import math

from sample_records import timing_record
from tilewright.report import site
from tilewright.report.drawn import summaries


def drawn(kernel, us, n, **more):
    content = {"case": {"M": 3, "N": n}, "layout": "padded", "seed": 7, "is_baseline": kernel != "tilewright"}
    return timing_record(kernel, us, **content | more) | {"kind": "random"}


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
    assert (summary.lost, summary.untimed) == (1, 1), "1 % is no loss"
    assert math.isclose(summary.geometric_mean, (0.5 * 4 / 1.01) ** (1 / 3))
    assert summary.sentence().startswith("1 of 3 cases (33 %) lose more than 2 %")
    assert summary.sentence().endswith("(seed 7)")
    assert "M=3,N=1 float32 padded" in summary.results[0].case


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

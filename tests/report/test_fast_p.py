"""The report of a folder of solutions."""

import re

from tilewright.report import fast_p
from tilewright.workbench.check.batch import MISSING, PENDING, Outcome


def outcome(problem: str, verdict: str = "right", speedup: float | None = None, reason: str = "") -> Outcome:
    return Outcome(problem, f"folder/{problem}.py", verdict, reason, 3, 4, seconds=1.25, speedup=speedup)


TIMED = [
    outcome("a/1", speedup=0.7),
    outcome("a/1", speedup=2.5),
    outcome("a/2", speedup=1.0),
    outcome("b/1", "wrong", speedup=9.0),
    outcome("b/2", MISSING),
]


def test_the_best_right_solution_of_a_problem_counts():
    assert [fast_p.fast_p(TIMED, p) for p in (0.0, 0.5, 1.0, 2.0, 4.0)] == [0.5, 0.5, 0.25, 0.25, 0.0]
    assert fast_p.fast_p([], 1.0) is None


def test_without_times_only_the_share_of_right_solutions_is_known():
    outcomes = [outcome("1"), outcome("2", PENDING)]
    assert fast_p.fast_p(outcomes, 0.0) == 0.5
    assert fast_p.fast_p(outcomes, 1.0) is None


def test_folders_have_a_row_each():
    header, *rows = fast_p.summary(TIMED)
    assert [row[:3] for row in rows] == [["a", "2", "2"], ["b", "2", "0"], ["all", "4", "2"]]
    assert rows[0][header.index("fast_2")] == "50.0 %"


def test_rows_hold_the_time_and_the_evidence():
    header, row = fast_p.details([outcome("a/1", "wrong", reason="off by <1> | 2")])
    found = dict(zip(header, row, strict=True))
    assert (found["solution"], found["cases"], found["seconds"], found["speedup"]) == ("1.py", "3/4", "1.2", "")


def test_a_page_tells_wrong_from_not_judged_and_breaks_names_at_underscores():
    page = fast_p.html([outcome("1_Square_matmul", "wrong"), outcome("2", MISSING)], "title")
    assert '<td class="bad">wrong' in page
    assert '<td class="unknown">no solution' in page
    assert '<td class="name">1_<wbr>Square_<wbr>matmul' in page
    assert '<td class="number">1.2' in page


def test_reports_escape_what_they_show():
    outcomes = [outcome("<b>", "wrong", reason="off by <1> | 2\nnext")]
    page, text = fast_p.html(outcomes, "a & b"), fast_p.markdown(outcomes, "title")
    assert "<h1>a &amp; b</h1>" in page
    assert "off by &lt;1&gt; | 2" in page
    assert not re.search(r"<b>|<1>", page)
    assert r"off by &lt;1&gt; \| 2 next |" in text

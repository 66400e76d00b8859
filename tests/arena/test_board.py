"""Ranking: ties by overlapping intervals, three rules, records and the chart."""

import pytest

from tilewright.arena.board import chart, figures, rank, records, takes_first_place


def entry(number, us, spread=0.0, **more):
    fields = {"id": number, "us": us, "low_us": us - spread, "high_us": us + spread, "share": 1 / us, "fast": 0.0}
    return fields | {"verified": True, "date": f"2026-01-{number:02}T00:00:00+00:00"} | more


def placed(entries, rule="geomean"):
    return [(one.entry["id"], one.rank, one.is_tied) for one in rank(entries, rule)]


def test_shorter_times_rank_first():
    assert placed([entry(1, 30), entry(2, 10), entry(3, 20)]) == [(2, 1, False), (3, 2, False), (1, 3, False)]


def test_overlapping_intervals_tie_and_the_oldest_stands_first():
    found = placed([entry(1, 10.5, 1.0), entry(2, 10.0, 1.0), entry(3, 20.0, 1.0)])
    assert found == [(1, 1, True), (2, 1, True), (3, 3, False)]


@pytest.mark.parametrize("rule", ["geomean", "share", "fast_p"])
def test_rules_choose_the_score(rule):
    first, second = entry(1, 10, share=0.2, fast=0.5), entry(2, 20, share=0.9, fast=1.0)
    assert [one.entry["id"] for one in rank([first, second], rule)] == ([1, 2] if rule == "geomean" else [2, 1])


def test_equal_fast_p_ties():
    assert placed([entry(1, 10, fast=1.0), entry(2, 20, fast=1.0)], "fast_p") == [(1, 1, True), (2, 1, True)]


def test_unverified_entries_have_no_rank():
    assert placed([entry(1, 10), entry(2, 1, verified=False)]) == [(1, 1, False), (2, 0, False)]


def test_a_tie_is_no_record():
    entries = [entry(number, us, 1.0) for number, us in enumerate((10.0, 9.0, 7.0, 6.5), start=1)]
    entries.append(entry(5, 1.0, verified=False))
    assert [one["id"] for one in records(entries, "geomean")] == [1, 3]


@pytest.mark.parametrize("rule", ["geomean", "share", "fast_p"])
def test_the_rule_decides_who_takes_first_place(rule):
    leader, slower = entry(1, 10, share=0.2, fast=0.5), entry(2, 20, share=0.9, fast=1.0)
    assert takes_first_place(slower, leader, rule) == (rule != "geomean")
    assert not takes_first_place(leader, leader, rule)
    assert takes_first_place(slower, None, rule)


def test_an_entry_timed_beside_the_leader_is_placed_by_the_ratio():
    timing = {"us": 30.0, "low": 29.0, "high": 31.0, "share": 0.1, "over_eager": 2.0, "over_compile": None}
    timing |= {"cases": [{"us": 20.0, "eager_us": 60.0}, {"us": 45.0, "eager_us": 45.0}]}
    beside = timing | {"against_leader": {"ratio": 0.5, "low": 0.4, "high": 0.6}}
    alone = figures(timing, 1.0)
    assert (alone["us"], alone["share"], alone["fast"]) == (30.0, 0.1, 0.5)
    found = figures(beside, 1.0, entry(1, 10.0, share=0.3))
    assert (found["us"], found["low_us"], found["high_us"], found["share"]) == (5.0, 4.0, 6.0, 0.6)


def test_the_chart_steps_down_with_each_record():
    drawn = chart([entry(1, 30), entry(2, 20), entry(3, 10)], until="2026-01-05T00:00:00+00:00")
    heights = [float(point["y"]) for point in drawn["points"]]
    assert heights == sorted(heights), "a shorter time is drawn lower"
    assert all(0 < y < 100 for y in heights)
    assert drawn["times"] == [30, 20, 10], "from the top to the bottom"
    assert drawn["days"] == ["2026-01-01", "2026-01-03", "2026-01-05"], "the last record stands until today"
    today = chart([entry(1, 30)], until="2026-01-01T05:00:00+00:00")
    assert today["days"] == ["01 Jan 00:00", "01 Jan 02:30", "01 Jan 05:00"], "no day twice, none to come"
    set_back = chart([entry(9, 30), entry(2, 20), entry(10, 10)], until="2026-01-01")["points"]
    places = [float(point["x"]) for point in set_back]
    assert places == sorted(places), "a clock that was set back draws no line to the left"
    assert 0 < places[0] <= places[-1] < 100
    assert chart([], "2026-01-01") is None
    assert chart([entry(1, 30)], "2026-01-01")["times"] == [30]

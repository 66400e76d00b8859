"""Ranking: ties by overlapping intervals, three rules, records and the chart."""

import pytest

from tilewright.arena.board import chart, rank


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


def test_the_chart_steps_down_with_each_record():
    drawn = chart([entry(1, 30), entry(2, 20), entry(3, 10)])
    heights = [float(point["y"]) for point in drawn["points"]]
    assert heights == sorted(heights), "a shorter time is drawn lower"
    assert all(0 < y < drawn["height"] for y in heights)
    assert (drawn["first"], drawn["last"], drawn["low"], drawn["high"]) == ("2026-01-01", "2026-01-03", 10, 30)
    assert chart([]) is None
    assert chart([entry(1, 30)])["points"]

"""Predicted times: their terms and intervals, and their distance from recorded timings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sample_records import timing_record
from tilewright import record, registry, settings, source
from tilewright.hardware import datasheet
from tilewright.report import markdown, prediction_accuracy
from tilewright.spec import Case
from tilewright.workbench.explain.collect import OTHER_WORK, collect_op
from tilewright.workbench.explain.estimated_ceilings import Ceilings, estimate_ceilings
from tilewright.workbench.explain.prediction import LAUNCH_US, _overlapped, launch_models, predict
from tilewright.workbench.explain.validation import check_predictions, predictable

H200 = datasheet("h200")
RATES = {"copy": 4.0, "read": 5.0, "write": 5.0}


def test_bus_turnarounds_cost_by_the_smaller_of_reads_and_writes():
    found = Ceilings(RATES, "")
    assert found.memory_seconds(1, 1) == pytest.approx(2 / 4.0)
    assert found.memory_seconds(1, 0) == pytest.approx(1 / 5.0)
    assert found.memory_seconds(2, 1) == pytest.approx(found.memory_seconds(1, 1) + 1 / 5.0)


def test_ceilings_are_measured_or_scaled_from_the_datasheet():
    rates = {"copy": 2.4e12, "read": 2.4e12, "write": 2.4e12}  # half of the H200's
    records = [timing_record(ceilings=rates, timer={"floor_us": 2.0}), timing_record(gpu="unknown to us")]
    own, other = estimate_ceilings(H200, records), estimate_ceilings(datasheet("a100"), records)
    assert (own.rates["copy"], own.timer_us) == (2.4e12, 2.0)
    assert other.rates["copy"] == pytest.approx(0.5 * 2039e9)
    assert other.rates["fp32"] == datasheet("a100").rates()["fp32"], "it was not measured"
    assert estimate_ceilings(datasheet("a100"), []).rates["copy"] == 2039e9


def test_units_overlap_as_far_as_blocks_share_an_sm():
    assert _overlapped(3.0, 2.0, 1) == pytest.approx(5.0)
    assert 3.0 < _overlapped(3.0, 2.0, 4) < _overlapped(2.0, 3.0, 2) < 5.0
    assert _overlapped(3.0, 2.0, 32) == pytest.approx(3.0)
    assert _overlapped(3.0, 0.0, 1) == 3.0


def collect(op, kernel, point, direction="forward"):
    op = registry.load(op)
    case = Case(tuple(point.items()), op.bench_dtype)
    return collect_op(op, op.kernels.get(kernel, op.shipped), case, H200, [], direction)


def moved(op, kernel, point, direction="forward"):
    found = collect(op, kernel, point, direction)
    assert not found.no_audit_reason
    return found.audited.moved, found.cost


def test_scratch_and_repeated_bytes_scale_with_programs():
    """The audited call has fewer rows per program than the full one."""
    partial_sums, cost = moved("bias_activation", "triton", {"M": 16384, "N": 8192, "act": "silu"}, "backward")
    assert cost.bytes < partial_sums.requested < 1.05 * cost.bytes
    first_blocks, cost = moved("var", "triton", {"M": 64, "N": 2**20 + 64})  # not a multiple of the tile
    assert 1.01 * cost.bytes < first_blocks.requested < 1.3 * cost.bytes


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_inputs_of_constant_size_do_not_count_in_the_scale(direction):
    """A bias has the same size in the audited call, and so has its gradient; cosines have no gradient."""
    bias = collect("bias_activation", "triton", {"M": 16384, "N": 8192, "act": "silu"}, direction).audited
    assert (bias.case, bias.scale) == ("M=31,N=8192,act=silu", pytest.approx(16384 / 31))
    point = {"B": 64, "S": 16, "H": 32, "K": 8, "D": 128, "R": 64, "interleaved": False, "positions": False}
    rope = collect("rope", "triton", point, direction).audited
    assert rope.case.startswith("B=3,S=16,")
    assert rope.scale == pytest.approx(64 / 3)


def test_small_inputs_that_all_programs_read_hit_the_l1():
    rows, cost = moved("layer_norm", "triton", {"M": 16384, "N": 4096, "affine": "same"})
    assert rows.l1_hits > 0.4 * cost.bytes, "weight and bias are as long as a row and its result"
    assert rows.distinct == pytest.approx(cost.bytes, rel=0.02)
    assert rows.repeated < 0.01 * cost.bytes


def test_the_triton_kernel_is_audited_if_the_smaller_call_is_dispatched_to_torch():
    cut, cost = moved("cumsum", "tilewright", {"M": 1, "N": 2**28})
    assert cut.requested == pytest.approx(1.5 * cost.bytes, rel=0.03), "two reads, one of them from L2, and a write"


def test_repeated_bytes_hit_the_l2_while_they_fit():
    short, long = (collect("softmax", "triton-three-pass", {"M": m, "N": n}) for m, n in ((8192, 4096), (512, 65536)))
    for one in (short, long):
        (model,) = launch_models(one)
        assert model.moved.requested == pytest.approx(2 * one.cost.bytes), "three reads and a write"
    once = [one.ceilings.memory_seconds(one.cost.read, one.cost.written) for one in (short, long)]
    terms = [predict(one).terms["memory"].us * 1e-6 for one in (short, long)]
    cached = short.cost.bytes / short.ceilings.rates["l2"]
    assert terms[0] == pytest.approx(once[0] + cached)
    assert terms[1] > once[1] + long.cost.bytes / long.ceilings.rates["l2"], "264 rows of 256 KiB exceed the L2"


def test_trip_counts_follow_from_the_bytes():
    (once,), (often,) = (launch_models(collect("softmax", "triton-online", {"M": 512, "N": n})) for n in (16384, 65536))
    assert often.trips[1] == pytest.approx(4 * once.trips[1])
    assert often.seconds({"special": 1e12})["special"] > 3.5 * once.seconds({"special": 1e12})["special"]


def test_a_prediction_is_launch_overhead_and_the_longest_term():
    found = predict(collect("relu", "triton", {"N": 2**28}))
    memory = found.terms["memory"].us
    assert memory == pytest.approx(2**30 / 4800e9 * 1e6)
    assert memory + LAUNCH_US <= found.us <= 1.02 * (memory + LAUNCH_US + 1.3)
    assert found.low <= found.us <= found.high
    assert found.bottleneck == "memory"
    small = predict(collect("relu", "triton", {"N": 1024}))
    assert small.bottleneck == "start"


def timed(us, **more):
    content = timing_record(us=us, case={"N": 2**26}, dtype="bfloat16", **more)
    return content | {"op": "relu", "source": source.kernel_hash("relu", "triton")}


def test_a_prediction_with_its_timing_is_a_record_and_a_table(tmp_path):
    cost = {"read": 2**27, "written": 2**27, "flops": {}}
    records = [timed(150.0, cost=cost), timed(9.0, gpu="a100-80gb"), timed(9.0, kernel="eager"), timed(None)]
    timings = predictable(records, H200, ["relu"], [])
    assert timings == records[:1]
    skipped = []
    (found,) = check_predictions(timings, H200, records, skipped.append)
    assert (found.is_memory_bound, skipped) == (True, [])
    assert found.ratio == pytest.approx(2**28 / 2e12 * 1e6 / 150.0, rel=0.05)
    path = tmp_path / "predictions.jsonl"
    record.append(path, [found.as_record()])
    (again,) = record.read(path).records
    assert json.loads(json.dumps(found.as_record()))["terms"] == again["terms"]
    page = markdown.fill("<!-- records: predictions -->\n<!-- end -->", [again])
    assert f"| relu | triton | 1 | {found.ratio:.2f} | {found.ratio:.2f} | {found.ratio:.2f} |  |" in page
    assert f"Memory-bound calls (1): predicted / measured {found.ratio:.2f}" in page
    assert again["is_whole"]
    part = replace(found, prediction=replace(found.prediction, excludes=(OTHER_WORK,)))
    assert not part.as_record()["is_whole"]
    again["measured"]["source"] = "older"
    assert "1 timings of older code" in markdown.fill(page, [again])


def test_kernels_that_launch_nothing_are_skipped():
    skipped = []
    timing = timed(9.0, kernel="eager")
    assert list(check_predictions([timing], H200, [timing], skipped.append)) == []
    assert "launched no Triton or CUDA C++ kernel" in skipped[0]


def test_means_are_geometric_means_of_ratios():
    measured = {"us": 1.0, "source": "a"}
    shared = {"memory_bound": True, "is_whole": True, "measured": measured, "source": "a"}
    pairs = [shared | {"predicted_us": us, "interval_us": [us - 0.1, us + 0.6]} for us in (0.5, 2.0)]
    part = pairs[0] | {"predicted_us": 0.1, "is_whole": False}
    bound, present, partly = prediction_accuracy.means([*pairs, part])
    assert (
        "calls (2): predicted / measured 1.00 (geometric mean), off by a factor of 2.00 on average; 50% of the" in bound
    )
    assert "current code (2): predicted / measured 1.00" in present
    assert partly.startswith(
        "Calls that also run torch kernels, their Triton part alone (1): predicted / measured 0.10"
    )


def test_flaws_are_a_table():
    content = {"file": "examples/flaws/fp64.py", "named": ["better mathematics"], "slow": [9.0, 10.0, 11.0]}
    content |= {"mended": [2.0], "ratio": 5.0, "interval": [4.5, 5.5], "predicted_us": {"slow": 8.0, "mended": 2.0}}
    about = {"device": {"gpu": "h200", "name": "NVIDIA H200"}, "versions": {"triton": "3.6.0"}}
    one = record.stamp("flaw", "fp64", "mended", "of another day", **content, **about)
    page = markdown.fill("<!-- records: flaws -->\n<!-- end -->", [one])
    row = "better mathematics | 10.0 | 2.00 | 5.00 | 4.50 to 5.50 | 4.00 |"
    assert f"| [fp64](../examples/flaws/fp64.py)† | {row}" in page


def test_the_page_matches_the_records():
    page = (Path(__file__).parent.parent.parent / "docs" / "reading.md").read_text()
    found = [r for path in settings.record_files() for r in record.read(path).records]
    assert markdown.fill(page, list(record.latest(found))) == page, "run `make pages`"


def test_recorded_predictions_of_memory_bound_calls_are_within_15_percent():
    records = record.read(settings.results_dir() / "h200" / "predictions.jsonl").records
    bound = [r for r in record.latest(records) if r["memory_bound"]]
    assert len(bound) > 100
    assert 1 / 1.15 < prediction_accuracy.geometric_mean(map(prediction_accuracy.ratio, bound)) < 1.15

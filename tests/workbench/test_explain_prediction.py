"""Predicted times: of what they consist, how sure they are, and how near the recorded ones came."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sample_records import timing_record
from tilewright import record, registry, settings, source
from tilewright.hardware import datasheet
from tilewright.report import markdown, prediction_accuracy
from tilewright.spec import Case
from tilewright.workbench.explain.ceilings import Ceilings, ceilings
from tilewright.workbench.explain.collect import OTHER_WORK, collect_op
from tilewright.workbench.explain.prediction import START_US, _overlapped, launch_models, predict
from tilewright.workbench.explain.validation import check_predictions, predictable

H200 = datasheet("h200")
RATES = {"copy": 4.0, "read": 5.0, "write": 5.0}


def test_the_bus_turns_round_for_the_lesser_of_reads_and_writes():
    found = Ceilings(RATES, "")
    assert found.memory_seconds(1, 1) == pytest.approx(2 / 4.0)
    assert found.memory_seconds(1, 0) == pytest.approx(1 / 5.0)
    assert found.memory_seconds(2, 1) == pytest.approx(found.memory_seconds(1, 1) + 1 / 5.0)


def test_ceilings_are_measured_or_a_share_of_the_datasheet():
    rates = {"copy": 2.4e12, "read": 2.4e12, "write": 2.4e12}  # half of the H200's
    records = [timing_record(ceilings=rates, timer={"floor_us": 2.0}), timing_record(gpu="unknown to us")]
    own, other = ceilings(H200, records), ceilings(datasheet("a100"), records)
    assert (own.rates["copy"], own.timer_us) == (2.4e12, 2.0)
    assert other.rates["copy"] == pytest.approx(0.5 * 2039e9)
    assert other.rates["fp32"] == datasheet("a100").rates()["fp32"], "no one measured it"
    assert ceilings(datasheet("a100"), []).rates["copy"] == 2039e9


def test_units_overlap_as_far_as_blocks_share_an_sm():
    assert _overlapped(3.0, 2.0, 1) == pytest.approx(5.0)
    assert 3.0 < _overlapped(3.0, 2.0, 4) < _overlapped(2.0, 3.0, 2) < 5.0
    assert _overlapped(3.0, 2.0, 32) == pytest.approx(3.0)
    assert _overlapped(3.0, 0.0, 1) == 3.0


def known(op, kernel, point, direction="forward"):
    op = registry.load(op)
    case = Case(tuple(point.items()), op.bench_dtype)
    return collect_op(op, op.kernels.get(kernel, op.shipped), case, H200, [], direction)


def moved(op, kernel, point, direction="forward"):
    found = known(op, kernel, point, direction)
    assert not found.no_audit_reason
    return found.audited.moved, found.cost


def test_what_a_program_leaves_or_asks_again_grows_with_programs():
    """As much of it is audited on few rows, with few programs, as in the call with many rows to a program."""
    shares, cost = moved("bias_activation", "triton", {"M": 16384, "N": 8192, "act": "silu"}, "backward")
    assert cost.bytes < shares.asked < 1.05 * cost.bytes
    first_blocks, cost = moved("var", "triton", {"M": 64, "N": 2**20 + 64})  # which no tile divides
    assert 1.01 * cost.bytes < first_blocks.asked < 1.3 * cost.bytes


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_no_larger_in_the_call_does_not_count_in_the_scale(direction):
    """A bias, whose gradient is none either; cosines, which have none."""
    bias = known("bias_activation", "triton", {"M": 16384, "N": 8192, "act": "silu"}, direction).audited
    assert (bias.case, bias.scale) == ("M=31,N=8192,act=silu", pytest.approx(16384 / 31))
    point = {"B": 64, "S": 16, "H": 32, "K": 8, "D": 128, "R": 64, "interleaved": False, "positions": False}
    rope = known("rope", "triton", point, direction).audited
    assert rope.case.startswith("B=3,S=16,")
    assert rope.scale == pytest.approx(64 / 3)


def test_small_inputs_that_all_programs_read_come_from_the_near_cache():
    rows, cost = moved("layer_norm", "triton", {"M": 16384, "N": 4096, "affine": "same"})
    assert rows.near > 0.4 * cost.bytes, "weight and bias are as long as a row and its result"
    assert rows.distinct == pytest.approx(cost.bytes, rel=0.02)
    assert rows.repeated < 0.01 * cost.bytes


def test_a_call_whose_like_goes_to_torch_is_audited_by_the_kernel_that_it_takes():
    cut, cost = moved("cumsum", "tilewright", {"M": 1, "N": 2**28})
    assert cut.asked == pytest.approx(1.5 * cost.bytes, rel=0.01), "two reads and a write"


def test_bytes_that_are_read_again_come_from_the_cache_while_they_fit():
    short, long = (known("softmax", "triton-three-pass", {"M": m, "N": n}) for m, n in ((8192, 4096), (512, 65536)))
    for one in (short, long):
        (work,) = launch_models(one)
        assert work.moved.asked == pytest.approx(2 * one.cost.bytes), "three reads and a write"
    once = [one.ceilings.memory_seconds(one.cost.read, one.cost.written) for one in (short, long)]
    terms = [predict(one).terms["memory"].us * 1e-6 for one in (short, long)]
    cached = short.cost.bytes / short.ceilings.rates["l2"]
    assert terms[0] == pytest.approx(once[0] + cached)
    assert terms[1] > once[1] + long.cost.bytes / long.ceilings.rates["l2"], "264 rows of 256 KiB pass the L2"


def test_loops_run_as_often_as_the_bytes_say():
    (once,), (often,) = (launch_models(known("softmax", "triton-online", {"M": 512, "N": n})) for n in (16384, 65536))
    assert often.trips[1] == pytest.approx(4 * once.trips[1])
    assert often.seconds({"special": 1e12})["special"] > 3.5 * once.seconds({"special": 1e12})["special"]


def test_a_prediction_is_a_start_and_the_longest_part():
    found = predict(known("relu", "triton", {"N": 2**28}))
    memory = found.terms["memory"].us
    assert memory == pytest.approx(2**30 / 4800e9 * 1e6)
    assert memory + START_US <= found.us <= 1.02 * (memory + START_US + 1.3)
    assert found.low <= found.us <= found.high
    assert found.bottleneck == "memory"
    small = predict(known("relu", "triton", {"N": 1024}))
    assert small.bottleneck == "start"


def timed(us, **more):
    content = timing_record(us=us, case={"N": 2**26}, dtype="bfloat16", **more)
    return content | {"op": "relu", "source": source.kernel_hash("relu", "triton")}


def test_a_prediction_beside_its_timing_is_a_record_and_a_table(tmp_path):
    cost = {"read": 2**27, "written": 2**27, "flops": {}}
    records = [timed(150.0, cost=cost), timed(9.0, gpu="a100-80gb"), timed(9.0, kernel="eager"), timed(None)]
    timings = predictable(records, H200, ["relu"], [])
    assert timings == records[:1]
    told = []
    (found,) = check_predictions(timings, H200, records, told.append)
    assert (found.is_memory_bound, told) == (True, [])
    assert found.ratio == pytest.approx(2**28 / 2e12 * 1e6 / 150.0, rel=0.05)
    path = tmp_path / "predictions.jsonl"
    record.append(path, [found.as_record()])
    (again,) = record.read(path).records
    assert json.loads(json.dumps(found.as_record()))["terms"] == again["terms"]
    page = markdown.fill("<!-- records: predictions -->\n<!-- end -->", [again])
    assert f"| relu | triton | 1 | {found.ratio:.2f} | {found.ratio:.2f} | {found.ratio:.2f} |  |" in page
    assert f"Bound by memory: predicted over measured {found.ratio:.2f}" in page
    assert again["is_whole"]
    part = replace(found, prediction=replace(found.prediction, excludes=(OTHER_WORK,)))
    assert not part.as_record()["is_whole"]
    again["measured"]["source"] = "older"
    assert "1 timings of older code" in markdown.fill(page, [again])


def test_kernels_that_launch_nothing_are_told():
    told = []
    timing = timed(9.0, kernel="eager")
    assert list(check_predictions([timing], H200, [timing], told.append)) == []
    assert "launched no Triton or CUDA C++ kernel" in told[0]


def test_means_are_of_ratios():
    measured = {"us": 1.0, "source": "a"}
    shared = {"memory_bound": True, "is_whole": True, "measured": measured, "source": "a"}
    pairs = [shared | {"predicted_us": us, "interval_us": [us - 0.1, us + 0.6]} for us in (0.5, 2.0)]
    part = pairs[0] | {"predicted_us": 0.1, "is_whole": False}
    bound, present, partly = prediction_accuracy.means([*pairs, part])
    assert "over measured 1.00, apart by a factor of 2.00, 2 calls; 50% measured within the interval" in bound
    assert "present code: predicted over measured 1.00" in present
    assert partly.startswith("Part of a call, the rest of which is torch's: predicted over measured 0.10")


def test_flaws_are_a_table():
    content = {"file": "examples/flaws/fp64.py", "named": ["better mathematics"], "slow": [9.0, 10.0, 11.0]}
    content |= {"mended": [2.0], "ratio": 5.0, "interval": [4.5, 5.5], "predicted_us": {"slow": 8.0, "mended": 2.0}}
    about = {"device": {"gpu": "h200", "name": "NVIDIA H200"}, "versions": {"triton": "3.6.0"}}
    one = record.stamp("flaw", "fp64", "mended", "of another day", **content, **about)
    page = markdown.fill("<!-- records: flaws -->\n<!-- end -->", [one])
    row = "better mathematics | 10.0 us | 2.0 us | 5.00x, 4.50 to 5.50 | 4.0x |"
    assert f"| [fp64](../examples/flaws/fp64.py), stale | {row}" in page


def test_the_page_says_what_is_recorded():
    page = (Path(__file__).parent.parent.parent / "docs" / "reading.md").read_text()
    found = [r for path in settings.record_files() for r in record.read(path).records]
    assert markdown.fill(page, list(record.latest(found))) == page, "run `make pages`"


def test_recorded_predictions_of_what_memory_binds_are_within_15_percent():
    records = record.read(settings.results_dir() / "h200" / "predictions.jsonl").records
    bound = [r for r in record.latest(records) if r["memory_bound"]]
    assert len(bound) > 100
    assert 1 / 1.15 < prediction_accuracy.geometric_mean(map(prediction_accuracy.ratio, bound)) < 1.15

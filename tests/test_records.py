"""The committed records show what the documentation says."""

from statistics import median

import pytest

from tilewright import record, settings, source
from tilewright.cost import Cost
from tilewright.workbench.bench.changes import compare

H200 = settings.results_dir() / "h200"
LONG_US = 20.0


def records(name):
    found = record.read(H200 / name)
    assert not [*found.torn, *found.corrupt, *found.newer]
    return found.records


def test_timings_of_two_processes_agree():
    changes = compare(records("agreement/first.jsonl"), records("agreement/second.jsonl"))
    apart = [abs(change.ratio - 1) for change in changes if change.ratio and change.old_us > LONG_US]
    assert len(apart) == 52
    assert sorted(apart)[-2] < 0.01
    assert max(apart) < 0.0103
    assert {change.kernel for change in changes if change.verdict == "slower"} == set()


def stale(*ops):
    """Ops whose records are stale. Strict: a new measurement must remove its op from the list."""
    mark = pytest.mark.xfail(strict=True, reason="not measured since the code changed")
    return [pytest.param(op, marks=mark) for op in ops]


@pytest.mark.parametrize("op", stale("add", "attention", "dot", "gelu", "linear", "softmax", "sum"))
def test_forward_timings_of_our_kernels_and_baselines_are_fresh(op):
    forward = [r for r in record.latest(records(f"{op}.jsonl")) if r["direction"] == "forward"]
    assert not [r["kernel"] for r in forward if record.is_stale(r)]
    timed = {r["kernel"] for r in forward if r["median_us"]}
    assert {"eager", "compile", "triton"} <= timed
    assert {"cuda", "sdpa-cudnn"} & timed
    assert ("liger" in timed) == (op == "softmax")
    for r in forward:
        if r["median_us"]:
            low, high = r["interval_us"]
            assert low <= r["median_us"] <= high
            assert r["timer"]["unqueued"] == 0


@pytest.mark.parametrize("op", stale("gelu", "softmax"))
def test_forward_timings_of_all_kernels_are_fresh(op):
    known = [*source.kernels(op), *source.peer_files()]
    newest = record.latest(records(f"{op}.jsonl"))
    forward = [r for r in newest if r["direction"] == "forward" and r["kernel"] in known]
    assert {r["kernel"] for r in forward} >= set(source.kernels(op))
    assert not [r["kernel"] for r in forward if record.is_stale(r)]


SHARES = {  # fraction of the copy bandwidth measured in the same run, by columns
    ("softmax", "forward"): (0.86, 0.97, 0.98, 1.01, 1.0, 1.01, 1.01, 0.93),
    ("softmax", "backward"): (0.94, 1.03, 1.04, 1.03, 1.03, 1.04, 1.04, 0.97),
    ("log_softmax", "forward"): (0.85, 0.98, 0.98, 1.0, 1.0, 1.01, 1.01, 0.97),
    ("rms_norm", "forward"): (0.98, 0.97, 0.97, 0.99, 0.98, 0.98),
    ("rms_norm", "backward"): (0.84, 0.91, 0.92, 0.98, 0.96, 0.93),
    ("layer_norm", "forward"): (0.97, 0.99, 0.97, 0.98, 0.96, 0.93),
    ("layer_norm", "backward"): (0.82, 0.9, 0.9, 0.94, 0.93, 0.84),
    ("add_rms_norm", "forward"): (0.98, 0.99, 0.99, 1.0, 1.0, 0.99),
    ("add_rms_norm", "backward"): (0.87, 0.95, 0.95, 0.96, 0.98, 0.96),
    ("add_layer_norm", "forward"): (0.98, 0.99, 0.99, 1.0, 0.97, 0.92),
    ("add_layer_norm", "backward"): (0.87, 0.94, 0.95, 0.97, 0.98, 0.94),
    ("cross_entropy", "both"): (0.95, 0.76, 0.95),
}


LONG = {32768, 65536, 131072, 262144}
# Columns whose kernels changed after their last timing; the docs mark these timings as stale.
TO_BE_TIMED = {
    ("softmax", "forward"): LONG,
    ("softmax", "backward"): LONG,
    ("log_softmax", "forward"): LONG,
    ("cross_entropy", "both"): {32768, 50257, 128256},
}


@pytest.mark.parametrize("of", SHARES, ids=" ".join)
def test_public_functions_reach_the_recorded_fraction_of_bandwidth(of):
    op, direction = of
    newest = [r for r in record.latest(records(f"{op}.jsonl")) if not r.get("sized")]
    ours = {r["case"]["N"]: r for r in newest if r["kernel"] == source.PUBLIC and r["direction"] == direction}
    assert {n for n, r in ours.items() if record.is_stale(r)} == TO_BE_TIMED.get(of, set())
    shares = [Cost(**r["cost"]).bytes / r["median_us"] * 1e6 / r["ceilings"]["copy"] for _, r in sorted(ours.items())]
    assert len(shares) == len(SHARES[op, direction])
    assert [s for s, least in zip(shares, SHARES[op, direction], strict=True) if s < least] == []


def test_measurement_mistakes_distort_the_time():
    ratio = {r["kernel"]: r["ratio"] for r in records("traps.jsonl")}
    assert ratio["zeros"] > 1.1
    assert ratio["warm cache"] > 1.2
    assert ratio["dirty flush"] < 0.9
    assert ratio["unqueued"] < 0.5


LOSES = {("silu", 2**24, "sum of the result"): 1.04}  # the next kernel reads the output, less of which is in the L2


def test_cache_hints_do_not_slow_down_the_next_kernel():
    for r in record.latest(records("hints.jsonl")):
        for what, us in r["us"].items():
            kept, plain = (median(us[side]) for side in ("kept", "plain"))
            most = LOSES.get((r["op"], r["case"].get("N"), what), 1.01)
            assert kept < most * plain, f"{r['op']} {r['case']}, {what}"


def test_the_sweep_goes_from_memory_bound_to_compute_bound():
    (sweep,) = records("sweep.jsonl")
    assert not record.is_stale(sweep)
    us = {point["k"]: point["us"] for point in sweep["points"]}
    assert us[16] < 1.02 * us[1]
    assert us[1024] > 1.8 * us[512]

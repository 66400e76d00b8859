"""Rows, Markdown and the page of training steps."""

import json
import re

from sample_records import timing_record
from tilewright import record, settings, source
from tilewright.record import TRAINING
from tilewright.report import markdown, site
from tilewright.report.training import by_kind, jobs


def step_record(variant, ms, **more):
    times = {
        "wall_us": 2000 * ms,
        "by_kind": {"GEMM": 600.0 * ms, "norms": 300.0 * ms},
        "busy_us": 900.0 * ms,
        "wait_us": 0.0,
        "exposed_us": 0.0,
        "launches": 10.0,
        "is_gpu": True,
        "top": [],
    }
    measured = {
        "kind": "train_step",
        "op": "tiny",
        "source": source.tree_hash(TRAINING),
        "case": {"batch": 2, "length": 16, "checkpointing": False},
        "dtype": "bfloat16",
        "direction": "both",
        "reason": "",
        "median_us": 1000.0 * ms,
        "interval_us": [990.0 * ms, 1010.0 * ms],
        "against": None if variant == "eager" else {"kernel": "eager", "ratio": 20 / ms, "interval": [1.9, 2.1]},
        "units": 32,
        "unit": "tokens",
        "parameters": 26800,
        "mfu": {"measured": 0.5, "datasheet": None},
        "hfu": {"measured": 0.6},
        "memory": dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "rest", "peak"), 2 * 10**9),
        "times": times,
        "diagnosis": {"limit": "compute", "shares": {}, "evidence": ["a < b"], "next": "more"},
    }
    return timing_record(variant) | measured | more


FAILED = {"reason": "out of memory", "median_us": None}
RECORDS = [step_record("eager", 20), step_record("ours", 10), step_record("compile", 1, **FAILED)]


def test_a_job_has_a_row_per_measured_variant():
    job, other = jobs([*RECORDS, step_record("eager", 5, dtype="float32"), timing_record("eager")])
    assert job.title == "tiny 2x16 tokens bfloat16, 0.0268 M parameters"
    assert other.title == "tiny 2x16 tokens float32, 0.0268 M parameters"
    speeds = job.speeds()
    assert [dict(zip(speeds.columns[:6], cells, strict=False)) for cells in speeds.cells] == [
        {"variant": "eager", "tokens/s": "1,600", "ms/step": "20.0", "95 % interval": "", "speedup": ""},
        {"variant": "ours", "tokens/s": "3,200", "ms/step": "10.0", "95 % interval": "1.90 to 2.10", "speedup": "2.00"},
    ]
    assert all(len(cells) == len(speeds.columns) for cells in speeds.cells)
    assert job.memory().cells[0] == ["eager", *["2.00"] * 6]
    times = job.times()
    assert list(times.columns) == ["time (ms per step)", "GEMM", "norms", "idle", "waiting for data"]
    assert times.cells[1] == ["ours", "6.00", "3.00", "1.00", "0"]


def test_a_device_that_overlaps_kernels_is_not_idle_for_less_than_nothing():
    busy = RECORDS[0] | {"times": RECORDS[0]["times"] | {"busy_us": 30000.0}}
    assert by_kind(busy)["idle"] == 0.0


def test_only_our_variants_become_stale():
    """Baselines run none of the code that the hash covers but the harness."""
    eager, ours = (step_record(variant, 10, source="0" * 16) for variant in ("eager", "ours"))
    assert (record.is_stale(eager), record.is_stale(ours)) == (False, True)
    assert not record.is_stale(RECORDS[1])
    assert [cells[0] for cells in jobs([eager, ours])[0].speeds().cells] == ["eager", "ours†"]
    assert "† Stale" in markdown.fill("<!-- records: train-steps -->\n<!-- end -->", [eager, ours])


def test_the_page_has_bars_on_one_scale(tmp_path):
    files = {path.name: path.read_text() for path in site.build([*RECORDS, timing_record("eager")], tmp_path)}
    page = files["training.html"]
    assert 'href="training.html"' in files["index.html"]
    widths = [
        [float(w) for w in re.findall(r"width:([\d.]+)%", bar)] for bar in re.findall(r"<span>(.*?)</span>", page)
    ]
    assert widths == [[60.0, 30.0, 10.0], [30.0, 15.0, 5.0]]
    assert "a &lt; b" in page
    assert "<b>compile</b> on tiny: out of memory" in page
    assert [json.loads(line)["kernel"] for line in files["training.jsonl"].splitlines()] == ["eager", "ours", "compile"]


def test_a_site_of_training_steps_alone(tmp_path):
    names = {path.name for path in site.build(RECORDS, tmp_path)}
    assert {"index.html", "training.html", "training.jsonl"} <= names


def test_the_recorded_steps_fill_the_docs():
    found = record.latest(record.read(settings.results_dir() / "h200" / "train_step.jsonl").records)
    filled = markdown.fill("<!-- records: train-steps -->\n<!-- end -->", list(found))
    assert "| eager |" in filled
    assert "Measured on NVIDIA H200" in filled

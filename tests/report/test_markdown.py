"""Markdown tables show what the records hold, and the pages of the repository are up to date."""

from pathlib import Path

import pytest

from sample_records import timing_record
from tilewright import record, settings, source
from tilewright.report import markdown
from tilewright.report.markdown import BLOCK

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if BLOCK.search(path.read_text()))


def timing(kernel: str, us: float | None, case: int = 1, direction: str = "forward", verdict: str = "right", **more):
    reason = "" if verdict == "right" else "because"
    about = {"case": {"N": case}, "dtype": "bfloat16", "direction": direction, "verdict": verdict, "reason": reason}
    return timing_record(kernel, us, **(about | more))


def table_of(name: str, records) -> str:
    return markdown.fill(f"<!-- records: {name} -->\n<!-- end -->", records)


def test_a_marked_block_is_replaced_and_the_rest_stays():
    page = "before\n<!-- records: softmax forward -->\nold\n<!-- end -->\nafter"
    filled = markdown.fill(
        page, [timing("eager", 4.0), timing("triton", 2.0), timing("eager", 9.0, direction="backward")]
    )
    assert filled.startswith("before\n")
    assert filled.endswith("\nafter")
    assert "| case | eager | triton |" in filled
    assert "| N=1 | 4.00 | **2.00** |" in filled
    assert "| N=1 | 25 | 50 |" in filled
    assert "Measured on NVIDIA H200, 20" in filled
    assert "9.00" not in filled
    assert markdown.fill(filled, []) != filled, "without records the table must not survive"


def test_cases_show_our_fastest_kernel_beside_eager_compile_and_the_fastest_other():
    others = [timing("eager", 4.0), timing("compile", 5.0), timing("compile-max", 3.0)]
    ours = [timing("triton", 2.0), timing("cuda", 6.0)]
    filled = table_of("cases forward", [*others, *ours])
    assert "| softmax | N=1 | 4.00 | 3.00 |  | 2.00 | 50 | 1.50 | compile: compile-max, tilewright: triton |" in filled
    peer = timing("liger", 1.0, is_baseline=True)
    filled = table_of("cases forward", [*others, *ours, peer])
    assert "| 3.00 | 1.00 | 2.00 | 50 | 0.50 | compile: compile-max, other: liger, tilewright: triton |" in filled


def test_cases_of_a_family_leave_out_other_families():
    records = [timing("triton", 2.0), timing("triton", 3.0) | {"op": "rms_norm"}]
    for family, shown, left_out in (
        ("softmax", "| softmax |", "| rms_norm |"),
        ("norm", "| rms_norm |", "| softmax |"),
    ):
        filled = table_of(f"cases forward {family}", records)
        assert shown in filled
        assert left_out not in filled


def test_the_public_function_is_shown_though_another_kernel_of_ours_is_faster():
    ours = [timing("triton", 2.0), timing(source.PUBLIC, 2.5)]
    assert "| 4.00 |  |  | 2.50 | 40 | 1.60 |  |" in table_of("cases forward", [timing("eager", 4.0), *ours])


def test_dtypes_other_than_the_default_are_named():
    both = [timing("triton", 2.0), timing("triton", 3.0, dtype="float32")]
    for name in ("cases forward", "softmax forward"):
        filled = table_of(name, both)
        assert "| N=1 |" in filled
        assert "| N=1 float32 |" in filled


def test_a_kernel_without_a_time_shows_its_verdict_and_below_the_reason():
    wrong = timing("liger", None, verdict="wrong", is_baseline=True) | {"reason": "expected nan"}
    filled = table_of("cases forward", [timing("eager", 4.0), wrong, timing("triton", 2.0)])
    assert "| softmax | N=1 | 4.00 |  | wrong | 2.00 |" in filled
    assert "Not timed: liger on softmax, because it returns a wrong result: expected nan." in filled
    assert "| N=1 | 4.00 | **2.00** | wrong |" in table_of(
        "softmax forward", [timing("eager", 4.0), wrong, timing("triton", 2.0)]
    )


def test_stale_times_and_times_without_an_interval_are_marked_and_explained():
    old = timing("eager", 4.0, interval_us=None) | {"source": "another"}
    filled = table_of("cases forward", [old, timing("triton", 2.0)])
    assert "| 4.00†‡ |" in filled
    assert "† Stale:" in filled
    assert "‡ Measured with an earlier timer" in filled
    fresh = table_of("cases forward", [timing("eager", 4.0), timing("triton", 2.0)])
    assert "†" not in fresh
    assert "‡" not in fresh


def test_the_summary_has_one_row_per_op_of_fresh_records():
    small, large = ({"cost": {"read": n, "written": n, "flops": {}}} for n in (10**6, 10**7))
    records = [
        *(timing("eager", us, case=n, **cost) for n, us, cost in ((1, 4.0, small), (2, 9.0, large))),
        *(timing(source.PUBLIC, us, case=n, **cost) for n, us, cost in ((1, 2.0, small), (2, 3.0, large))),
        timing("compile", 1.0, case=2, **large) | {"source": "another"},
        timing("eager", 8.0, case=3, direction="both") | {"op": "cross_entropy"},
        timing("triton", 5.0, case=3, direction="both") | {"op": "cross_entropy", "source": "another"},
        *(timing(kernel, 7.0, case=2, gpu="l4", **large) for kernel in ("eager", source.PUBLIC)),
    ]
    filled = table_of("summary softmax,cross_entropy", records)
    assert "| softmax | N=2 | 9.00 |  |  | 3.00 | 333 | 3.00 |  |" in filled
    assert filled.count("\n| ") == 3
    assert "Not shown, for lack of fresh records: cross_entropy." in filled
    assert "†" not in filled
    assert "L4" not in filled, "the GPU with the most records"
    assert "No records" not in filled


def test_the_summary_has_at_most_ten_rows():
    names = [*source.op_files()][:12]
    records = [timing("triton", 2.0) | {"op": name, "file": "not here"} for name in names]
    filled = table_of(f"summary {','.join(names)}", records)
    assert filled.count("| N=1 |") == markdown.SUMMARY_ROWS == 10


def test_calls_slower_than_torch_are_listed_and_counted():
    public = source.PUBLIC
    records = [
        *(timing(name, us, case=1, host_us=4.0) for name, us in (("eager", 9.0), ("compile", 5.0))),
        timing(public, 5.2, case=1, host_us=8.0),
        *(timing(name, us, case=2, sized=True) for name, us in (("eager", 9.0), ("compile", 5.0), (public, 5.09))),
        *(timing(name, us, case=3) for name, us in (("compile", 5.0), (public, 9.0))),
        timing("eager", 5.0, case=4, direction="backward"),
        timing(public, 8.0, case=4, direction="backward", is_torchs=True),
        *(timing(name, us, case=5) for name, us in (("eager", 5.0), ("triton", 9.0))),
        timing("eager", 5.0, case=6),
        timing(public, 9.0, case=6) | {"source": "another"},
    ]
    filled = table_of("slower", records)
    assert "| softmax | N=1 bfloat16 | 9.00 | 5.00 | 5.20 | 1.040 |" in filled
    assert "| softmax | N=3 bfloat16 |  | 5.00 | 9.00 | 1.800 |" in filled
    assert filled.count("| softmax |") == 2, "not those within 2 %, run by torch, not public, or stale"
    assert "2 of 4 calls run our kernels and are more than 2% slower than torch.\n1 more" in filled
    assert "is 1.50 times eager's (median of 2), at most 1.5 times in 50% of them, 2.0 times in the worst" in filled
    assert "Backward" not in filled, "torch runs that one"
    assert "0 of 0 calls" in table_of("slower", [timing("eager", 1.0)])


def test_hints_are_a_table_of_calls_and_what_follows_them():
    us = {"nothing": {"kept": [1.0, 2.0, 9.0], "plain": [3.0]}, "sum": {"kept": [4.0], "plain": [5.0]}}
    about = {"device": {"gpu": "h200", "name": "NVIDIA H200"}, "versions": {"torch": "2.11", "triton": "3.6.0"}}
    one = record.stamp("hint", "silu", source.PUBLIC, "of another day", case={"N": 8}, dtype="bfloat16", us=us, **about)
    page = table_of("hints", [one])
    assert "| call | alone, hint (us) | alone, no hint (us) | then sum, hint (us) | then sum, no hint (us) |" in page
    assert "| silu N=8† | 2.000 | 3.000 | 4.000 | 5.000 |" in page


def test_a_tie_with_a_baseline_is_named():
    eager = timing("eager", 2.1, interval_us=[1.9, 2.3])
    filled = table_of("cases forward", [eager, timing("triton", 2.0, interval_us=[1.9, 2.1])])
    assert "| 2.10 |  |  | 2.00 | 50 | 1.05 | tilewright: triton, tie |" in filled
    ours = [timing(name, us, interval_us=[1.9, 2.2]) for name, us in (("triton", 2.0), ("cuda", 2.1))]
    filled = table_of("cases forward", [timing("eager", 4.0), *ours])
    assert "| 2.00 | tilewright: triton |" in filled, "our two kernels do not tie with a baseline"


def test_a_case_without_a_time_of_ours_is_left_out_and_one_without_a_baseline_is_shown():
    filled = table_of("cases forward", [timing("eager", 4.0, case=1), timing("triton", 2.0, case=2)])
    assert "N=1" not in filled
    assert "| softmax | N=2 |  |  |  | 2.00 | 50 |  | tilewright: triton |" in filled


def test_the_largest_is_the_timed_case_with_the_most_bytes():
    small, large = ({"cost": {"read": n, "written": n, "flops": {}}} for n in (10**6, 10**7))
    huge = {"cost": {"read": 10**8, "written": 10**8, "flops": {}}}
    ours = [timing("triton", 2.0, case=1, **large), timing("triton", 3.0, case=2, **small)]
    untimed = [timing("triton", None, case=3, verdict="unsupported", **huge), timing("eager", 9.0, case=3, **huge)]
    filled = table_of("largest forward", [*ours, *untimed])
    assert "N=1" in filled
    assert "N=2" not in filled
    assert "N=3" not in filled


def test_sizes_have_a_table_of_their_own_and_are_compared_with_the_best_of_torch():
    kernels = (("eager", 4.0, 10.0), ("compile", 2.0, 20.0), (source.PUBLIC, 3.0, 15.0))
    sized = [timing(name, us, host_us=host, sized=True) for name, us, host in kernels]
    filled = table_of("sizes", [*sized, timing("eager", 1.0)])
    assert "| softmax | N=1 | 2.00 | 4.00 | 2.00 | 3.00 | 1.50 | 1.50 |  |" in filled
    assert "4.00" not in table_of("cases forward", [*sized, timing("triton", 1.0)])


def test_calls_that_run_torch_are_marked():
    kernels = (("eager", 4.0), (source.PUBLIC, 3.0))
    sized = [timing(name, us, host_us=5.0, sized=True, is_torchs=name == source.PUBLIC) for name, us in kernels]
    assert "| 4.00 |  | 3.00 | 0.75 | 1.00 | runs torch |" in table_of("sizes", sized)
    bench = [one | {"sized": False} for one in sized]
    assert "| 3.00 | 33 | 1.33 | runs torch |" in table_of("cases forward", bench)


def test_each_gpu_has_a_table_of_its_own():
    filled = table_of("softmax forward", [timing("eager", 4.0), timing("eager", 8.0, gpu="l4")])
    assert filled.count("| case |") == 4, "times and shares"
    assert "**8.00**" in filled
    assert "**4.00**" in filled


@pytest.mark.parametrize(
    "name",
    [
        *("sofmax forward", "softmax", "softmax up", "summary", "summary sofmax", "cases", "audit softmax"),
        *("cases forward nowhere", "softmax forward norm", "largest forward norm"),
    ],
)
def test_an_unknown_block_is_refused(name):
    with pytest.raises(markdown.BlockError, match=f"no block is named '{name}'"):
        table_of(name, [])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_are_up_to_date(page):
    found = [record.read(path) for path in settings.record_files()]
    assert not any(file.torn or file.corrupt for file in found)
    records = list(record.latest([r for file in found for r in file.records]))
    text = page.read_text()
    assert markdown.fill(text, records) == text, "run `make pages`"
    assert "No records yet" not in text


def audit_record(**more):
    arguments = [{"distinct_read": 2 * 10**6, "distinct_written": 0}, {"distinct_read": 0, "distinct_written": 10**6}]
    call = {"op": "softmax", "kernel": "triton", "case": {"M": 3, "N": 4}, "dtype": "bfloat16"}
    content = {
        "call": call,
        "moved": 5 * 10**6,
        "launches": [{"arguments": arguments}],
        "device": {"name": "NVIDIA H200"},
    }
    content |= {"versions": {"triton": "3.6.0"}, "counted": {"read": 2020000, "written": 990000}}
    return record.stamp("audit", "softmax", "triton", "old", **content | more)


def test_audited_bytes_are_compared_with_counted_bytes():
    filled = table_of("audit", [audit_record(), timing("eager", 4.0)])
    row = "| softmax, triton, M=3,N=4 bfloat16† | 5.0 | 2.0 | 2.0 | 1.010 | 1.0 | 1.0 | 0.990 |"
    assert row in filled
    assert "Counted on NVIDIA H200" in filled
    assert "No records yet" in table_of("audit", [timing("eager", 4.0)])


def test_verdicts_of_kernels_and_of_files_have_tables_of_their_own():
    case = {"case": "M=1,N=1", "dtype": "float32", "verdict": "right", "reason": ""}
    content = {"verdict": "right", "reason": "", "labels": ["1 left out: x", "forward only"]}
    content |= {"device": {"name": "NVIDIA H200"}, "versions": {"torch": "2.11.0", "triton": "3.6.0"}}
    cases = [case, case, case | {"verdict": "unsupported"}]
    records = [
        record.stamp("verdict", "softmax", "triton", "old", cases=cases, **content),
        record.stamp("verdict", "softmax", "a.py", "x", cases=cases, file="no/a.py", **content),
    ]
    ours, files = (table_of(name, records) for name in ("verdicts", "submissions"))
    assert "| softmax | triton | right† | 2 / 2 | forward only |" in ours
    assert "a.py" not in ours
    assert "| softmax | `no/a.py` | right | 2 / 2 | forward only |" in files
    assert "Checked on NVIDIA H200" in files


def test_each_gpu_has_a_column_with_the_resources_of_a_kernel():
    figures = {"registers": 40, "shared": 512, "spills": 0, "blocks": 12, "occupancy": 0.75, "limiter": "registers"}
    gpus = {"a100-80gb": figures, "mi300x": figures | {"occupancy": 1.0, "limiter": "", "spills": 8}}
    content = {"versions": {"triton": "3.6.0"}, "file": "src/tilewright/ops/relu.py"}
    made = record.stamp("resources", "relu", "_relu", "x", gpus=gpus, **content)
    other = record.stamp("resources", "relu", "_only", "x", gpus={"mi300x": figures}, **content)
    filled = table_of("portability", [made, other])
    link = "](../src/tilewright/ops/relu.py)"
    assert "| kernel | a100-80gb, sm_80 | mi300x, gfx942 |" in filled
    assert f"| [`_relu`{link} | 40 / 512 B / 75% (registers) | 40 / 512 B / 100%, 8 B spilled |" in filled
    assert f"| [`_only`{link} |  | 40 / 512 B / 75% (registers) |" in filled
    assert "by triton 3.6.0." in filled


def test_an_audit_of_a_file_is_stale_when_the_file_is_another(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("1\n")
    made = audit_record(call={"file": str(file), "function": "f", "inputs": []}, source=source.file_hash(file))
    assert not record.is_stale(made)
    file.write_text("2\n")
    assert record.is_stale(made)

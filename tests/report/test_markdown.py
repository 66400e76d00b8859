"""Tables say what the records say, and the pages of the repository are current."""

from pathlib import Path

import pytest

from support import timing_record
from tilewright import record, settings, source
from tilewright.report import markdown

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("softmax", "speed", "audit", "banks", "check", "measuring", "portability", "reading")
    ),
]


def timing(kernel: str, us: float | None, case: int = 1, direction: str = "forward", verdict: str = "right", **more):
    reason = "" if verdict == "right" else "because"
    about = {"case": {"N": case}, "dtype": "bfloat16", "direction": direction, "verdict": verdict, "reason": reason}
    return timing_record(kernel, us, **(about | more))


def test_a_marked_block_is_replaced_and_the_rest_kept():
    page = "before\n<!-- records: softmax forward -->\nold\n<!-- end -->\nafter"
    filled = markdown.fill(
        page, [timing("eager", 4.0), timing("triton", 2.0), timing("eager", 9.0, direction="backward")]
    )
    assert filled.startswith("before\n")
    assert filled.endswith("\nafter")
    assert "| N=1 | 4.0 us, 25% | **2.0 us, 50%** |" in filled
    assert "Measured on NVIDIA H200, 20" in filled
    assert "9.0" not in filled
    assert markdown.fill(filled, []) != filled, "without records the table must not survive"


SUMMARY = "<!-- records: summary forward -->\n<!-- end -->"


def test_the_summary_names_the_fastest_of_ours_beside_what_one_could_use_otherwise():
    others = [timing("eager", 4.0), timing("compile", 5.0), timing("compile-max", 3.0)]
    ours = [timing("triton", 2.0), timing("cuda", 6.0)]
    filled = markdown.fill(SUMMARY, [*others, *ours])
    assert "| softmax | N=1 | 4.0 us | 3.0 us, compile-max |  | 2.0 us | triton | 50% | 1.50x |" in filled
    peer = timing("liger", 1.0, is_baseline=True)
    filled = markdown.fill(SUMMARY, [*others, *ours, peer])
    assert "| 3.0 us, compile-max | 1.0 us, liger | 2.0 us | triton | 50% | 0.50x |" in filled


def test_the_summary_shows_what_a_user_gets_though_another_of_ours_is_faster():
    ours = [timing("triton", 2.0), timing(source.PUBLIC, 2.5)]
    assert "| 4.0 us |  |  | 2.5 us | tilewright | 40% | 1.60x |" in markdown.fill(
        SUMMARY, [timing("eager", 4.0), *ours]
    )


def test_dtypes_other_than_the_usual_are_named():
    both = [timing("triton", 2.0), timing("triton", 3.0, dtype="float32")]
    for page in (SUMMARY, "<!-- records: softmax forward -->\n<!-- end -->"):
        filled = markdown.fill(page, both)
        assert "| N=1 |" in filled
        assert "| N=1 float32 |" in filled


def test_what_is_slower_than_what_one_had_is_listed_and_counted():
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
    page = "<!-- records: slower -->\n<!-- end -->"
    filled = markdown.fill(page, records)
    assert "| softmax | N=1 bfloat16 | 9.00 us | 5.00 us | 5.20 us | 1.040 |" in filled
    assert "| softmax | N=3 bfloat16 |  | 5.00 us | 9.00 us | 1.800 |" in filled
    assert filled.count("| softmax |") == 2, "within 2 %, by torch, no user's call, of older code"
    assert "These 2 of 4 calls are slower by more than 2% and ours.\n1 more" in filled
    assert "1.50 times as long as torch's own in the median of 2, no more than 1.5 times in 50%" in filled
    assert "Backward" not in filled, "that one is torch's"
    assert "These 0 of 0 calls" in markdown.fill(page, [timing("eager", 1.0)])


def test_hints_are_a_table_of_calls_and_what_runs_next():
    us = {"nothing": {"kept": [1.0, 2.0, 9.0], "plain": [3.0]}, "sum": {"kept": [4.0], "plain": [5.0]}}
    about = {"device": {"gpu": "h200", "name": "NVIDIA H200"}, "versions": {"torch": "2.11", "triton": "3.6.0"}}
    one = record.stamp("hint", "silu", source.PUBLIC, "of another day", case={"N": 8}, dtype="bfloat16", us=us, **about)
    page = markdown.fill("<!-- records: hints -->\n<!-- end -->", [one])
    assert "| call, then | nothing | sum |\n|---|--:|--:|\n| silu N=8, stale | 2.0 / 3.0 us | 4.0 / 5.0 us |" in page


def test_the_summary_says_what_is_no_difference():
    eager = timing("eager", 2.1, interval_us=[1.9, 2.3])
    filled = markdown.fill(SUMMARY, [eager, timing("triton", 2.0, interval_us=[1.9, 2.1])])
    assert "| 2.1 us |  |  | 2.0 us | triton | 50% | 1.05x, tie |" in filled
    ours = [timing(name, us, interval_us=[1.9, 2.2]) for name, us in (("triton", 2.0), ("cuda", 2.1))]
    assert "| triton | 50% | 2.00x |" in markdown.fill(SUMMARY, [timing("eager", 4.0), *ours]), "a tie of ours is none"


def test_the_summary_leaves_out_a_case_that_none_of_ours_has_and_keeps_one_that_only_ours_has():
    filled = markdown.fill(SUMMARY, [timing("eager", 4.0, case=1), timing("triton", 2.0, case=2)])
    assert "N=1" not in filled
    assert "| softmax | N=2 |  |  |  | 2.0 us | triton | 50% |  |" in filled


def test_the_largest_is_the_case_with_the_most_bytes():
    small, large = ({"cost": {"read": n, "written": n, "flops": {}}} for n in (10**6, 10**7))
    ours = [timing("triton", 2.0, case=1, **large), timing("triton", 3.0, case=2, **small)]
    filled = markdown.fill("<!-- records: largest forward -->\n<!-- end -->", ours)
    assert "N=1" in filled
    assert "N=2" not in filled


def test_sizes_stand_apart_from_bench_cases_and_are_held_against_the_best_of_torch():
    kernels = (("eager", 4.0, 10.0), ("compile", 2.0, 20.0), (source.PUBLIC, 3.0, 15.0))
    sized = [timing(name, us, host_us=host, sized=True) for name, us, host in kernels]
    filled = markdown.fill("<!-- records: sizes -->\n<!-- end -->", [*sized, timing("eager", 1.0)])
    assert "| softmax | N=1 | 2.0 MB | 4.0 us | 2.0 us | 3.0 us | 1.50 | 1.50 |" in filled
    assert "4.0 us" not in markdown.fill(SUMMARY, [*sized, timing("triton", 1.0)])


def test_calls_that_go_to_torch_are_named():
    kernels = (("eager", 4.0), (source.PUBLIC, 3.0))
    sized = [timing(name, us, host_us=5.0, sized=True, is_torchs=name == source.PUBLIC) for name, us in kernels]
    assert "| 4.0 us |  | 3.0 us, by torch |" in markdown.fill("<!-- records: sizes -->\n<!-- end -->", sized)
    bench = [one | {"sized": False} for one in sized]
    assert "| 3.0 us | tilewright, by torch |" in markdown.fill(SUMMARY, bench)


def test_each_gpu_has_a_table_of_its_own():
    page = "<!-- records: softmax forward -->\n<!-- end -->"
    filled = markdown.fill(page, [timing("eager", 4.0), timing("eager", 8.0, gpu="l4")])
    assert filled.count("| case |") == 2
    assert "**8.0 us" in filled
    assert "**4.0 us" in filled


@pytest.mark.parametrize("what", ["sofmax forward", "softmax", "softmax up", "summary"])
def test_a_block_that_names_nothing_is_refused(what):
    with pytest.raises(markdown.Unfillable, match=what):
        markdown.fill(f"<!-- records: {what} -->\n<!-- end -->", [])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_are_current(page):
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


def test_audits_stand_beside_what_was_counted():
    page = "<!-- records: audit -->\n<!-- end -->"
    filled = markdown.fill(page, [audit_record(), timing("eager", 4.0)])
    row = "| softmax, triton, M=3,N=4 bfloat16, stale | 5.0 | 2.0 | 2.0 | 1.010x | 1.0 | 1.0 | 0.990x |"
    assert row in filled
    assert "Counted on NVIDIA H200" in filled
    assert "No records yet" in markdown.fill(page, [timing("eager", 4.0)])


def test_verdicts_of_kernels_and_of_files_have_tables_of_their_own():
    case = {"case": "M=1,N=1", "dtype": "float32", "verdict": "right", "reason": ""}
    content = {"verdict": "right", "reason": "", "labels": ["1 left out: x", "forward only"]}
    content |= {"device": {"name": "NVIDIA H200"}, "versions": {"torch": "2.11.0", "triton": "3.6.0"}}
    cases = [case, case, case | {"verdict": "unsupported"}]
    records = [
        record.stamp("verdict", "softmax", "triton", "old", cases=cases, **content),
        record.stamp("verdict", "softmax", "a.py", "x", cases=cases, file="no/a.py", **content),
    ]
    ours, files = (markdown.fill(f"<!-- records: {w} -->\n<!-- end -->", records) for w in ("verdicts", "submissions"))
    assert "| softmax | triton | right, stale | 2 / 2 | forward only |" in ours
    assert "a.py" not in ours
    assert "| softmax | `no/a.py` | right | 2 / 2 | forward only |" in files
    assert "Checked on NVIDIA H200" in files


def test_each_gpu_has_a_column_with_what_a_kernel_takes_of_it():
    figures = {"registers": 40, "shared": 512, "spills": 0, "blocks": 12, "occupancy": 0.75, "limiter": "registers"}
    gpus = {"a100-80gb": figures, "mi300x": figures | {"occupancy": 1.0, "limiter": "", "spills": 8}}
    content = {"versions": {"triton": "3.6.0"}, "file": "src/tilewright/ops/relu.py"}
    made = record.stamp("resources", "relu", "_relu", "x", gpus=gpus, **content)
    other = record.stamp("resources", "relu", "_only", "x", gpus={"mi300x": figures}, **content)
    filled = markdown.fill("<!-- records: portability -->\n<!-- end -->", [made, other])
    link = "](../src/tilewright/ops/relu.py)"
    assert "| kernel | a100-80gb, sm_80 | mi300x, gfx942 |" in filled
    assert f"| [`_relu`{link} | 40, 512 B, 75% (registers) | 40, 512 B, 100%, 8 B spilled |" in filled
    assert f"| [`_only`{link} |  | 40, 512 B, 75% (registers) |" in filled
    assert "by triton 3.6.0." in filled


def test_an_audit_of_a_file_is_stale_when_the_file_is_another(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("1\n")
    made = audit_record(call={"file": str(file), "function": "f", "inputs": []}, source=source.file_hash(file))
    assert not record.is_stale(made)
    file.write_text("2\n")
    assert record.is_stale(made)

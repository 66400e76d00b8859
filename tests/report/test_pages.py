"""Tables say what the records say, and the pages of the repository are current."""

from pathlib import Path

import pytest

from tilewright import record, settings
from tilewright.report import markdown
from tilewright.report.rows import rows

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "softmax.md"]


def timing(kernel: str, us: float | None, case: int = 1, direction: str = "forward", verdict: str = "right"):
    return {
        "op": "nothing",
        "kernel": kernel,
        "date": "2026-01-02T03:04:05+00:00",
        "source": "",
        "case": {"N": case},
        "dtype": "float32",
        "direction": direction,
        "cost": {"read": 10**6, "written": 10**6, "flops": {"fp32": 1.0}},
        "verdict": verdict,
        "reason": "" if verdict == "right" else "because",
        "median_us": us,
        "ceilings": {"copy": 2e12, "read": 2e12},
        "device": {"gpu": "weird", "name": "Weird 9000"},
        "versions": {"torch": "1", "triton": "2"},
    }


def test_rows_are_grouped_by_case_fastest_first_and_backward_last():
    found = list(
        rows(
            [
                timing("eager", 4.0, direction="backward"),
                timing("eager", 4.0),
                timing("eager", 8.0, case=2),
                timing("triton", 2.0),
                timing("broken", None, verdict="wrong"),
            ]
        )
    )
    assert [(r.direction, r.case, r.kernel) for r in found] == [
        ("forward", "N=1", "triton"),
        ("forward", "N=1", "eager"),
        ("forward", "N=1", "broken"),
        ("forward", "N=2", "eager"),
        ("backward", "N=1", "eager"),
    ]
    best, eager, broken = found[:3]
    assert best.is_fastest
    assert not eager.is_fastest
    assert (best.share, best.against_eager, best.rate) == (0.5, 2.0, "1000 GB/s")
    assert (broken.us, broken.share, broken.verdict) == (None, None, "wrong")


def test_a_marked_block_is_replaced_and_the_rest_kept():
    page = "before\n<!-- records: nothing forward -->\nold\n<!-- end -->\nafter"
    filled = markdown.fill(
        page, [timing("eager", 4.0), timing("triton", 2.0), timing("eager", 9.0, direction="backward")]
    )
    assert filled.startswith("before\n")
    assert filled.endswith("\nafter")
    assert "| N=1 | **2.0 us, 50%** | 4.0 us, 25% |" in filled
    assert "Weird 9000, 2026-01-02" in filled
    assert "9.0" not in filled
    assert markdown.fill(filled, []) != filled, "without records the table must not survive"


def test_the_summary_names_the_fastest_beside_both_baselines():
    page = "<!-- records: summary forward -->\n<!-- end -->"
    filled = markdown.fill(page, [timing("eager", 4.0), timing("compile", 5.0), timing("triton", 2.0)])
    assert "| nothing | N=1 | 4.0 us | 5.0 us |  | 2.0 us | triton | 50% | 2.00x |" in filled


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_are_current(page):
    found = [record.read(path) for path in sorted(settings.results_dir().rglob("*.jsonl"))]
    assert not any(file.torn or file.corrupt for file in found)
    records = list(record.latest([r for file in found for r in file.records]))
    text = page.read_text()
    assert markdown.fill(text, records) == text, "run `make pages`"
    assert "No records yet" not in text

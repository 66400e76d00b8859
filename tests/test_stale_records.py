"""A record is fresh if its source hash or its launch fingerprint is that of the current code."""

from pathlib import Path

import pytest

from sample_records import timing_record
from tilewright import record, settings, source
from tilewright.workbench.fingerprints import can_be_traced

TOOLCHAIN = {"triton": "3.6.0", "nvrtc": "13.4", "torch": "2.13.0"}
LAUNCHES = ["grid 3x1x1 block 128 cluster 1 shared 0 arguments abcd code 0123456789abcdef"]
OLD_SOURCE = "0" * 16


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """An empty folder of records."""
    monkeypatch.setenv("TILEWRIGHT_RESULTS", str(tmp_path))
    assert settings.results_dir() == tmp_path
    return tmp_path


def write_fingerprints(results: Path, kernel: str = "triton", **changes) -> None:
    """Write down the fingerprint of the current code for the call that `timing` measures."""
    one = timing_record(kernel)
    fields = {
        "device": {"gpu": "h200"},
        "toolchain": TOOLCHAIN,
        "versions": one["versions"],
        "calls": {record.call_key(one): record.digest(LAUNCHES)},
    } | changes
    current = fields.pop("source", source.kernel_hash("softmax", kernel))
    record.append(
        results / "h200" / record.FINGERPRINTS, [record.stamp("fingerprint", "softmax", kernel, current, **fields)]
    )


def timing(kernel: str = "triton", *, launches: list[str] = LAUNCHES, **changes):
    return timing_record(kernel) | {"fingerprint": {"toolchain": TOOLCHAIN, "launches": launches}} | changes


def test_equal_source_is_fresh_without_a_fingerprint(results):
    assert record.stale_reason(timing_record()) is None


def test_changed_source_without_a_fingerprint_is_stale(results):
    assert "has no fingerprint" in (record.stale_reason(timing_record() | {"source": OLD_SOURCE}) or "")


def test_changed_source_with_the_current_fingerprint_is_fresh(results):
    write_fingerprints(results)
    assert record.stale_reason(timing(source=OLD_SOURCE)) is None


def test_changed_source_is_stale_until_fingerprints_of_the_current_code_exist(results):
    assert "tilewright records verify" in (record.stale_reason(timing(source=OLD_SOURCE)) or "")
    write_fingerprints(results, source="1" * 16)  # those of an earlier version of the code
    assert "tilewright records verify" in (record.stale_reason(timing(source=OLD_SOURCE)) or "")


@pytest.mark.parametrize(
    "launches",
    [
        [LAUNCHES[0].replace("grid 3x1x1", "grid 4x1x1")],
        [LAUNCHES[0].replace("block 128", "block 256")],
        [LAUNCHES[0].replace("0123", "3210")],
        LAUNCHES * 2,
        [],
    ],
)
def test_changed_launches_are_stale(results, launches):
    write_fingerprints(results)
    assert record.stale_reason(timing(source=OLD_SOURCE, launches=launches)) == "the launches changed"


def test_a_call_that_was_not_traced_is_stale(results):
    write_fingerprints(results, calls={})
    assert record.stale_reason(timing(source=OLD_SOURCE)) == "the launches changed"


@pytest.mark.parametrize("tool", TOOLCHAIN)
def test_fingerprints_of_different_compilers_prove_nothing(results, tool):
    write_fingerprints(results, toolchain=TOOLCHAIN | {tool: "1.0"})
    assert "another compiler" in (record.stale_reason(timing(source=OLD_SOURCE)) or "")
    assert record.stale_reason(timing()) is None, "an equal source needs no fingerprint"


@pytest.mark.parametrize("library", ["torch", "triton"])
def test_a_baseline_of_another_library_version_is_stale(results, library):
    versions = timing_record()["versions"]
    write_fingerprints(results, "eager", versions=versions | {library: "9.9"})
    reason = record.stale_reason(timing("eager", versions=versions)) or ""
    assert library in reason
    assert "9.9" in reason


def test_our_kernel_stays_fresh_when_torch_changes(results):
    versions = timing_record()["versions"]
    write_fingerprints(results, versions=versions | {"torch": "9.9"})
    assert record.stale_reason(timing(versions=versions)) is None


def test_a_removed_kernel_is_stale(results):
    write_fingerprints(results)
    assert "gone" in (record.stale_reason(timing() | {"kernel": "removed"}) or "")


def test_a_removed_operation_and_a_users_missing_file_cannot_be_judged(results, tmp_path):
    assert record.stale_reason(timing(source=OLD_SOURCE, op="removed")) is None
    assert record.stale_reason(timing(source=OLD_SOURCE, file=str(tmp_path / "missing.py"))) is None


def test_a_users_file_is_stale_when_its_code_changes(results, tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text("def f(x):\n    return x\n")
    one = timing(source=source.file_hash(path), file=str(path), code=source.code_hash(path))
    assert record.stale_reason(one) is None
    path.write_text('def f(x):\n    """Return x."""\n    return x  # unchanged\n')
    assert record.stale_reason(one) is None, "comments and docstrings are not code"
    path.write_text("def f(x):\n    return 2 * x\n")
    assert record.stale_reason(one) == f"{path} changed"


@pytest.mark.slow
def test_every_fresh_gpu_record_has_a_fingerprint():
    """The newest record of each call that can be traced offline."""
    records = [one for path in settings.record_files() for one in record.read(path).records]
    fresh = [one for one in record.latest(records) if can_be_traced(one) and not record.is_stale(one)]
    lacking = [
        f"{one['kind']} {one['op']} {one['kernel']} {record.call_key(one)}"
        for one in fresh
        if not one.get("fingerprint", {}).get("launches")
    ]
    assert len(fresh) > 100
    assert not lacking, "\n".join(lacking[:20])

"""Record files: appending, reading and staleness."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from sample_records import timing_record
from tilewright import record, source
from tilewright.errors import CannotRead, CannotWrite


def entry(n: int = 0, **more):
    return timing_record(n=n, **more)


def test_appended_records_are_read_back(tmp_path):
    path = tmp_path / "deep" / "er" / "r.jsonl"
    record.append(path, [entry(1)])
    record.append(path, [entry(2), entry(3)])
    found = record.read(path)
    assert [r["n"] for r in found.records] == [1, 2, 3]
    assert (found.torn, found.corrupt) == ([], [])


WRITER = """
import sys
from pathlib import Path
from tilewright import record, source
for n in range(200):
    record.append(Path(sys.argv[1]), [record.stamp("note", sys.argv[2], "k", "h", n=n, padding="x" * 3000)])
"""


def _writer(path, name):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), name])


def test_concurrent_writers_lose_nothing(tmp_path):
    path = tmp_path / "r.jsonl"
    writers = [_writer(path, name) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    found = record.read(path)
    for name in "ab":
        assert [r["n"] for r in found.records if r["op"] == name] == list(range(200))
    assert (found.torn, found.corrupt) == ([], [])


def test_a_writer_waits_for_the_lock(tmp_path):
    """Checking for a torn line and appending are one atomic step."""
    path = tmp_path / "r.jsonl"
    writer = threading.Thread(target=record.append, args=(path, [entry()]))
    with path.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        writer.start()
        writer.join(timeout=0.3)
        assert writer.is_alive()
        assert path.read_text() == ""
    writer.join()
    assert len(record.read(path).records) == 1


def test_a_file_of_a_killed_writer_can_be_read_and_appended_to(tmp_path):
    path = tmp_path / "r.jsonl"
    writer = _writer(path, "a")
    while not path.exists() or path.stat().st_size < 50_000:
        assert writer.poll() is None
        time.sleep(0.001)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    whole = len(record.read(path).records)
    assert whole > 0
    record.append(path, [entry()])
    assert len(record.read(path).records) == whole + 1


def test_a_torn_line_is_reported_and_the_next_record_is_on_its_own_line(tmp_path):
    path = tmp_path / "r.jsonl"
    record.append(path, [entry(1)])
    with path.open("a") as file:
        file.write(json.dumps(entry(2))[:40])
    record.append(path, [entry(3)])
    found = record.read(path)
    assert [r["n"] for r in found.records] == [1, 3]
    assert (found.torn, found.corrupt) == ([2], [])


SCHEMA_AS_TEXT = json.dumps(entry() | {"schema": "1"})
WITHOUT_DIRECTION = json.dumps({key: value for key, value in entry().items() if key != "direction"})


@pytest.mark.parametrize(
    "line", ["nonsense", "[1, 2]", '{"schema": 1}', '{"a": }', '"text"', SCHEMA_AS_TEXT, WITHOUT_DIRECTION]
)
def test_a_corrupt_line_is_reported_and_loses_no_other(tmp_path, line):
    path = tmp_path / "r.jsonl"
    record.append(path, [entry(1)])
    with path.open("a") as file:
        file.write(line + "\n")
    record.append(path, [entry(2)])
    found = record.read(path)
    assert [r["n"] for r in found.records] == [1, 2]
    assert found.corrupt == [2]


def test_records_of_a_newer_version_are_not_corrupt(tmp_path):
    path = tmp_path / "r.jsonl"
    later = {"schema": record.SCHEMA + 1, "kind": "timing", "unknown": "field"}
    record.append(path, [entry(1), later, {"schema": record.SCHEMA}])
    found = record.read(path)
    assert [r["n"] for r in found.records] == [1]
    assert (found.newer, found.corrupt, found.torn) == ([2], [3], [])


def without_version_2_fields(timing):
    return {key: value for key, value in timing.items() if key not in record.SINCE_2}


def test_missing_fields_of_a_version_1_timing_are_filled_in(tmp_path):
    path = tmp_path / "r.jsonl"
    first = without_version_2_fields(entry()) | {"schema": 1}
    record.append(path, [first])
    (found,) = record.read(path).records
    assert found == first | record.SINCE_2
    assert found["calls"] == 1
    assert found["interval_us"] is None


def test_a_timing_of_the_current_version_must_be_complete(tmp_path):
    path = tmp_path / "r.jsonl"
    record.append(path, [without_version_2_fields(entry())])
    assert record.read(path).corrupt == [1]


def test_writing_to_a_folder_raises(tmp_path):
    with pytest.raises(CannotWrite, match="choose a file that you have permission to write"):
        record.require_writable(tmp_path)


def test_reading_a_folder_raises(tmp_path):
    with pytest.raises(CannotRead, match="file of JSON lines"):
        record.read(tmp_path)


def test_checking_that_a_file_is_writable_does_not_create_it(tmp_path):
    record.require_writable(tmp_path / "r.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_one_gpu_does_not_hide_another():
    assert len(list(record.latest([entry(gpu="h200"), entry(gpu="a100-80gb")]))) == 2


def test_a_size_of_a_sweep_does_not_hide_a_bench_case():
    assert len(list(record.latest([entry(), entry() | {"sized": True}]))) == 2


def test_the_newest_record_of_a_case_counts():
    old, new = entry(1, case={"M": 1}), entry(2, case={"M": 1})
    new["date"] = "9999-01-01"
    other = entry(3, case={"M": 2})
    assert [r["n"] for r in record.latest([new, old, other])] == [2, 3]


def test_a_record_is_stale_if_and_only_if_the_source_changed():
    assert not record.is_stale(entry())
    assert record.is_stale(entry() | {"source": "0" * 16})
    assert record.is_stale(entry() | {"kernel": "gone"})
    assert not record.is_stale(entry() | {"source": "0" * 16, "file": "mine.py"})


def test_a_sweep_is_stale_when_its_kernel_changed():
    sweep = record.stamp("sweep", "sweep", "triton", source.file_hash(record.SWEEP))
    assert not record.is_stale(sweep)
    assert record.is_stale(sweep | {"source": "0" * 16})


def test_the_newest_sweep_of_each_gpu_counts():
    def sweep(n, gpu, date):
        return record.stamp("sweep", "sweep", "triton", "x", n=n, device={"gpu": gpu}) | {"date": date}

    sweeps = [sweep(1, "h200", "2026-01-02"), sweep(2, "h200", "2026-01-01"), sweep(3, "l4", "2026-01-01")]
    assert [r["n"] for r in record.latest(sweeps)] == [1, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"device": {}},
        {"device": "a GPU"},
        {"kernel": 3},
        {"case": None},
        {"cost": {"read": 1}},
        {"ceilings": None},
        {"direction": "sideways"},
        {"median_us": "soon"},
        {"median_us": -1.0},
        {"samples_us": []},
        {"interval_us": [1.0]},
        {"against": "eager"},
        {"state": None},
        {"calls": "many"},
        {"kind": "sweep", "points": []},
    ],
    ids=str,
)
def test_a_record_with_an_invalid_field_is_corrupt(tmp_path, change):
    path = tmp_path / "records.jsonl"
    record.append(path, [timing_record(), timing_record() | change])
    found = record.read(path)
    assert (len(found.records), found.corrupt) == (1, [2])


@pytest.mark.parametrize("text", ["[" * 200_000, "1" * 5000, '{"schema": NaN}'])
def test_lines_that_cannot_be_parsed_are_corrupt(tmp_path, text):
    (tmp_path / "records.jsonl").write_text(text + "\n")
    assert record.read(tmp_path / "records.jsonl").corrupt == [1]

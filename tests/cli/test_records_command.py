"""Tests of `tilewright records`."""

import json
import random
import subprocess
import sys

import pytest

from cli.command import assert_one_line, in_process
from sample_records import timing_record
from tilewright import record
from tilewright.workbench import fingerprints

CURRENT = ["grid 3x1x1 block 128 cluster 1 shared 0 arguments 0000 code 0123456789abcdef"]
TOOLS = {"triton": "3.6.0"}


def timing(kernel="triton", launches=None, **more):
    """A fresh timing of softmax, with a fingerprint if launches are given."""
    fingerprint = {"fingerprint": {"toolchain": TOOLS, "launches": launches}} if launches else {}
    return timing_record(kernel, 10.0, **fingerprint) | more


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A function that writes records to an empty results folder."""
    monkeypatch.setenv("TILEWRIGHT_RESULTS", str(tmp_path / "results"))

    def write(*records):
        record.append(tmp_path / "results" / "h200" / "softmax.jsonl", list(records))
        return tmp_path / "results" / "h200"

    return write


@pytest.fixture
def command(monkeypatch, capsys):
    return in_process("records", monkeypatch, capsys)


@pytest.fixture
def traced(monkeypatch):
    """Every kernel of the current code launches CURRENT; the jobs that were traced."""
    jobs = []

    def trace_all(wanted, on_done):
        jobs.extend(wanted)
        return [dict.fromkeys(job.calls, CURRENT) for job in wanted]

    monkeypatch.setattr(fingerprints, "trace_all", trace_all)
    monkeypatch.setattr("tilewright.workbench.inspect.fingerprint.toolchain", lambda: TOOLS)
    return jobs


def test_fresh_and_stale_records_are_counted_with_the_reason(results, command):
    results(timing(), timing("eager"), timing("cuda", source="0" * 16), timing("gone"))
    done = command()
    assert done.returncode == 0, done.stderr
    assert "2 fresh, 2 stale" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("softmax"))
    assert row.split()[1:3] == ["2", "2"]
    assert "1: the source changed, and the record has no fingerprint" in row
    assert "1: the kernel is gone" in row


def test_an_operation_is_listed_by_kernel_and_kind(results, command):
    results(timing(), timing("cuda", source="0" * 16))
    rows = [line.split() for line in command("softmax").stdout.splitlines()]
    assert ["softmax", "triton", "timing", "h200", "1"] in rows
    assert ["softmax", "cuda", "timing", "h200", "0", "1"] in [row[:6] for row in rows]
    assert command("list", "softmax").stdout == command("softmax").stdout


def test_only_the_newest_record_of_a_call_counts(results, command):
    results(timing(source="0" * 16, date="2020-01-01T00:00:00+00:00"), timing())
    assert "1 fresh, 0 stale" in command().stdout


def test_the_list_as_json(results, command):
    results(timing(), timing("cuda", source="0" * 16))
    cuda, triton = map(json.loads, command("--json").stdout.splitlines())
    about = {"op": "softmax", "kind": "timing", "gpu": "h200"}
    assert triton == about | {"kernel": "triton", "fresh": 1, "stale": 0, "reasons": {}}
    reasons = {"the source changed, and the record has no fingerprint": 1}
    assert cuda == about | {"kernel": "cuda", "fresh": 0, "stale": 1, "reasons": reasons}


def test_the_list_does_not_import_torch(results):
    results(timing())
    code = "import sys; sys.argv = ['tilewright', 'records']; from tilewright import cli\ntry: cli.main()\n"
    code += "finally: sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 fresh" in done.stdout


def test_the_same_launches_are_verified(results, command, traced):
    results(timing(launches=CURRENT), timing("eager"))
    done = command("verify")
    assert done.returncode == 0, done.stderr
    assert "Compared 1 records: 1 have the same launches, 0 have others." in done.stdout
    assert [job.kernel for job in traced] == ["triton"], "the other one has no fingerprint"


def test_a_fresh_record_with_other_launches_exits_with_1(results, command, traced):
    results(timing(launches=["another launch"]), timing("cuda", launches=CURRENT))
    done = command("verify")
    assert done.returncode == 1
    assert "Compared 2 records: 1 have the same launches, 1 have others." in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("softmax"))
    assert row.split() == ["softmax", "triton", "M=3,N=50", "float32", "forward", "counts", "as", "fresh"]
    assert "Counted as fresh although their launches differ: 1; correct this with" in done.stdout
    lines = [json.loads(line) for line in command("verify", "--json").stdout.splitlines()]
    assert [(line["kernel"], line["same"], line["contradicts"]) for line in lines] == [
        ("triton", False, True),
        ("cuda", True, False),
    ]


def test_a_stale_record_with_other_launches_is_listed_and_exits_with_0(results, command, traced):
    results(timing(launches=["another launch"], source="0" * 16))
    done = command("verify", "softmax", "--gpu", "H200")
    assert done.returncode == 0, done.stderr
    assert "0 have the same launches, 1 have others" in done.stdout
    assert next(line for line in done.stdout.splitlines() if "triton" in line).rstrip().endswith("stale")


def test_a_stale_record_with_the_same_launches_suggests_an_update(results, command, traced):
    results(timing(launches=CURRENT, source="0" * 16))
    done = command("verify")
    assert done.returncode == 0, done.stderr
    assert "Counted as stale although their launches are the same: 1; correct this with" in done.stdout
    assert "Counted as" not in command("verify", "--update").stdout
    assert "1 fresh, 0 stale" in command().stdout


def test_update_saves_the_fingerprints_of_the_current_code(results, command, traced):
    folder = results(timing(), timing("cuda", launches=["another launch"]), timing("eager", source="0" * 16))
    done = command("verify", "--update")
    assert done.returncode == 0, done.stderr
    assert "Saved the fingerprints of 2 kernels; 1 records got their first one." in done.stdout
    saved = {r["kernel"]: r for r in record.read(folder / record.FINGERPRINTS).records}
    assert saved.keys() == {"triton", "cuda"}
    assert saved["triton"]["calls"] == {"M=3,N=50 float32 forward": record.digest(CURRENT)}
    written = {r["kernel"]: r for r in record.read(folder / "softmax.jsonl").records}
    assert written["triton"]["fingerprint"] == {"toolchain": TOOLS, "launches": CURRENT}
    assert written["cuda"]["fingerprint"]["launches"] == ["another launch"]
    assert "fingerprint" not in written["eager"]


def test_a_sample_is_repeated_by_its_seed(results, command, traced):
    results(*(timing(launches=CURRENT, case={"M": n, "N": 50}) for n in range(1, 40)))

    def sample(*arguments):
        traced.clear()
        assert command("verify", "--sample", 3, *arguments).returncode == 0
        return [key for job in traced for key in job.calls]

    assert len(first := sample()) == 3
    assert sample() == first
    assert sample("--seed", 1) != first


def test_mistakes_are_one_line(results, command):
    results(timing())
    assert_one_line(command("verify", "sofmax"), 2, "did you mean 'softmax'")
    assert_one_line(command("sofmax"), 2, "did you mean 'softmax'")
    assert_one_line(command("--gpu", "b200"), 2, "no records of 'b200'; there are records of h200")
    assert_one_line(command("verify", "--update", "--sample", 3), 2, "leave out OP and --sample")
    assert_one_line(command("verify", "softmax", "--update"), 2, "leave out OP and --sample")
    assert_one_line(command("verify", "--never"), 2, "See: tilewright records verify --help")


@pytest.mark.slow
def test_a_sample_of_the_committed_records():
    """As a real command, since it starts worker processes; another sample on every run."""
    seed = str(random.randrange(10**6))
    arguments = [sys.executable, "-m", "tilewright", "records", "verify", "--sample", "6", "--seed", seed]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"  # 1 if a fresh record has other launches
    assert "Compared 6 records: " in done.stdout, f"seed {seed}: {done.stdout}"

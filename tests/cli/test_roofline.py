"""Tests of `tilewright roofline`: from a fake GPU, from records, and from a datasheet."""

import json
import re

import pytest

from cli.command import assert_one_line, in_process, run
from sample_records import timing_record
from tilewright import hardware, record, source
from tilewright.workbench.bench import microbenchmarks

TIMES = [2**n for n in range(11)]
CEILINGS = {"copy": 4e12, "read": 4e12, "fp32": 64e12, "special": 4e12}
COST = {"read": 10**8, "written": 10**8, "flops": {"fp32": 10**9, "special": 0.0}}


def timing(kernel: str, us: float | None, **more):
    return timing_record(kernel, us, **{"cost": COST, "ceilings": {"copy": 4e12}} | more)


def sweep(**more):
    points = [
        {"k": k, "us": max(32.0, k / 2), "interval_us": [max(32.0, k / 2)] * 2, "bytes": 2**27, "flops": k * 2**24}
        for k in TIMES
    ]
    content = {"elements": 2**24, "points": points, "ceilings": CEILINGS, "versions": {}}
    content |= {"device": {"gpu": "h200", "name": "NVIDIA H200"}}
    return record.stamp("sweep", "sweep", "triton", source.file_hash(record.SWEEP), **content | more)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A function that writes records to an empty results folder."""
    folder = tmp_path / "results"
    monkeypatch.setenv("TILEWRIGHT_RESULTS", str(folder))

    def write(*records):
        record.append(folder / "r.jsonl", list(records))
        return folder / "r.jsonl"

    return write


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "has_gpu", lambda: False)


@pytest.fixture
def command(monkeypatch, capsys):
    """The command in this process; returns its exit code, output and errors."""
    run = in_process("roofline", monkeypatch, capsys)

    def roofline(*arguments):
        done = run(*arguments)
        return done.returncode, done.stdout, done.stderr

    return roofline


@pytest.mark.usefixtures("without_gpu")
def test_the_gpu_with_the_most_records_is_drawn(results, command):
    results(timing("eager", 100.0), timing("triton", 60.0), timing("triton", 300.0, gpu="l4"), sweep())
    code, out, err = command()
    assert (code, err) == (0, "")
    assert "NVIDIA H200, recorded, most recently on 20" in out
    assert "Measured ceilings: copy 4000 GB/s, fp32 64 TFLOP/s" in out
    assert "A softmax" in out
    plot = [line.partition("│")[2] for line in out.splitlines() if "│" in line]
    assert sum(line.count("A") for line in plot) == 1
    assert sum(line.count("+") for line in plot) > 5
    lines = out.splitlines()
    ours, baseline = lines[(first := next(n for n, line in enumerate(lines) if "M=3" in line)) : first + 2]
    assert "triton" in ours
    assert "16.7" in ours, "10^9 operations in 60 us"
    assert " 83 " in ours
    assert "eager" in baseline
    assert "stale" not in out
    assert out.splitlines()[-1].startswith("Next: on a machine with a GPU: tilewright roofline")


@pytest.mark.usefixtures("without_gpu")
def test_the_sweep(results, command):
    results(sweep())
    _, out, _ = command()
    rows = [line.split() for line in out.splitlines() if line.strip().split(" ")[0].isdigit()]
    rows = [row for row in rows if row[-1] in ("memory", "arithmetic")]
    assert [int(row[0]) for row in rows] == TIMES
    assert [row[-1] for row in rows] == ["memory"] * 6 + ["arithmetic"] * 5
    assert "The time starts to grow at k = 128; the ceilings predict it at k = 64." in out
    assert "half of fp32: 32 TFLOP/s" in out
    assert "The time starts" not in command("--no-sweep")[1]


@pytest.mark.usefixtures("without_gpu")
def test_stale_records_are_marked(results, command):
    results(timing("triton", 60.0) | {"source": "0" * 16}, sweep() | {"source": "0" * 16})
    _, out, _ = command()
    assert "float32 elements (stale: the source changed)" in out
    assert next(line for line in out.splitlines() if "M=3" in line).rstrip().endswith("stale")


@pytest.mark.usefixtures("without_gpu", "results")
def test_a_gpu_without_records_is_drawn_from_its_datasheet(command):
    code, out, err = command("--gpu", "L4")
    assert (code, err) == (0, "")
    assert "l4, from its datasheet (no records)" in out
    assert "Datasheet peaks: copy 300 GB/s, fp32 30.3 TFLOP/s, tensor.bfloat16 121 TFLOP/s" in out


@pytest.mark.usefixtures("without_gpu")
def test_a_gpu_without_datasheet_is_drawn_from_its_records(results, command):
    results(timing("triton", 60.0, gpu="tb-303", ceilings=CEILINGS))
    code, out, _ = command("--gpu", "tb-303")
    assert code == 0
    assert "NVIDIA TB-303, recorded" in out


@pytest.mark.usefixtures("without_gpu")
def test_json_lines(results, command):
    results(timing("triton", 60.0), timing("broken", None, verdict="wrong"), sweep())
    code, out, _ = command("--json")
    first, kernel, swept = map(json.loads, out.splitlines())
    assert code == 0
    assert first["ceilings"]["copy"] == {"per_second": 4e12, "measured": True}
    assert first["ceilings"]["special"]["measured"]
    assert (kernel["kernel"], kernel["unit"], kernel["intensity"]) == ("triton", "fp32", 5.0)
    assert (swept["kind"], swept["stale"]) == ("sweep", False)


@pytest.mark.usefixtures("without_gpu")
def test_the_page_shows_the_records_of_one_gpu(results, command, monkeypatch, tmp_path):
    from tilewright.report import site

    written = []
    monkeypatch.setattr(site, "single_roofline", lambda records, path: written.append((records, path)))
    results(timing("triton", 60.0), timing("triton", 60.0, gpu="l4"), sweep())
    page = tmp_path / "page.html"
    code, out, _ = command("--html", page)
    assert code == 0
    ((records, path),) = written
    assert path == page
    assert [(r["kind"], r["device"]["gpu"]) for r in records] == [("timing", "h200"), ("sweep", "h200")]
    assert f"Next: open {page}" in out
    code, _, err = command("--gpu", "b200", "--html", page)
    assert code == 2
    assert "b200 has none" in err


@pytest.mark.usefixtures("without_gpu")
def test_records_of_a_newer_version_are_skipped(results, command):
    path = results(timing("triton", 60.0), {"schema": record.SCHEMA + 1})
    code, out, err = command()
    assert code == 0
    assert "softmax" in out
    assert err == (f"tilewright: {path}, line 2 was written by a newer version of Tilewright; update to read it\n")


@pytest.mark.usefixtures("without_gpu")
def test_nothing_is_recorded_without_a_gpu(results, command, tmp_path):
    results(timing("triton", 60.0))
    code, _, err = command("--record", tmp_path / "new.jsonl")
    assert code == 0
    assert "nothing was measured, so nothing was written" in err
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.usefixtures("without_gpu", "results")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "h2000"), "did you mean 'h200'"),
        ((), "draw a GPU from its datasheet with --gpu h200"),
        (("--no-sweep", "--record", "r.jsonl"), "leave out --no-sweep"),
        (("--samples", "1"), "--samples"),
        (("--record", "/"), "cannot write '/'"),
        (("--html", "/"), "cannot write '/'"),
    ],
)
def test_every_mistake_is_one_line(command, arguments, words):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_on_a_gpu_it_measures_records_and_draws(monkeypatch, results, command, tmp_path):
    """The whole command, with a fake GPU and a fake timer."""
    from tilewright import timer
    from tilewright.workbench.bench import sweep as tool

    points = [tool.Point(k, max(32.0, k / 2), (32.0, 32.0), 2**27, k * 2**24) for k in TIMES]
    requested = []

    def fake_sweep(timer, samples):
        requested.append(samples)
        return points

    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(hardware, "current_gpu", lambda: {"gpu": "h200", "name": "NVIDIA H200"})
    monkeypatch.setattr(timer, "Timer", object)
    monkeypatch.setattr(microbenchmarks, "measure", lambda timer: CEILINGS)
    monkeypatch.setattr(tool, "sweep", fake_sweep)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    results(timing("triton", 60.0), timing("triton", 60.0, gpu="l4"))
    path = tmp_path / "sweep.jsonl"
    code, out, err = command("--record", path, "--samples", 7)
    assert (code, err, requested) == (0, "", [7])
    assert "NVIDIA H200, measured now" in out
    assert "A softmax" in out
    assert f"Next: the sweep is in {path}" in out
    (written,) = record.read(path).records
    assert (written["kind"], written["elements"], written["ceilings"]) == ("sweep", tool.ELEMENTS, CEILINGS)
    assert [p["k"] for p in written["points"]] == TIMES
    assert not record.is_stale(written)
    assert command("--no-sweep")[0] == 0
    assert requested == [7]


def test_an_unknown_gpu_is_one_line_in_a_process_of_its_own():
    assert_one_line(run("roofline", "--gpu", "h2000"), 2, "did you mean 'h200'")


@pytest.mark.usefixtures("without_gpu")
def test_every_operation_has_its_own_letter(results, command):
    names = list(source.op_files())
    results(*(timing(kernel, 60.0) | {"op": name} for name in names for kernel in ("triton", "eager")))
    _, out, _ = command("--no-sweep")
    legend = " ".join(out.partition("per byte\n")[2].partition("\n\n")[0].split())
    entries = dict(pair[::-1] for pair in re.findall(r"(\S) (\w+)", legend) if pair[1] in names)
    assert list(entries) == names
    assert len({*entries.values()}) == len(names) > 26


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("width", [80, 160])
def test_the_table_is_not_truncated(results, command, monkeypatch, width):
    long = {"B": 4, "S": 4096, "H": 32, "K": 8, "D": 128, "R": 64, "interleaved": False, "positions": False}
    results(timing("triton-three-pass", 3573.1, case=long))
    monkeypatch.setattr("tilewright.cli.shared.WIDTH", width)
    _, out, _ = command("--no-sweep")
    table = out.partition("fastest baseline\n")[2]
    assert "…" not in table
    assert "3,570" in table
    assert "triton-thr" in table
    assert "positions" in table

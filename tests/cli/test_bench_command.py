"""`tilewright bench`: what it shows, keeps and says, and how it ends. GPUs, timers and most contests are pretended."""

import functools
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from cli.command import assert_one_line
from support import timing_record
from tilewright import cli, hardware, record, source, timer
from tilewright.errors import GPUBroken
from tilewright.spec import Cost
from tilewright.workbench import bench as tool
from tilewright.workbench.bench import Timing, state

ONE_CASE = ("--case", "M=3,N=50", "--dtype", "float32")
RIGHT = "import torch\n\ndef softmax(x):\n    return torch.softmax(x, dim=-1)\n"


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command here: how it ended, and what it printed."""

    def bench(*arguments):
        monkeypatch.setattr(sys, "argv", ["tilewright", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code, stdout=said.out, stderr=said.err)

    return bench


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Where records are read from; call it to write some. No GPU is here."""
    folder = tmp_path / "results"
    monkeypatch.setenv("TILEWRIGHT_RESULTS", str(folder))
    monkeypatch.setattr(hardware, "has_gpu", lambda: False)

    def write(*records):
        record.append(folder / "r.jsonl", list(records))
        return folder / "r.jsonl"

    return write


@pytest.fixture
def gpu(results, monkeypatch):
    """A GPU of our own, whose ceilings are known at once."""
    in_hand = {"gpu": "h200", "name": "NVIDIA H200", "l2": 60 * 2**20}
    pretended = SimpleNamespace(measured=0)

    def measure(_):
        pretended.measured += 1
        return {"copy": 4e12, "read": 4e12}

    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(hardware, "in_hand", lambda: in_hand)
    monkeypatch.setattr(timer, "Timer", timer.HostTimer)
    monkeypatch.setattr(tool, "measure", measure)
    monkeypatch.setattr(state, "others", lambda: None)
    return pretended


@pytest.fixture
def contest(monkeypatch, gpu):
    """What will be timed, and what happens then: a list of Timings, and errors to raise; and all that was asked."""
    happens = SimpleNamespace(timings=[timing("eager", 20.0), timing("triton", 10.0)], asked=[], measured=0)

    def bench(op, kernels, files, **options):
        happens.asked.append(SimpleNamespace(op=op.name, kernels=[k.name for k in kernels], files=files, **options))
        for one in happens.timings:
            if isinstance(one, BaseException):
                raise one
            yield one

    monkeypatch.setattr(tool, "bench", bench)
    return happens


def timing(kernel="triton", us=10.0, verdict="right", reason="", **more):
    made = Timing("softmax", kernel, {"M": 3, "N": 50}, "float32", "forward", Cost(10**6, 10**6), verdict, reason)
    if us:
        made.samples_us, made.median_us, made.interval_us = [us] * 3, us, [us, us]
        made.timer = {"floor_us": 2.0, "overhead_us": 30.0, "unqueued": 0}
    made.is_baseline = kernel == "eager"
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_on_a_gpu_it_times_prints_and_records(command, gpu, monkeypatch, tmp_path):
    """The whole command, on the CPU and by its clock."""
    monkeypatch.setattr(tool, "bench", functools.partial(tool.bench, device="cpu"))
    file, path = tmp_path / "mine.py", tmp_path / "r.jsonl"
    file.write_text(RIGHT)
    done = command("softmax", file, "-k", "eager", *ONE_CASE, "--samples", 6, "--record", path)
    assert done.returncode == 0, done.stderr
    assert "softmax on NVIDIA H200" in done.stdout
    assert "copy 4000 GB/s" in done.stdout
    assert f"2 records are in {path}" in done.stdout
    found = record.read(path)
    assert (found.torn, found.corrupt) == ([], [])
    assert {r["kernel"]: len(r["samples_us"]) for r in found.records} == {"eager": 6, "mine.py": 6}
    assert all(r["verdict"] == "right" and r["median_us"] for r in found.records)
    assert not any(record.is_stale(r) for r in found.records)
    file.write_text(RIGHT + "\n")
    assert [record.is_stale(r) for r in record.read(path).records] == [r["kernel"] == "mine.py" for r in found.records]


def test_what_was_asked_is_what_is_timed(command, contest):
    assert command("softmax", *ONE_CASE, "--samples", 7, "--direction", "all").returncode == 0
    (asked,) = contest.asked
    assert [str(case) for case in asked.cases] == ["M=3,N=50"]
    assert asked.cases[0].dtype == "float32"
    assert (asked.samples, asked.directions, asked.against) == (7, ["forward", "backward", "both"], "eager")
    command("softmax", "-k", "triton")
    assert contest.asked[1].samples == tool.SAMPLES
    assert contest.asked[1].kernels == ["eager", "triton"], "and what it is held against"


def test_each_operation_enters_those_of_the_named_kernels_that_it_has(command, contest):
    command("softmax,sum", "-k", "triton-online", "-k", "triton")
    assert [(a.op, a.kernels) for a in contest.asked] == [
        ("softmax", ["eager", "triton-online", "triton"]),
        ("sum", ["eager", "triton"]),
    ]


def test_speeds_can_be_held_against_any_kernel_or_file(command, contest, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    command("softmax", "-k", "eager", "--against", "triton")
    command("softmax", file, "-k", "eager", "--against", "mine.py")
    assert [(a.kernels, a.against) for a in contest.asked] == [
        (["triton", "eager"], "triton"),
        (["eager"], "mine.py"),
    ]


@pytest.mark.parametrize("where", ["gpu", "results"])
def test_what_it_cannot_be_held_against_is_one_line(command, request, where):
    request.getfixturevalue(where)
    assert_one_line(command("softmax", "--against", "eagr", *ONE_CASE), 2, "did you mean 'eager'")
    assert_one_line(command("add", "--against", "liger"), 2, "add has no kernel named 'liger'")


def test_json_lines(command, contest):
    done = command("softmax", "--json")
    assert [json.loads(line)["kernel"] for line in done.stdout.splitlines()] == ["eager", "triton"]
    assert done.returncode == 0


def test_the_longest_search_is_made_only_if_asked_for(command, contest):
    for arguments in ([], ["--search"], ["--search", "-k", "triton"], ["-k", "compile-max", "--search"]):
        command("softmax", *arguments)
    assert [asked.kernels.count("compile-max") for asked in contest.asked] == [0, 1, 1, 1]
    assert set(contest.asked[2].kernels) == {"eager", "triton", "compile-max"}


def verdict(kernel, **more):
    """Of softmax, as `check --record` writes it on the GPU that is pretended."""
    content = {"verdict": "right", "reason": "", "labels": [], "cases": [], "device": {"gpu": "h200"}}
    content |= {"versions": hardware.versions()} | more
    return record.stamp("verdict", "softmax", kernel, source.kernel_hash("softmax", kernel) or "", **content)


def test_what_a_recorded_check_has_proven_is_not_checked_again(command, contest, results):
    others = hardware.versions() | {"triton": "0.1"}
    results(
        verdict("triton"),
        verdict("cuda", verdict="wrong"),
        verdict("compile", is_narrow=True),
        verdict("triton-online", device={"gpu": "l4"}),
        verdict("triton-online", device={}),
        verdict("triton-three-pass", versions=others),
        verdict("manual") | {"source": "0" * 16},
        verdict("eager", file="eager.py"),
        verdict("eager") | {"op": "add"},
        timing_record("eager"),
    )
    command("softmax")
    assert contest.asked[0].proven == {"triton"}
    results(verdict("triton", verdict="wrong"))
    command("softmax")
    assert contest.asked[1].proven == set(), "the last word counts"


def test_without_an_op_all_are_timed(command, contest):
    assert command().returncode == 0
    assert [asked.op for asked in contest.asked] == list(source.op_files())


def test_libraries_that_are_not_here_are_told_in_one_line(command, contest, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "liger_kernel" else real(n, *a))
    assert_one_line(command("softmax"), 0, "liger is not installed (pip install liger-kernel)")
    assert "liger" not in contest.asked[0].kernels
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: "here" if n == "liger_kernel" else real(n, *a))
    done = command("softmax")
    assert done.stderr == ""
    assert contest.asked[1].kernels[-1] == "liger"
    assert command("softmax", "-k", "triton").stderr == "", "it was not asked for"


def test_a_gpu_that_others_use_is_told(command, contest, monkeypatch):
    monkeypatch.setattr(state, "others", lambda: "process 77 uses it")
    assert_one_line(command("softmax", "-k", "eager"), 0, "not ours alone: process 77 uses it", "may be too long")


@pytest.mark.parametrize("verdict", ["wrong", "implausible", "crashed", "timeout", "tampered"])
def test_a_kernel_that_is_not_good_is_code_1(command, contest, verdict):
    contest.timings.append(timing("cuda", None, verdict, "a reason"))
    done = command("softmax", "-k", "cuda")
    assert done.returncode == 1
    assert f"cuda: {verdict}, a reason" in done.stdout


def test_a_kernel_that_does_not_take_a_case_is_no_failure(command, contest):
    contest.timings.append(timing("cuda", None, "unsupported", "too long"))
    assert command("softmax", "-k", "cuda").returncode == 0


@pytest.mark.parametrize("arguments", [["softmax"], []], ids=["one op", "all"])
def test_stopped_by_hand_it_shows_and_keeps_what_is_there(command, contest, tmp_path, arguments):
    contest.timings.append(KeyboardInterrupt())
    path = tmp_path / "r.jsonl"
    done = command(*arguments, "--record", path, "-k", "triton") if arguments else command("--record", path)
    assert done.returncode == 130
    assert "stopped; the 2 timings until then are kept" in done.stderr
    assert "10.0 us" in done.stdout
    assert "20.0 us" in done.stdout
    assert len(record.read(path).records) == 2
    assert len(contest.asked) == 1, "and nothing more is begun"


def test_stopped_before_the_first_timing_there_is_no_table(command, contest, tmp_path):
    contest.timings = [KeyboardInterrupt()]
    done = command("softmax", "-k", "eager", "--html", tmp_path / "page.html", "--record", tmp_path / "r.jsonl")
    assert done.returncode == 130
    assert "us" not in done.stdout.partition("Next")[0]
    assert not (tmp_path / "r.jsonl").exists()


def test_a_broken_gpu_is_one_line_and_what_was_recorded_stays(command, contest, tmp_path):
    contest.timings[1:] = [GPUBroken("triton on M=3,N=50", "CUDA error: an illegal memory access")]
    path = tmp_path / "r.jsonl"
    done = command("softmax", "-k", "triton", "--record", path)
    assert_one_line(done, 2, "left the GPU unusable", "what was measured before is kept")
    assert [r["kernel"] for r in record.read(path).records] == ["eager"]


def test_a_page_with_charts(command, contest, tmp_path):
    page = tmp_path / "page.html"
    assert_one_line(command("softmax", "-k", "triton", "--html", page), 0, f"{page}: written")
    text = page.read_text()
    assert "softmax" in text
    assert "triton" in text
    assert "plotly" in text


@pytest.mark.parametrize("where", ["contest", "results"])
def test_a_page_that_cannot_be_made_is_told_before_anything_is_done(command, request, monkeypatch, tmp_path, where):
    pretended = request.getfixturevalue(where)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "plotly" else real(n, *a))
    done = command("softmax", "-k", "eager", "--html", tmp_path / "page.html")
    assert_one_line(done, 2, "pip install plotly")
    assert done.stdout == ""
    assert not (tmp_path / "page.html").exists()
    assert where == "results" or not pretended.asked


def test_without_an_op_all_that_is_recorded_is_shown_and_nothing_checked(command, results):
    results(timing_record("triton", 80.0), timing_record("eager", 33.0) | {"op": "add"})
    done = command()
    assert done.returncode == 0
    assert "No GPU here, so nothing is timed: recorded timings are shown." in done.stdout
    assert "softmax, RECORDED on NVIDIA H200" in done.stdout
    assert "add, RECORDED on NVIDIA H200" in done.stdout
    assert "80.0 us" in done.stdout
    assert "33.0 us" in done.stdout
    assert "No such timings of gelu" in done.stdout
    assert done.stdout.endswith("Next: tilewright bench --gpu a100-80gb\n")


def test_another_gpu_has_its_floor_and_its_own_records(command, results):
    results(timing_record("triton", 80.0))
    done = command("softmax", "--gpu", "a100-80gb", "--direction", "all")
    assert done.returncode == 0
    assert "With --gpu nothing is timed" in done.stdout
    assert "80.0 us" not in done.stdout, "of another GPU"
    assert "The floor on a100-80gb" in done.stdout
    # 16384 rows of 4096 in bfloat16, read and written, at 2039 GB/s
    assert "M=16384,N=4096 bfloat16" in done.stdout
    assert "131.7 us" in done.stdout
    assert "80.0 us" in command("softmax", "--gpu", "H200").stdout


def test_without_a_dtype_all_that_are_benched_are_told(command, results):
    done = command("adamw", "--gpu", "a100-80gb", "--json")
    dtypes = [json.loads(line)["dtype"] for line in done.stdout.splitlines()]
    assert set(dtypes) == {"bfloat16", "float32"}


def test_floors_as_json_lines(command, results):
    done = command("softmax", "--gpu", "a100-80gb", "--json", "--case", "M=1024,N=1024", "-d", "float32")
    (floor,) = map(json.loads, done.stdout.splitlines())
    size = 4 * 2**20
    assert (floor["kind"], floor["gpu"], floor["read"], floor["written"]) == ("floor", "a100-80gb", size, size)
    assert floor["us"] == pytest.approx(2 * size / 2039e9 * 1e6, rel=1e-3)
    assert floor["binds"] == "copy"


def test_a_kernel_that_nobody_knows_is_one_line_with_a_gpu_named_too(command, results):
    assert_one_line(command("softmax", "-k", "tritn", "--gpu", "h200"), 2, "did you mean 'triton'")


def test_records_of_a_newer_version_are_told_and_the_rest_is_shown(command, results):
    path = results(timing_record("triton", 80.0))
    with path.open("a") as out:
        out.write(json.dumps(timing_record("eager", 99.0) | {"schema": record.SCHEMA + 1}) + "\n")
    done = command("softmax", "--gpu", "h200")
    assert_one_line(done, 0, "line 2 was written by a newer version of Tilewright", "update")
    assert "80.0 us" in done.stdout
    assert "99.0 us" not in done.stdout


def test_nothing_is_recorded_where_nothing_is_timed(command, results, tmp_path):
    done = command("softmax", "--gpu", "h200", "--record", tmp_path / "new.jsonl")
    assert_one_line(done, 0, "nothing was timed, so nothing was recorded")
    assert not (tmp_path / "new.jsonl").exists()


def test_several_operations_are_named_with_commas(command, results):
    results(timing_record("triton", 80.0))
    done = command("softmax,sum", "--gpu", "h200")
    assert done.returncode == 0
    assert "triton" in done.stdout
    assert "tilewright bench softmax,sum" in done.stdout
    assert "triton" not in command("gelu,sum", "--gpu", "h200").stdout
    assert "tilewright bench softmax,sum\n" in command("softmax, sum,softmax", "--gpu", "h200").stdout


def test_of_several_operations_not_all_need_have_a_kernel(command, results):
    results(timing_record("triton-online", 80.0))
    done = command("softmax,sum", "-k", "triton-online", "-k", "triton", "--gpu", "h200")
    assert done.returncode == 0
    assert "triton-online" in done.stdout
    done = command("softmax,sum", "-k", "triton", "-k", "trito", "--gpu", "h200")
    assert_one_line(done, 2, "no kernel named 'trito'; did you mean 'triton'?")


def test_what_was_recorded_can_be_a_page_too(command, results, tmp_path):
    results(timing_record("triton", 80.0))
    assert command("softmax", "--gpu", "h200", "--html", tmp_path / "page.html").returncode == 0
    assert "triton" in (tmp_path / "page.html").read_text()
    assert command("softmax", "--gpu", "l4", "--html", tmp_path / "none.html").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("softmax", "--gpu", "a10"), ("did you mean 'a100",)),
        (("softmax", "--gpu", "nonsense"), ("no datasheet for a GPU named 'nonsense'",)),
        (("softmax", "mine.py", "--gpu", "h200"), ("--gpu", "FILE")),
        (("--case", "M=3,N=50"), ("name it",)),
        (("softmax,gelu", "--case", "M=3,N=50"), ("name it",)),
        (("softmax,gellu",), ("gelu",)),
        (("softmax,gelu", "-k", "triton-online"), ("triton-online", "gelu")),
        (("-k", "triton"), ("name those",)),
        (("softmax", "--compare", "a.jsonl", "b.jsonl"), ("nothing else",)),
        (("softmax", "--record", "x", "--html", "x"), ("one file",)),
        (("--compare", "a.jsonl", "b.jsonl"), ("cannot read 'a.jsonl'",)),
        (("--compare", "a.jsonl"), ("--compare",)),
        (("softmax", "--html", "/"), ("cannot write '/'",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_every_mistake_is_one_line_and_code_2(command, results, arguments, words):
    assert_one_line(command(*arguments), 2, *words)


def test_two_files_of_records_are_compared(command, tmp_path):
    """By the samples, not by the medians alone."""
    samples = {"old": [100.0, 101.0, 99.0] * 7, "new": [130.0, 131.0, 129.0] * 7}
    for name, taken in samples.items():
        record.append(tmp_path / f"{name}.jsonl", [timing_record("triton", taken[0], samples_us=taken)])
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    done = command("--compare", old, new)
    assert done.returncode == 1
    assert "1 slower" in done.stdout
    assert "1.300" in done.stdout
    assert command("--compare", new, old).returncode == 0
    assert command("--compare", old, new, "--threshold", 0.5).returncode == 0

"""Tests of `tilewright bench`, with a fake GPU, a fake timer and, mostly, fake timings."""

import contextlib
import functools
import importlib.util
import json
from types import SimpleNamespace

import pytest

from cli.command import assert_one_line, in_process
from sample_records import timing_record
from tilewright import hardware, record, source, timer
from tilewright.errors import GPUUnusable
from tilewright.spec import Cost
from tilewright.workbench import bench as tool
from tilewright.workbench.bench import Timing, ceilings, gpu_state, microbenchmarks

ONE_CASE = ("--case", "M=3,N=50", "--dtype", "float32")
RIGHT = "import torch\n\ndef softmax(x):\n    return torch.softmax(x, dim=-1)\n"


@pytest.fixture
def command(monkeypatch, capsys):
    """The command in this process."""
    return in_process("bench", monkeypatch, capsys)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A function that writes records to an empty results folder, on a machine without a GPU."""
    folder = tmp_path / "results"
    monkeypatch.setenv("TILEWRIGHT_RESULTS", str(folder))
    monkeypatch.setattr(hardware, "has_gpu", lambda: False)

    def write(*records):
        record.append(folder / "r.jsonl", list(records))
        return folder / "r.jsonl"

    return write


@pytest.fixture
def gpu(results, monkeypatch, tmp_path):
    """A fake GPU; `measured` counts the measurements of its ceilings."""
    device = {"gpu": "h200", "name": "NVIDIA H200", "l2": 60 * 2**20}
    fake = SimpleNamespace(measured=0)

    def measure(_):
        fake.measured += 1
        return {"copy": 4e12, "read": 4e12}

    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(hardware, "current_gpu", lambda: device)
    monkeypatch.setattr(timer, "Timer", timer.HostTimer)
    monkeypatch.setattr(microbenchmarks, "measure", measure)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_state, "other_users", lambda: None)
    return fake


@pytest.fixture
def fake_run(monkeypatch, gpu):
    """Fake timings: `timings` are the results, or errors to raise; `calls` are the arguments of each run."""
    fake = SimpleNamespace(timings=[timing("eager", 20.0), timing("triton", 10.0)], calls=[], gpu=gpu)

    def bench(op, kernels, files, **options):
        fake.calls.append(SimpleNamespace(op=op.name, kernels=[k.name for k in kernels], files=files, **options))
        for one in fake.timings:
            if isinstance(one, BaseException):
                raise one
            yield one

    monkeypatch.setattr(tool, "bench", bench)
    return fake


def timing(kernel="triton", us=10.0, verdict="right", reason="", **more):
    made = Timing("softmax", kernel, {"M": 3, "N": 50}, "float32", "forward", Cost(10**6, 10**6), verdict, reason)
    if us:
        made.samples_us, made.median_us, made.interval_us = [us] * 3, us, [us, us]
        made.timer = {"floor_us": 2.0, "overhead_us": 30.0, "unqueued": 0}
    made.is_baseline = kernel == "eager"
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.slow
def test_on_a_gpu_it_times_prints_and_records(command, gpu, monkeypatch, tmp_path):
    """The whole command, on the CPU with the host's clock."""
    monkeypatch.setattr(tool, "bench", functools.partial(tool.bench, device="cpu"))
    file, path = tmp_path / "mine.py", tmp_path / "r.jsonl"
    file.write_text(RIGHT)
    done = command("softmax", file, "-k", "eager", *ONE_CASE, "--samples", 6, "--record", path)
    assert done.returncode == 0, done.stderr
    assert "softmax on NVIDIA H200" in done.stdout
    assert "copy 4,000 GB/s" in done.stdout
    assert f"2 records are in {path}" in done.stdout
    found = record.read(path)
    assert (found.torn, found.corrupt) == ([], [])
    assert {r["kernel"]: len(r["samples_us"]) for r in found.records} == {"eager": 6, "mine.py": 6}
    assert all(r["verdict"] == "right" and r["median_us"] for r in found.records)
    assert not any(record.is_stale(r) for r in found.records)
    file.write_text(RIGHT + "\n")
    assert [record.is_stale(r) for r in record.read(path).records] == [r["kernel"] == "mine.py" for r in found.records]


def test_arguments_reach_the_runner(command, fake_run):
    assert command("softmax", *ONE_CASE, "--samples", 7, "--direction", "all").returncode == 0
    (call,) = fake_run.calls
    assert [str(case) for case in call.cases] == ["M=3,N=50"]
    assert call.cases[0].dtype == "float32"
    assert (call.samples, call.directions, call.against) == (7, ["forward", "backward", "both"], "eager")
    command("softmax", "-k", "triton")
    assert fake_run.calls[1].samples == tool.SAMPLES
    assert fake_run.calls[1].kernels == ["eager", "triton"], "and the baseline"


def test_each_operation_is_timed_with_those_of_the_named_kernels_that_it_has(command, fake_run):
    command("softmax,sum", "-k", "triton-online", "-k", "triton")
    assert [(a.op, a.kernels) for a in fake_run.calls] == [
        ("softmax", ["eager", "triton-online", "triton"]),
        ("sum", ["eager", "triton"]),
    ]


def test_any_kernel_or_file_can_be_the_baseline(command, fake_run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    command("softmax", "-k", "eager", "--against", "triton")
    command("softmax", file, "-k", "eager", "--against", "mine.py")
    assert [(a.kernels, a.against) for a in fake_run.calls] == [
        (["triton", "eager"], "triton"),
        (["eager"], "mine.py"),
    ]


@pytest.mark.parametrize("where", ["gpu", "results"])
def test_an_unknown_baseline_is_one_line(command, request, where):
    request.getfixturevalue(where)
    assert_one_line(command("softmax", "--against", "eagr", *ONE_CASE), 2, "did you mean 'eager'")
    assert_one_line(command("add", "--against", "liger"), 2, "add has no kernel named 'liger'")


def test_json_lines(command, fake_run):
    done = command("softmax", "--json")
    assert [json.loads(line)["kernel"] for line in done.stdout.splitlines()] == ["eager", "triton"]
    assert done.returncode == 0


def test_max_autotune_needs_search(command, fake_run):
    for arguments in ([], ["--search"], ["--search", "-k", "triton"], ["-k", "compile-max", "--search"]):
        command("softmax", *arguments)
    assert [call.kernels.count("compile-max") for call in fake_run.calls] == [0, 1, 1, 1]
    assert set(fake_run.calls[2].kernels) == {"eager", "triton", "compile-max"}


def verdict(kernel, **more):
    """A verdict on softmax, as `check --record` writes it on the fake GPU."""
    content = {"verdict": "right", "reason": "", "labels": [], "cases": [], "device": {"gpu": "h200"}}
    content |= {"versions": hardware.versions()} | more
    return record.stamp("verdict", "softmax", kernel, source.kernel_hash("softmax", kernel) or "", **content)


def test_a_recorded_verdict_replaces_the_check(command, fake_run, results):
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
    assert fake_run.calls[0].proven == {"triton"}
    results(verdict("triton", verdict="wrong"))
    command("softmax")
    assert fake_run.calls[1].proven == set(), "the newest verdict counts"


def test_without_an_op_all_are_timed(command, fake_run):
    assert command().returncode == 0
    assert [call.op for call in fake_run.calls] == list(source.op_files())


def test_missing_libraries_are_one_line(command, fake_run, monkeypatch):
    real, here = importlib.util.find_spec, set()
    libraries = {"liger_kernel", "quack"}

    def find(name, *rest):
        return ("here" if name in here else None) if name in libraries else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    both = "not installed: liger, quack (pip install liger-kernel quack-kernels)"
    assert_one_line(command("softmax"), 0, both)
    assert not {"liger", "quack"} & {*fake_run.calls[0].kernels}
    here.add("liger_kernel")
    assert "not installed: quack (pip install quack-kernels)" in command("softmax").stderr
    assert fake_run.calls[1].kernels[-1] == "liger"
    assert "liger" not in command("softmax", "-k", "triton").stderr, "it was not selected"


def test_a_shared_gpu_is_reported(command, fake_run, monkeypatch):
    monkeypatch.setattr(gpu_state, "other_users", lambda: "used by process 77")
    assert_one_line(command("softmax", "-k", "eager"), 0, "this GPU is shared: used by process 77", "may be too long")


@pytest.mark.parametrize("verdict", ["wrong", "implausible", "crashed", "timeout", "tampered"])
def test_an_incorrect_kernel_exits_with_1(command, fake_run, verdict):
    fake_run.timings.append(timing("cuda", None, verdict, "a reason"))
    done = command("softmax", "-k", "cuda")
    assert done.returncode == 1
    assert f"cuda: {verdict}, a reason" in done.stdout


def test_an_unsupported_case_is_not_a_failure(command, fake_run):
    fake_run.timings.append(timing("cuda", None, "unsupported", "too long"))
    assert command("softmax", "-k", "cuda").returncode == 0


@pytest.mark.parametrize("arguments", [["softmax"], []], ids=["one op", "all"])
def test_an_interrupted_run_shows_and_records_its_timings(command, fake_run, tmp_path, arguments):
    fake_run.timings.append(KeyboardInterrupt())
    path = tmp_path / "r.jsonl"
    done = command(*arguments, "--record", path, "-k", "triton") if arguments else command("--record", path)
    assert done.returncode == 130
    assert "interrupted; 2 timings were completed" in done.stderr
    assert "10.0" in done.stdout
    assert "20.0" in done.stdout
    assert len(record.read(path).records) == 2
    assert len(fake_run.calls) == 1, "no further operation is started"


def test_a_run_interrupted_before_the_first_timing_has_no_table(command, fake_run, tmp_path):
    fake_run.timings = [KeyboardInterrupt()]
    done = command("softmax", "-k", "eager", "--html", tmp_path / "page.html", "--record", tmp_path / "r.jsonl")
    assert done.returncode == 130
    assert "us" not in done.stdout.partition("Next")[0]
    assert not (tmp_path / "r.jsonl").exists()


def test_an_unusable_gpu_is_one_line_and_records_stay(command, fake_run, tmp_path):
    fake_run.timings[1:] = [GPUUnusable("triton on M=3,N=50", "CUDA error: an illegal memory access")]
    path = tmp_path / "r.jsonl"
    done = command("softmax", "-k", "triton", "--record", path)
    assert_one_line(done, 2, "left the GPU unusable", "earlier results are saved")
    assert [r["kernel"] for r in record.read(path).records] == ["eager"]


def test_a_page_with_charts(command, fake_run, tmp_path):
    page = tmp_path / "page.html"
    assert_one_line(command("softmax", "-k", "triton", "--html", page), 0, f"wrote {page}")
    text = page.read_text()
    assert "softmax" in text
    assert "triton" in text
    assert "plotly" in text


@pytest.mark.parametrize("where", ["fake_run", "results"])
def test_a_missing_plotly_is_reported_before_the_work(command, request, monkeypatch, tmp_path, where):
    fake = request.getfixturevalue(where)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "plotly" else real(n, *a))
    done = command("softmax", "-k", "eager", "--html", tmp_path / "page.html")
    assert_one_line(done, 2, "pip install plotly")
    assert done.stdout == ""
    assert not (tmp_path / "page.html").exists()
    assert where == "results" or not fake.calls


def test_without_an_op_all_records_are_shown_and_nothing_is_checked(command, results):
    results(timing_record("triton", 80.0), timing_record("eager", 33.0) | {"op": "add"})
    done = command()
    assert done.returncode == 0
    assert "No GPU found, so nothing is timed: recorded timings are shown." in done.stdout
    assert "softmax, recorded on NVIDIA H200" in done.stdout
    assert "add, recorded on NVIDIA H200" in done.stdout
    assert "80.0" in done.stdout
    assert "33.0" in done.stdout
    assert "No matching timings of gelu" in done.stdout
    assert done.stdout.endswith("Next: on a machine with a GPU: tilewright bench\n")


def test_a_gpu_selects_its_records(command, results):
    results(timing_record("triton", 80.0))
    done = command("softmax", "--gpu", "a100-80gb")
    assert done.returncode == 0
    assert "No matching timings of softmax" in done.stdout
    assert "80.0" in command("softmax", "--gpu", "H200").stdout


def test_ceilings_are_reused_for_an_hour(command, fake_run, monkeypatch):
    command("softmax", "-k", "eager")
    done = command("softmax", "-k", "eager")
    assert fake_run.gpu.measured == 1
    assert_one_line(done, 0, "using the ceilings measured 0 min ago; --fresh measures them again")
    assert "copy 4,000 GB/s" in done.stdout
    command("softmax", "-k", "eager", "--fresh")
    assert fake_run.gpu.measured == 2
    monkeypatch.setattr(ceilings, "MAX_AGE_S", 0.0)
    command("softmax", "-k", "eager")
    assert fake_run.gpu.measured == 3


def test_ceilings_of_other_versions_or_of_a_throttled_gpu_are_not_reused(command, fake_run, monkeypatch):
    command("softmax", "-k", "eager")
    others = hardware.versions() | {"triton": "0.1"}
    monkeypatch.setattr(hardware, "versions", lambda: others)

    @contextlib.contextmanager
    def throttled():
        yield {"throttled": ["heat"]}

    monkeypatch.setattr(gpu_state, "record_gpu_state", throttled)
    for _ in range(2):
        command("softmax", "-k", "eager")
    assert fake_run.gpu.measured == 3


def test_an_unknown_kernel_is_one_line_with_a_gpu_too(command, results):
    assert_one_line(command("softmax", "-k", "tritn", "--gpu", "h200"), 2, "did you mean 'triton'")


def test_records_of_a_newer_version_are_skipped(command, results):
    path = results(timing_record("triton", 80.0))
    with path.open("a") as out:
        out.write(json.dumps(timing_record("eager", 99.0) | {"schema": record.SCHEMA + 1}) + "\n")
    done = command("softmax", "--gpu", "h200")
    assert_one_line(done, 0, "line 2 was written by a newer version of Tilewright", "update")
    assert "80.0" in done.stdout
    assert "99.0" not in done.stdout


def test_nothing_is_recorded_if_nothing_is_timed(command, results, tmp_path):
    done = command("softmax", "--gpu", "h200", "--record", tmp_path / "new.jsonl")
    assert_one_line(done, 0, "nothing was timed, so nothing was written")
    assert not (tmp_path / "new.jsonl").exists()


def test_several_operations_are_separated_by_commas(command, results):
    results(timing_record("triton", 80.0))
    done = command("softmax,sum", "--gpu", "h200")
    assert done.returncode == 0
    assert "triton" in done.stdout
    assert "tilewright bench softmax,sum" in done.stdout
    assert "triton" not in command("gelu,sum", "--gpu", "h200").stdout
    assert "tilewright bench softmax,sum\n" in command("softmax, sum,softmax", "--gpu", "h200").stdout


def test_only_one_of_several_operations_needs_the_kernel(command, results):
    results(timing_record("triton-online", 80.0))
    done = command("softmax,sum", "-k", "triton-online", "-k", "triton", "--gpu", "h200")
    assert done.returncode == 0
    assert "triton-online" in done.stdout
    done = command("softmax,sum", "-k", "triton", "-k", "trito", "--gpu", "h200")
    assert_one_line(done, 2, "no kernel named 'trito'; did you mean 'triton'?")


def test_a_page_of_records(command, results, tmp_path):
    results(timing_record("triton", 80.0))
    assert command("softmax", "--gpu", "h200", "--html", tmp_path / "page.html").returncode == 0
    assert "triton" in (tmp_path / "page.html").read_text()
    assert command("softmax", "--gpu", "l4", "--html", tmp_path / "none.html").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("softmax", "--gpu", "a100-8"), ("did you mean 'a100",)),
        (("softmax", "--gpu", "nonsense"), ("no datasheet for a GPU named 'nonsense'",)),
        (("softmax", "mine.py", "--gpu", "h200"), ("--gpu", "FILE")),
        (("--case", "M=3,N=50"), ("need one OP",)),
        (("softmax,gelu", "--case", "M=3,N=50"), ("need one OP",)),
        (("softmax,gellu",), ("gelu",)),
        (("softmax,gelu", "-k", "triton-online"), ("triton-online", "gelu")),
        (("-k", "triton"), ("--kernel needs an OP", "See: tilewright bench --help")),
        (("softmax", "--record", "x", "--html", "x"), ("the same file",)),
        (("softmax", "--html", "/"), ("cannot write '/'",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_every_mistake_is_one_line_and_code_2(command, results, arguments, words):
    assert_one_line(command(*arguments), 2, *words)

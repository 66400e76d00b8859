"""Tests of `tilewright profile`, with a fake GPU and fake measurements."""

import json

import pytest
from rich.console import Console

from cli.command import assert_one_line, in_process
from tilewright import hardware, record, registry, source
from tilewright.counters import Counters
from tilewright.report import markdown
from tilewright.report.profiling import overview
from tilewright.workbench import profile as tool
from tilewright.workbench.profile import Profile
from tilewright.workbench.profile.proton import Scope
from tilewright.workbench.profile.torch_profiler import Row

COUNTED = Counters(
    us=70.0,
    dram_read=268.0e6,
    dram_written=240.0e6,
    memory=0.6,
    dram=0.5,
    sm=0.3,
    occupancy=0.9,
    registers=32,
    shared_loads=1000,
    load_wavefronts=32000,
    load_conflicts=31000,
    stalls={"mio_throttle": 7.0, "wait": 1.0},
    kernels=("transpose_fwd",),
)


@pytest.fixture
def command(capsys, monkeypatch):
    return in_process("profile", monkeypatch, capsys)


@pytest.fixture
def profiled(monkeypatch):
    """The calls that were profiled, on a fake GPU whose profilers answer at once."""
    calls_made = []

    def profile(calls, wanted, trace_file, on_step):
        calls_made.append((calls, wanted, trace_file))
        rows = [Row("void transpose_fwd<float>()", 1, 70.0, 0.0, True)]
        scope = Scope(68.0, 537e6, 0.0, {"transpose_fwd": 68.0})
        return [
            Profile(call, COUNTED, scope, rows, {"proton": "not here"} if n else {}) for n, call in enumerate(calls)
        ]

    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(hardware, "current_gpu", lambda: {"gpu": "h200", "name": "NVIDIA H200"})
    monkeypatch.setattr(tool, "profile", profile)
    return calls_made


def test_without_a_gpu(command, monkeypatch):
    monkeypatch.setattr(hardware, "has_gpu", lambda: False)
    assert_one_line(command("relu"), 2, "needs a GPU", "tilewright inspect relu", "tilewright explain relu")
    assert_one_line(command("relu,gelu"), 2, "needs a GPU", "tilewright inspect OP")


def test_mistakes_are_one_line(command, tmp_path):
    assert_one_line(command("rleu"), 2, "did you mean 'relu'?")
    assert_one_line(command("relu", "-s", "nsys"), 2, "not one of ncu, proton, torch")
    assert_one_line(command("relu", "-s", "ncu", "--trace", tmp_path / "t.json"), 2, "add --source torch")
    assert_one_line(command("relu", "--direction", "both"), 2, "not one of forward, backward")
    assert_one_line(command("relu", "-i", "64"), 2, "only for a FILE")
    assert_one_line(command(tmp_path / "no.py"), 2, "no file at")
    (tmp_path / "bare.py").write_text("def f(x): return x\n")
    assert_one_line(command(tmp_path / "bare.py", "-k", "triton"), 2, "only for an OP")


def test_every_number_has_its_source(command, profiled):
    done = command("transpose", "-k", "cuda", "-k", "triton", "-c", "M=64,N=64", "--trace", "t.json")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["time", "68.0", "us", "proton"] in lines
    assert ["DRAM", "read", "268.0", "MB,", "written", "240.0", "MB,", "throughput", "50%", "ncu"] in lines
    assert ["mio_throttle", "7.0,", "wait", "1.0", "ncu"] in [line[-5:] for line in lines]
    assert ["wavefronts", "per", "shared", "load", "32.00,", "31,000", "conflicts", "ncu"] in lines
    assert "32.00, ideal 1.00" in done.stdout
    assert "No proton for transpose, triton, M=64,N=64 float32: not here" in done.stdout
    assert "ui.perfetto.dev" in done.stdout
    ((calls, wanted, trace),) = profiled
    assert [call["kernel"] for call in calls] == ["cuda", "triton"]
    assert wanted == ("ncu", "proton", "torch")
    assert trace.endswith("/t.json")


def test_a_missing_profiler_is_reported_once(capsys):
    call = {"op": "relu", "kernel": "triton", "case": {"N": 64}, "dtype": "float32", "direction": "forward"}
    absent = {"ncu": "this user may not read the GPU's counters", "proton": "it fails"}
    found = [
        Profile(call, absent=absent),
        Profile(call | {"kernel": "cuda"}, absent=absent | {"proton": "it fails too"}),
    ]
    Console(width=200).print(overview(found, [{}, {}]))
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("No ncu: this user may not read the GPU's counters") == 1
    assert "No proton for relu, cuda, N=64 float32: it fails too" in lines


def test_arguments_select_the_calls(command, profiled, tmp_path):
    file = tmp_path / "relu.py"
    file.write_text("def relu(x):\n    return x.clamp(min=0)\n")
    command("relu", file, "-s", "ncu", "--direction", "backward")
    command(file, "-i", "8x8:fp16")
    (of_op, sources, _), (of_file, _, _) = profiled
    assert of_op == [{**of_op[0], "kernel": "relu.py", "file": str(file), "direction": "backward", "op": "relu"}]
    assert sources == ["ncu"]
    assert of_file == [{"file": str(file), "function": "relu", "inputs": ["8x8:fp16"]}]


def test_all_operations_are_profiled_with_their_public_function(command, profiled, tmp_path):
    path = tmp_path / "counters.jsonl"
    assert command("--direction", "backward", "--record", path, "--json").returncode == 0
    ((calls, _, _),) = profiled
    assert {call["kernel"] for call in calls} == {"tilewright"}
    assert {call["op"] for call in calls} < {*source.op_files()}, "some have no backward"
    of_softmax = [call["case"] for call in calls if call["op"] == "softmax"]
    assert of_softmax == [dict(case.point) for case in registry.load("softmax").bench]
    assert {call["direction"] for call in calls} == {"backward"}
    assert len(record.read(path).records) == len(calls)
    assert_one_line(command("-k", "triton"), 2, "only for one OP")
    assert_one_line(command("softmax,gelu", "-c", "M=3,N=4"), 2, "only for one OP")
    assert_one_line(command("softmax,gellu"), 2, "gelu")


def test_records_carry_counters_and_predictions_to_the_page(command, profiled, tmp_path):
    path = tmp_path / "counters.jsonl"
    done = command("transpose", "-k", "cuda", "-c", "M=64,N=64", "--record", path, "--json")
    assert json.loads(done.stdout)["counters"]["registers"] == 32
    (made,) = record.read(path).records
    assert made["kind"] == "counters"
    assert made["source"] == source.kernel_hash("transpose", "cuda")
    assert not record.is_stale(made)
    assert made["predicted"] == {"load": [32.0, 1.0], "store": [1.0, 1.0]}
    assert Counters.from_record(made) == COUNTED
    page = markdown.fill("<!-- records: bank-conflicts transpose -->\n<!-- end -->", [made])
    assert "| cuda | M=64,N=64 float32 | 1.00 |  | 32.00 | 32.00 | 31,000 | 70.0 |" in page
    assert "Counted by ncu on NVIDIA H200" in page
    assert "No records yet" in markdown.fill(page, [])

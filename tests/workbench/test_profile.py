"""Results of ncu, Proton and torch.profiler, parsed and combined, and errors of unavailable sources."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.counters import METRICS, STALLS, Counters, combined, from_row
from tilewright.errors import CountersFailed, CountersForbidden, MissingTool, ProfilerFailed
from tilewright.workbench.audit import dram_counters
from tilewright.workbench.audit.nsight import run_ncu
from tilewright.workbench.profile import Profile, child_process, ncu, profile, proton, torch_profiler
from tilewright.workbench.profile.proton import Scope
from tilewright.workbench.profile.torch_profiler import Row

EAGER = {"op": "relu", "kernel": "eager", "case": {"N": 64}, "dtype": "float32", "direction": "forward"}
COLUMNS = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size")
COLUMNS += ("Grid Size", "Device", "CC")
UNITS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "byte",
    "dram__bytes_write.sum": "byte",
    "lts__t_bytes.sum": "Mbyte",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "%",
    "launch__registers_per_thread": "register/thread",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": "",
    "smsp__inst_executed_op_shared_ld.sum": "inst",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "inst",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "inst",
}
COPY = ("_copy", "16,000", "1000000", "900,000", "4", "91.5", "12.25", "n/a", "32", "2,048", "64", "9.5", "1.25")
SUMS = ("void at::native::reduce<512>(...)", "4,000", "100", "0", "1", "20", "80", "3", "40", "0", "0", "1.5", "")


def printed(*kernels: tuple[str, ...]) -> str:
    """Return the output of `ncu --csv --page raw`, with its status lines."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([*COLUMNS, *UNITS])
    writer.writerow([""] * len(COLUMNS) + [*UNITS.values()])
    for number, (name, *values) in enumerate(kernels):
        about = [number, 4711, "python3.12", "127.0.0.1", name, 1, 7, "(128, 1, 1)", "(64, 1, 1)", 0, "9.0"]
        writer.writerow([*about, *values])
    status = (
        '==PROF== Connected to process 4711 (/usr/bin/python3.12)\n==PROF== Profiling "_copy": 0%....100% - 9 passes\n'
    )
    return f"{status}{text.getvalue()}==PROF== Disconnected from process 4711\n"


def separator(name: str = "at::cuda::<unnamed>::spin_kernel(long)") -> tuple[str, ...]:
    return (name, *["1"] * len(UNITS))


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Install a program named ncu that prints a text and writes the replies of the child process."""

    def install(text: str, code: int = 0, replies=None, refused: str = ""):
        program = tmp_path / "ncu"
        program.write_text(
            f"#!{sys.executable} -S\nimport json, sys\n"
            f"refused = {refused!r}\n"
            "if refused and refused in ' '.join(sys.argv):\n"
            "    print(f'==ERROR== Failed to find metric {refused}'); sys.exit(1)\n"
            "if sys.argv[-1].startswith('{'):\n"
            "    wanted = json.loads(sys.argv[-1])\n"
            f"    open(wanted['reply'], 'w').write(json.dumps({replies!r} or [None] * len(wanted['calls'])))\n"
            f"print({text!r}); sys.exit({code})\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


def test_counters_are_converted_to_our_units():
    units, copy = csv.DictReader(line for line in printed(COPY).splitlines() if line.startswith('"'))
    found = from_row(copy, units)
    assert (found.us, found.dram_read, found.dram_written, found.l2_bytes) == (16.0, 1e6, 9e5, 4e6)
    assert found.memory == pytest.approx(0.915)
    assert (found.tensor, found.occupancy, found.registers) == (None, None, 32)
    assert found.dram_bytes == 1.9e6
    assert found.wavefronts_per_load == 32
    assert found.wavefronts_per_store is None
    assert found.stalls == {"long_scoreboard": 9.5, "wait": 1.25}
    assert found.kernels == ("_copy",)


def test_kernels_of_a_call_are_combined_and_earlier_ones_ignored(fake_ncu):
    fake_ncu(printed(SUMS, separator(), COPY, SUMS, separator(), COPY, separator()))
    both, one, none = ncu.measure([EAGER] * 3)
    assert both.kernels == ("_copy", SUMS[0])
    assert (both.us, both.dram_read, both.shared_loads) == (20.0, 1000100, 64)
    assert both.memory == pytest.approx((0.915 * 16 + 0.20 * 4) / 20)
    assert both.tensor == pytest.approx(0.03), "of the kernels for which it was counted"
    assert both.registers == 40
    assert both.stalls["long_scoreboard"] == pytest.approx((9.5 * 16 + 1.5 * 4) / 20)
    assert one.kernels == ("_copy",)
    assert none == "it launches no kernel"


def test_a_failed_call_does_not_take_the_counters_of_another(fake_ncu):
    fake_ncu(printed(separator(), COPY), replies=["RuntimeError: no", None])
    failed, counted = ncu.measure([EAGER, EAGER])
    assert failed == "RuntimeError: no"
    assert counted.us == 16.0


def test_errors_of_all_calls_are_returned(fake_ncu):
    fake_ncu("==WARNING== No kernels were profiled.", replies=["RuntimeError: no"])
    assert ncu.measure([EAGER]) == ["RuntimeError: no"]


def test_an_unsupported_metric_is_skipped(fake_ncu):
    fake_ncu(printed(separator(), COPY), refused="sm__pipe_tensor_op_hmma_cycles_active")
    assert ncu.measure([EAGER])[0].us == 16.0


FORBIDDEN = (
    "==PROF== Connected to process 99 (/usr/bin/python3)\n"
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the "
    "target device 0. For instructions on enabling permissions and to get more information see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
    "==PROF== Disconnected from process 99\n==WARNING== No kernels were profiled.\n"
)


@pytest.mark.parametrize(
    ("text", "code", "error", "words"),
    [
        (FORBIDDEN, 1, CountersForbidden, "NVreg_RestrictProfilingToAdminUsers=0"),
        (FORBIDDEN, 0, CountersForbidden, "run as root"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", 1, CountersFailed, "read: Failed to init"),
        ("==ERROR== The driver is busy\n==WARNING== No kernels were profiled.", 0, CountersFailed, "driver is busy"),
        ("", 7, CountersFailed, "code 7"),
    ],
)
def test_errors_of_ncu_are_one_line(fake_ncu, text, code, error, words):
    fake_ncu(text, code)
    with pytest.raises(error, match=words) as raised:
        ncu.measure([EAGER])
    assert "\n" not in str(raised.value)


def test_without_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingTool, match="Nsight Compute"):
        run_ncu([], ["true"])


def test_audit_counts_dram_bytes_with_ncu(fake_ncu):
    alone, both = ("range", "1", "500", "100", *["1"] * 9), ("range", "1", "1,500", "400", *["1"] * 9)
    fake_ncu(printed(alone, both))
    assert dram_counters.count_dram_bytes({"file": "x.py", "reply": "/dev/null", "calls": []}) == {
        "read": 1000,
        "written": 300,
    }
    fake_ncu(printed(alone))
    with pytest.raises(CountersFailed, match="1 of 2 ranges"):
        dram_counters.count_dram_bytes({"file": "x.py", "reply": "/dev/null", "calls": []})


@pytest.mark.parametrize(
    ("memory", "sm", "bottleneck"),
    [(0.9, 0.3, "memory"), (0.3, 0.8, "compute"), (0.75, 0.7, "balanced"), (0.5, 0.55, "latency"), (None, 0.9, None)],
)
def test_the_bottleneck_follows_the_rule_of_ncu(memory, sm, bottleneck):
    assert Counters(memory=memory, sm=sm).bottleneck == bottleneck


def test_counters_survive_a_record():
    counted = combined([Counters(us=3.0, dram_read=5.0, stalls={"wait": 1.0}, kernels=("a",)), Counters(us=1.0)])
    written = json.loads(json.dumps({"counters": counted.as_json()}))
    assert Counters.from_record(written) == counted
    assert Counters.from_record({"counters": None}) is None
    assert "sm" not in counted.as_json()


def test_metrics_are_unique():
    assert len({*METRICS}) == len(METRICS)
    assert len(METRICS) > len(STALLS) + 20


def test_scopes_of_proton():
    kernel = {"frame": {"name": "_relu", "type": "function"}, "children": []}
    kernel["metrics"] = {"count": 10, "device_id": "0", "device_type": "CUDA", "time (ns)": 40000}
    scope = {"frame": {"name": "tilewright 0", "type": "function"}, "children": [kernel, kernel]}
    scope["metrics"] = {"bytes": 8e7, "flops": 1e7}
    flush = {"frame": {"name": "reduce", "type": "function"}, "metrics": {"time (ns)": 10**9}, "children": []}
    root = {"frame": {"name": "ROOT", "type": "function"}, "metrics": {}, "children": [scope, flush]}
    found = Scope(**proton.read([root, {"CUDA": {"0": {"arch": "90"}}}], "tilewright 0"))
    assert found.us == 8.0, "both launches, averaged over ten calls"
    assert (found.bytes, found.flops, found.kernels) == (8e6, 1e6, {"_relu": 8.0})
    assert found.gigabytes_per_second == 1000
    assert found.teraflops == 0.125
    assert proton.read([root, {}], "tilewright 1") is None


@pytest.fixture
def in_this_process(monkeypatch):
    """Run the child process in this process, which saves seconds."""

    def performed(command, **_):
        monkeypatch.setattr(sys, "argv", ["-c", command[-1]])
        child_process.main()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(child_process.os, "dup2", lambda *_: None)
    monkeypatch.setattr(child_process.subprocess, "run", performed)


def test_a_trace_contains_our_ranges(in_this_process, tmp_path):
    file = tmp_path / "trace.json"
    backward = EAGER | {"direction": "backward"}
    mistaken = EAGER | {"kernel": "mine.py", "file": str(tmp_path / "mine.py")}
    Path(mistaken["file"]).write_text("def relu(x):\n    raise RuntimeError('not today')\n")
    forward, gradients, failed = torch_profiler.measure([EAGER, backward, mistaken], str(file))
    assert failed == "RuntimeError: not today"
    assert {row.name: row.count for row in forward}["aten::relu"] == 1
    assert any("backward" in row.name.lower() for row in gradients)
    assert not any("backward" in row.name.lower() for row in forward)
    events = json.loads(file.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("relu, eager, N=64 float32") == torch_profiler.TIMES
    assert names.count("relu, eager, N=64 float32, backward") == torch_profiler.TIMES


def test_the_exit_code_of_a_failed_process_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ProfilerFailed, match="torch could not profile the call: exit code 1"):
        child_process.run("torch", [EAGER])


def test_the_best_available_source_is_used(monkeypatch):
    rows = [Row("kernel", 1, 5.0, 0.0, True), Row("aten::relu", 1, 0.0, 9.0, False)]

    def refuse(*_):
        raise CountersForbidden("ERR_NVGPUCTRPERM")

    monkeypatch.setattr(ncu, "measure", refuse)
    monkeypatch.setattr(proton, "measure", lambda calls: ["Proton saw none of its kernels"])
    monkeypatch.setattr(torch_profiler, "measure", lambda calls, file: [rows])
    (found,) = profile([EAGER])
    assert found.us == (5.0, "torch")
    assert set(found.absent) == {"ncu", "proton"}
    assert "ERR_NVGPUCTRPERM" in found.absent["ncu"]
    assert Profile(EAGER, Counters(us=4.0)).us == (4.0, "ncu")
    assert Profile(EAGER, Counters(us=4.0), Scope(3.0, 0, 0, {})).us == (3.0, "proton")
    assert Profile(EAGER).us is None
    (only_torch,) = profile([EAGER], ["torch"])
    assert not only_torch.absent


@pytest.mark.gpu
def test_counters_on_a_gpu_match_the_predictions(tmp_path):
    case = {"op": "transpose", "case": {"M": 2048, "N": 2048}, "dtype": "float32", "direction": "forward"}
    calls = [case | {"kernel": kernel} for kernel in ("cuda", "cuda-padded", "cuda-swizzled", "triton")]
    plain, *others = profile(calls, trace_file=str(tmp_path / "trace.json"))
    for found in (plain, *others):
        assert not found.absent
        assert found.us[1] == "proton"
        assert found.counters.dram_read == pytest.approx(2048 * 2048 * 4, rel=0.1)
        assert len(found.counters.kernels) == 1
        assert found.scope.bytes == 2 * 2048 * 2048 * 4
        assert any(row.is_kernel for row in found.rows)
    assert plain.counters.wavefronts_per_load == pytest.approx(32, rel=0.05)
    for found in others:
        assert found.counters.wavefronts_per_load == pytest.approx(1, rel=0.1)

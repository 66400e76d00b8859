"""Ten slow kernels whose flaw is named and whose fixed versions pass; the bottleneck and the sources of its numbers."""

import functools
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sample_records import timing_record
from tilewright import record, registry, settings, source
from tilewright.cost import Cost
from tilewright.errors import CompilationFailed, NothingLaunched
from tilewright.hardware import datasheet
from tilewright.spec import Case
from tilewright.workbench.audit.inputs import make_input
from tilewright.workbench.explain import diagnose, launch_model
from tilewright.workbench.explain.checklist import FAIL, NOT_APPLICABLE, PASS, UNKNOWN
from tilewright.workbench.explain.collect import TracedFunction, collect_cuda_file, collect_function, collect_op
from tilewright.workbench.explain.prediction import launch_models

H200 = datasheet("h200")
ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "flaws"
KERNELS = Path(__file__).parent / "inspect_kernels.py"

MEASURED = record.read(settings.results_dir() / "h200" / "gelu.jsonl").records  # for the ceilings
# By file: the check that must fail, words of its facts, and words of the source line.
FLAWS = {
    "uncoalesced.py": ("coalesced access", "warps move 8.0 B per byte of `x_ptr`", "tl.load(x_ptr + rows * N + col"),
    "low_occupancy.py": ("occupancy", "128 blocks on 132 SMs: 0.97 resident warps", ""),
    "divergent.cu": ("divergence", "1 branch may diverge", "if (i % 2)"),
    "untiled.py": ("tiling and reuse", "`b_ptr` is read 2048 times", "tl.load(b_ptr"),
    "global_atomics.py": ("privatisation", "2.1 M warp atomics per address", "tl.atomic_add(count_ptr +"),
    "one_element.py": ("coarsening", "524288 blocks of 128 threads", "tl.load("),
    "extra_pass.py": ("better mathematics", "2.00 times the minimum", ""),
    "spills.py": ("better mathematics", "local memory accesses", ""),
    "bank_conflicts.cu": ("coalesced access", "load takes 32 wavefronts", "tile[lane][warp + k]"),
    "fp64.py": ("better mathematics", "`scale_ptr` is float64", ""),
}
WASTEFUL = ("uncoalesced.py", "untiled.py", "extra_pass.py", "spills.py")


@pytest.fixture(autouse=True)
def interpreter():
    """No interpreter around the tests: it would write to every empty tensor. `explain` starts its own."""


@functools.lru_cache(2)  # a diagnosis holds its tensors
def explained(file, side):
    path = FOLDER / file
    if path.suffix == ".cu":
        call = {one.launches[0].name: one for one in collect_cuda_file(path, H200, 256, 0, MEASURED)}[side]
    else:
        given = registry.load_module(path).INPUTS
        call = collect_function(TracedFunction(lambda: registry.launcher(path, side), given), side, H200, MEASURED)
    return diagnose(call)


def check(found, name):
    return next(one for one in found.checks if one.name == name)


def test_there_are_ten_flaws():
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".cu")} == set(FLAWS)


SLOWEST = "low_occupancy.py"  # takes as long as four others
MARKED = [pytest.param(file, marks=pytest.mark.verify) if file == SLOWEST else file for file in FLAWS]


@pytest.mark.parametrize("file", MARKED)
def test_slow_kernel_fails_the_check_and_its_fixed_version_passes(file):
    if file.endswith(".cu") and not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    name, words, line = FLAWS[file]
    slow, fixed = explained(file, "slow"), explained(file, "mended")
    found = check(slow, name)
    assert slow.failed[0] == found, slow.failed
    assert words in "; ".join(fact.text for fact in found.facts)
    assert found.advice
    if line:
        file_name, number = found.source_line
        assert line in Path(file_name).read_text().splitlines()[number - 1]
    if file in WASTEFUL:
        assert slow.bottleneck.name == "memory bandwidth", "it moves more bytes than necessary"
    assert [one.name for one in fixed.failed] == []
    assert len(fixed.checks) == 8
    if slow.prediction and fixed.prediction:
        least = 1.3 if file == "fp64.py" else 1.4  # conversions to float64 and back are not predicted
        assert slow.prediction.us > least * fixed.prediction.us


def test_every_number_has_a_source():
    found = explained("extra_pass.py", "mended")
    for one in found.checks:
        assert one.verdict in (PASS, NOT_APPLICABLE)
        assert one.facts
        assert {fact.source for fact in one.facts} <= {"calculated", "compiled", "audited", "predicted"}
    assert {term.source for term in found.prediction.terms.values()} <= {"calculated", "compiled", "audited"}
    assert found.as_json()["checks"][0]["evidence"][0]["source"] == "compiled"


def test_unknown_checks_name_the_reason_and_the_command():
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    found = explained("divergent.cu", "mended")
    assert (found.bottleneck, found.prediction, found.us) == (None, None, None)
    reuse = check(found, "tiling and reuse")
    assert reuse.verdict == UNKNOWN
    assert reuse.advice == "the audit interprets Triton kernels only; profile a Python file that launches it on the GPU"
    assert check(found, "occupancy").verdict == UNKNOWN


CASE = Case((("N", 2**26),), "bfloat16")
CALL = {"op": "relu", "kernel": "triton", "case": {"N": 2**26}, "dtype": "bfloat16", "direction": "forward"}
COPY = Cost(2**27, 2**27)


def relu(records, case=CASE, **options):
    op = registry.load("relu")
    return diagnose(collect_op(op, op.kernels["triton"], case, H200, records, **options))


def timed(us, **more):
    """A timing record of relu's current code."""
    content = timing_record(us=us, **{key: CALL[key] for key in ("case", "dtype")}, **more)
    return content | {"op": "relu", "source": source.kernel_hash("relu", "triton")}


def test_a_fresh_timing_is_used_and_a_stale_one_reported():
    fresh, stale = timed(20.0), timed(20.0) | {"source": "of another day"}
    found = relu([fresh])
    assert found.us == (20.0, "measured")
    assert found.share == pytest.approx(2**28 / 2e12 * 1e6 / 20.0)
    assert found.prediction.rates.startswith("measured on NVIDIA H200")
    found = relu([stale])
    assert found.us[1] == "predicted"
    assert "the code has changed since the timing" in found.call.no_timing_reason
    assert "no timing on h200" in relu([timed(20.0, gpu="a100-80gb")]).call.no_timing_reason


def test_measurements_decide_the_bottleneck():
    assert relu([timed(144.0)]).bottleneck.name == "memory bandwidth"
    host = relu([timed(144.0, host_us=150.0)]).bottleneck
    assert (host.name, host.source) == ("host overhead", "measured")
    assert "150.0 us on the host and 144.0 us on the GPU" in host.reason
    slow = relu([timed(2000.0)]).bottleneck
    assert (slow.name, slow.source) == ("latency", "measured")
    small = relu([], CASE.__class__((("N", 4096),), "bfloat16")).bottleneck
    assert small.name == "launch overhead"


def test_a_call_that_ends_before_memory_is_busy_is_latency_bound():
    """ncu agrees: what such a call writes stays in the L2."""
    short, long = (relu([timed(144.0)], Case((("N", n),), "bfloat16")) for n in (2**24, 2**25))
    assert (short.prediction.longest, short.prediction.bottleneck) == ("memory", "latency")
    assert 0.5 < short.prediction.busy < 0.6 < long.prediction.busy < 1.0
    assert short.bottleneck.name == "latency"
    assert "% busy: the call ends before memory is saturated" in short.bottleneck.reason
    assert long.bottleneck.name == "memory bandwidth"


def test_counters_decide_the_bottleneck():
    counted = {"memory": 0.4, "sm": 0.9, "dram_read": 1.2e8, "dram_written": 0.8e8}
    device = {"gpu": "h200", "name": "NVIDIA H200"}
    code = source.kernel_hash("relu", "triton")
    profiled = record.stamp("counters", "relu", "triton", code, call=CALL, counters=counted, device=device)
    found = relu([profiled])
    assert found.bottleneck.source == "counters"
    assert found.bottleneck.name in ("instruction issue", "FP32 arithmetic")
    passes = check(found, "better mathematics")
    assert (passes.verdict, passes.facts[-1].source) == (PASS, "counters")
    assert "DRAM traffic is 0.75 times" in passes.facts[-1].text, "the last writes stay in the L2"
    assert relu([profiled | {"source": "older"}]).bottleneck.source == "audited"


def test_backward_is_audited_too():
    found = relu([], direction="backward")
    assert found.call.audited.case == "N=262144"
    assert found.call.audited.moved.distinct == pytest.approx(3 * 2**27)
    assert found.prediction.terms["memory"].source == "audited"


COPIED = """
import torch, triton, triton.language as tl

@triton.jit
def _copy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))

def copy(x):
    y = torch.empty_like(x)
    _copy[(x.numel() // 1024,)](x, y, 1024)
    return y.cpu()
"""


def test_host_device_copies_are_seen(tmp_path):
    path = tmp_path / "copied.py"
    path.write_text(COPIED)
    function = TracedFunction(lambda: registry.launcher(path, None), ["1048576:fp32"])
    found = diagnose(collect_function(function, "copied", H200, []))
    assert found.bottleneck.name == "host-device copies"
    assert "4194304 B copied by cpu()" in found.bottleneck.reason


def test_a_gemm_without_tensor_cores_is_reported():
    op = registry.load("linear")
    found = diagnose(collect_op(op, op.kernels["cuda"], op.bench[1].with_dtype("bfloat16"), H200, []))
    assert "the bfloat16 tensor cores are idle" in check(found, "better mathematics").facts[0].text
    assert found.prediction.us > 10 * found.floor_us
    assert not [unit for unit in found.prediction.terms if unit.startswith("tensor")]


def test_torch_operators_beside_a_launch_are_other_work_if_asked_for():
    op = registry.load("relu")
    ours = op.kernels["triton"]
    mixed = replace(ours, fn=lambda x: torch.softmax(ours.fn(x), -1))
    assert "torch's _softmax" in collect_op(op, mixed, CASE, H200, [], operators=True).other_work
    assert collect_op(op, ours, CASE, H200, [], operators=True).other_work == ""


def test_errors_are_raised():
    op = registry.load("relu")
    with pytest.raises(NothingLaunched):
        collect_op(op, op.kernels["eager"], CASE, H200, [])
    function = TracedFunction(lambda: registry.launcher(KERNELS, "for_nvidia"), ["128:fp32"])
    with pytest.raises(CompilationFailed, match="gfx942"):
        collect_function(function, "", datasheet("mi300x"), [])


def test_amd():
    op = registry.load("relu")
    found = diagnose(collect_op(op, op.kernels["triton"], CASE, datasheet("mi300x"), [timed(20.0)]))
    assert found.bottleneck.name == "memory bandwidth"
    assert found.failed == []
    assert "datasheet, DRAM times 0.42 as measured on h200" in found.prediction.rates


WRITTEN = """
import torch, triton, triton.language as tl

@triton.jit
def _each(x_ptr, z_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x_ptr + offs, mask=offs < N) + tl.load(z_ptr + offs, mask=offs < N)
    tl.store(y_ptr + offs, total, mask=offs < N)

@triton.jit
def _twice(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(0, N, BLOCK):
        total += tl.load(x_ptr + row + n + tl.arange(0, BLOCK))
    scale = 1 / tl.sum(total)
    for n in range(0, N, BLOCK):
        offs = row + n + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs) * scale)

@triton.jit
def _product(a_ptr, b_ptr, c_ptr, N, K, M_: tl.constexpr, N_: tl.constexpr, K_: tl.constexpr):
    m, n = tl.program_id(0) * M_ + tl.arange(0, M_), tl.program_id(1) * N_ + tl.arange(0, N_)
    total = tl.zeros((M_, N_), tl.float32)
    for k in range(0, K, K_):
        ks = k + tl.arange(0, K_)
        a = tl.load(a_ptr + m[:, None] * K + ks[None, :])
        total = tl.dot(a, tl.load(b_ptr + ks[:, None] * N + n[None, :]), total)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total.to(tl.bfloat16))

def _added(x, z, N):
    y = torch.empty_like(x)
    _each[(triton.cdiv(N, 1024),)](x, z, y, N, 1024)
    return y

def doubled(x, n=None):
    return _added(x, x, n or x.numel())

def gathered(x, index):
    return _added(x, x, x.numel())

def normed(x):
    y = torch.empty_like(x)
    _twice[(x.shape[0],)](x, y, x.shape[1], 1024)
    return y

def product(a, b):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    _product[(a.shape[0] // 128, b.shape[1] // 128)](a, b, c, b.shape[1], a.shape[1], 128, 128, 64, num_warps=8)
    return c

def multiplied(x):
    return doubled(x @ x)

def sorted_after(x):
    return torch.sort(doubled(x))[0]

def by_rows(x):
    y = torch.empty_like(x)
    for row in range(x.shape[0]):
        _each[(triton.cdiv(x.shape[1], 1024),)](x[row], x[row], y[row], x.shape[1], 1024)
    return y

@triton.jit
def _sum(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr, tl.sum(tl.load(x_ptr + offs)))

def summed(x):
    y = torch.zeros(1, device=x.device)
    _sum[(x.numel() // 1024,)](x, y, 1024)
    return y

@triton.jit
def _wide(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs) + tl.load(x_ptr + offs + BLOCK) * tl.load(x_ptr + offs + 2 * BLOCK)
    tl.store(y_ptr + offs, x)

def wide(x):
    y = torch.empty_like(x)
    _wide[(x.numel() // 16384 - 2,)](x, y, 16384, num_warps=4)
    return y

@triton.jit
def _square(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, tl.dot(x, tl.trans(x)))

def too_large(x):
    y = torch.empty_like(x)
    _square[(1,)](x, y, x.shape[0])
    return y

def too_high(x):
    _each[(1, 2**17)](x, x, x, x.numel(), 1024)
    return x

def nothing(x):
    _each[(0,)](x, x, x, 0, 1024)
    return x

def counted(x, lengths):
    n = int(lengths.max()) * (x.numel() // 16)
    return _added(x, x, n if lengths.sum().item() else x.numel())

def narrowed(x):
    return doubled(torch.ones(x.shape).to("cuda", torch.float16))

def uploaded(x):
    return doubled(torch.ones(x.shape).cuda())
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Diagnose a function of a file."""
    path = tmp_path_factory.mktemp("written") / "kernels.py"
    path.write_text(WRITTEN)
    return lambda name, *given: diagnose(
        collect_function(TracedFunction(lambda: registry.launcher(path, name), given), name, H200, MEASURED)
    )


@pytest.mark.slow
def test_a_function_of_a_file_is_audited_at_full_size(written):
    """A sample of its programs runs, with the masks, loops and repeated reads of the full call."""
    found = written("normed", "512x32768:fp32")
    reuse = check(found, "tiling and reuse")
    assert reuse.verdict == FAIL
    assert "`x_ptr` is read 2.0 times" in reuse.facts[-1].text
    assert (
        "0% of the lanes of loads and stores" in check(written("doubled", "8388608:fp32"), "divergence").facts[-1].text
    )
    audited = found.call.audited
    assert audited.moved.read == pytest.approx(2**26)
    assert audited.moved.requested == pytest.approx(3 * 2**26)


def test_flops_of_a_function_of_a_file_are_counted_from_its_code(written, monkeypatch):
    found = written("product", "4096x4096:bf16", "4096x4096:bf16")
    operations = 2 * 4096**3
    rate = found.call.ceilings.rates["tensor.bfloat16"]
    assert found.floor_us == pytest.approx(operations / rate * 1e6, rel=0.05)
    assert found.prediction.us > found.floor_us
    assert found.bottleneck.name == "tensor cores", "the L2 serves a tile to several SMs at once"
    assert found.prediction.terms["memory"].us < found.floor_us < found.prediction.high / 2
    monkeypatch.setattr(launch_model, "_MMA", re.compile("an unknown instruction"))
    unreadable = diagnose(found.call)
    assert unreadable.prediction is None
    assert "cannot be read from the machine code" in check(unreadable, "memory- or compute-bound").advice


def test_a_tensor_that_is_passed_twice_counts_once(written):
    found = written("doubled", "8388608:fp32")
    assert check(found, "better mathematics").verdict == PASS
    assert found.call.audited.moved.distinct == pytest.approx(2 * 2**25)


def test_torch_operators_in_a_call_are_named_and_leave_the_bottleneck_unknown(written):
    for name, operator in (("multiplied", "mm"), ("sorted_after", "sort")):
        found = written(name, "1024x1024:fp32")
        assert found.bottleneck.name == "unknown"
        assert found.share is None
        assert f"work other than these launches: torch's {operator}" in found.prediction.excludes[0]
        for unknown in ("memory- or compute-bound", "better mathematics"):
            assert check(found, unknown).verdict == UNKNOWN


def test_launches_on_rows_of_a_tensor_count_all_rows(written):
    assert "fuse launches" in written("by_rows", "8x1024:fp32").advice
    found = written("by_rows", "8x262144:fp32")
    assert found.call.min_bytes == pytest.approx(2 * 8 * 2**20)
    assert check(found, "better mathematics").verdict == PASS


def test_atomics_of_different_programs_are_serialised(written):
    """Only those of one warp on one address are combined."""
    facts = check(written("summed", "1048576:fp32"), "privatisation").facts
    assert "1.0 K warp atomics per address" in facts[-1].text


@pytest.mark.slow
def test_a_launch_that_would_fail_has_no_prediction(written):
    for name, given, why in (("too_high", "4096:fp32", "131072"), ("too_large", "256x256:fp32", "shared memory")):
        found = written(name, given)
        assert found.bottleneck.name == "none: it cannot be launched"
        assert why in found.bottleneck.reason
        assert found.prediction is None


def test_library_calls_of_torch_compile_leave_the_bottleneck_unknown():
    op = registry.load("linear")
    case = op.bench[1].with_dtype("bfloat16")
    found = diagnose(collect_op(op, op.kernels["compile"], case, H200, MEASURED))
    assert found.bottleneck.name == "unknown"
    assert found.share is None
    assert found.failed == []


def test_reads_per_byte_of_a_gemm_are_those_of_the_full_call():
    op = registry.load("linear")
    found = diagnose(collect_op(op, op.kernels["triton"], op.bench[1].with_dtype("bfloat16"), H200, MEASURED))
    (launch,) = [one.launch for one in found.call.launches]
    tiles = launch.programs**0.5  # square tiles of a square result
    assert f"read {tiles:.0f} times" in check(found, "tiling and reuse").facts[0].text


def test_loads_in_flight_are_limited_by_registers(written):
    found = written("wide", "4194304:fp32")
    (one,) = launch_models(found.call)
    assert one.in_flight == H200.registers_per_sm * 4


def test_inputs_of_constant_size_are_not_scaled_with_the_call():
    op = registry.load("bias_activation")
    found = diagnose(collect_op(op, op.kernels["triton"], op.bench[0].with_dtype("bfloat16"), H200, MEASURED))
    assert "DRAM traffic is 1.00 times" in check(found, "better mathematics").facts[-1].text


def test_bank_conflicts_are_excluded_from_a_prediction():
    op = registry.load("transpose")
    calls = [
        collect_op(op, op.kernels[name], op.bench[1].with_dtype("float32"), H200, [])
        for name in ("cuda", "cuda-padded")
    ]
    excludes = [diagnose(one).prediction.excludes for one in calls]
    assert ["bank conflicts of shared memory" in one for one in excludes] == [True, False]


@pytest.mark.slow
def test_small_tensors_of_one_name_count_together():
    op = registry.load("adamw")
    found = diagnose(collect_op(op, op.kernels["triton"], op.bench[0].with_dtype("bfloat16"), H200, MEASURED))
    assert re.search(r"warps move 1\.\d+ B", check(found, "coalesced access").facts[-1].text)


def test_inputs_read_by_several_launches_are_named():
    (op,) = registry.load("cumsum").variants
    case = Case((("A", 1), ("N", 4096), ("B", 64), ("over", "1")), "bfloat16")  # columns, in parts
    found = diagnose(collect_op(op, op.shipped, case, H200, MEASURED))
    texts = [fact.text for fact in check(found, "better mathematics").facts]
    assert "`x_ptr` is read by 2 launches" in texts


def test_accesses_out_of_bounds_are_reported_instead_of_a_prediction(written):
    found = written("doubled", "4096:fp32", "8192")
    assert found.prediction is None
    assert "out of bounds in _each" in found.call.no_audit_reason


def test_integer_inputs_are_excluded_from_a_prediction(written):
    assert "the values of integer inputs" in written("gathered", "4096:fp32", "4096:int64").prediction.excludes[0]
    assert not written("doubled", "4096:fp32").prediction.excludes


def test_copies_to_the_gpu_are_the_bottleneck(written):
    bottleneck = written("uploaded", "2048x4096:fp32").bottleneck
    assert bottleneck.name == "host-device copies"
    assert "keep tensors on the GPU" in bottleneck.advice
    narrowed = written("narrowed", "2048x4096:fp32").call
    assert narrowed.audited.moved.read == pytest.approx(2**24), "the dtype is converted"
    assert f"{2**25} B copied by cuda()" in bottleneck.reason


def test_coalescing_does_not_apply_to_short_calls():
    (one,) = [one for one in relu([], Case((("N", 5),), "bfloat16")).checks if one.name == "coalesced access"]
    assert one.verdict == NOT_APPLICABLE


def test_an_empty_grid_is_reported(written):
    found = written("nothing", "64:fp32")
    assert found.prediction is None
    assert "the grid of _each is empty" in found.call.no_audit_reason


def test_values_that_the_host_reads_come_from_the_audit(written):
    found = written("counted", "4096:fp32", "8:int64")
    largest = make_input("8:int64").max().item()
    assert found.call.launches[0].launch.grid == (-(-largest * 256 // 1024), 1, 1)
    assert found.call.launches[0].launch.is_complete
    assert any("the wait of the host" in one for one in found.prediction.excludes)

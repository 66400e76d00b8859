"""Compiled launches: resources, instruction mix, code with source lines, and compile errors."""

import functools
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.compiler import ASTSource

from tilewright import registry
from tilewright.errors import CodeNotAvailable, FileBroken
from tilewright.hardware import datasheet
from tilewright.spec import Cost
from tilewright.workbench.inspect import (
    CompileFailure,
    Inspection,
    Roofline,
    inspect_cuda_file,
    inspect_kernel,
    inspect_launch,
)
from tilewright.workbench.inspect.diff import KernelDiff, Variant
from tilewright.workbench.inspect.instructions import _MATCHERS, _mma_shapes, _width, read_instructions
from tilewright.workbench.inspect.launches import call_launches, kernel_launches, with_config
from tilewright.workbench.inspect.line_info import FORMS, CodeLine, code_lines
from tilewright.workbench.inspect.portability import problem

FILE = Path(__file__).parent / "inspect_kernels.py"

SPILLS = """
__global__ void array(float* x, const int* at) {
  float a[64];
  for (int i = 0; i < 64; ++i) a[i] = x[i];
  for (int i = 0; i < 64; ++i) x[i] = a[at[i] & 63];
}
__device__ __noinline__ float pick(const float* x, int n) {
  float a[5];
  for (int i = 0; i < 5; ++i) a[i] = x[i] * i;
  return a[n];
}
__global__ void calls(float* x, int n) { x[0] = pick(x, n) + pick(x + 1, n + 1); }
template <int HELD> __device__ void turn(float* x) {
  float a[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < HELD; ++i) x[i * 1024 + threadIdx.x] = a[i] * a[HELD - 1 - i];
}
__global__ void __launch_bounds__(1024, 2) tight(float* x) { turn<64>(x); }
__global__ void __launch_bounds__(1024, 2) mixed(float* x, int n) {
  float a[16];
  for (int i = 0; i < 16; ++i) a[i] = x[i];
  turn<64>(x);
  x[threadIdx.x] = a[n + threadIdx.x];
}
"""


@functools.cache
def inspected(name, size, gpu="h200"):
    def load():
        return registry.launcher(FILE, name), [torch.empty(size, device="meta")]

    (found,) = [inspect_launch(launch, name) for launch in call_launches(load, datasheet(gpu))]
    return found


def marked(words: str) -> int:
    return next(n for n, line in enumerate(FILE.read_text().splitlines(), 1) if line.endswith(f"# {words}"))


@pytest.mark.parametrize("gpu", ["h200", "mi300x"])
def test_wide_and_narrow_loads(gpu):
    wide, narrow = inspected("copy", 2**20, gpu), inspected("copy_from_the_second", 2**20, gpu)
    assert wide.mix.mean_width("global load") == 16
    assert narrow.mix.mean_width("global load") == 4
    assert {place[1] for place in wide.mix.by_line("global load")} == {marked("the load")}
    assert wide.resources.spills == wide.resources.stack == wide.resources.shared == 0
    assert 0 < wide.resources.registers < narrow.resources.registers <= 64


def test_waves_and_the_idle_part_of_the_last():
    found = inspected("copy", 1024 * 16 * 132 * 5 // 2)
    assert found.occupancy.blocks == 16
    assert (found.waves, found.idle) == (2.5, 0.5)


def test_spills_atomics_fp64_and_special_functions_are_seen():
    found = inspected("crowded", 1024)
    assert found.resources.spills > 0
    assert problem(found) == f"{found.resources.spills} B of registers are spilled"
    kinds = found.mix.kinds
    assert kinds["local load"] > 0
    assert kinds["local store"] > 0
    assert kinds["atomic"] > 0
    assert kinds["fp64"] >= 32
    assert found.mix.details("special function")["MUFU.EX2"] == 32
    assert found.mix.details("global load") == {"16 B": 8}


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_a_dynamically_indexed_array_is_no_spill(gpu):
    used = inspected("sines", 128, gpu).resources
    assert (used.stack, used.spills) == (32, 0)


@pytest.mark.skipif(not shutil.which("nvcc") or not shutil.which("ptxas"), reason="needs nvcc and ptxas")
def test_spills_match_ptxas(tmp_path):
    file, code = tmp_path / "spills.cu", tmp_path / "spills.ptx"
    file.write_text(SPILLS)
    found = {one.compiled.symbol: one.resources for one in inspect_cuda_file(file, datasheet("h200"), 1024, 0)}
    code.write_text(next(inspect_cuda_file(file, datasheet("h200"), 1024, 0)).compiled.texts["ptx"])
    command = ["ptxas", "-v", "-arch=sm_90", code, "-o", tmp_path / "spills.cubin"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    expected = {
        symbol: (int(stack), int(stores))
        for symbol, stack, stores in re.findall(r"properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes", output)
    }
    assert {name.strip("_Z0123456789")[:5] for name in found} == {"array", "calls", "tight", "mixed"}
    for symbol, used in found.items():
        stack, stores = expected[symbol]
        assert used.stack == stack
        assert bool(used.spills) == bool(stores), symbol
        assert used.spills <= stores
    assert sum(bool(used.spills) for used in found.values()) == 2
    assert any(0 < used.spills < used.stack for used in found.values())


@pytest.mark.parametrize(
    ("gpu", "opcode"),
    [
        ("h200", "HGMMA.64x"),
        ("a100", "HMMA.16816.F32.BF16"),
        ("mi300x", "v_mfma_f32"),
        ("b200", "UTCHMMA.64x32x16.F32.BF16"),
    ],
)
def test_tensor_core_opcodes_include_the_shape(gpu, opcode):
    op = registry.load("linear")
    (found,) = inspect_kernel(op, op.kernels["triton"], op.bench[0].with_dtype("bfloat16"), datasheet(gpu))
    assert isinstance(found, Inspection)
    assert any(name.startswith(opcode) for name in found.mix.details("tensor core"))
    assert found.roofline
    assert found.roofline.unit == "tensor.bfloat16"
    content = found.as_json()
    assert content["roofline"]["intensity"] == found.roofline.intensity > 1
    assert content["occupancy"]["limits"]["registers"] >= found.occupancy.blocks


@pytest.mark.parametrize(
    ("kind", "fields", "shape"),
    [
        ("f16", dict(d=0, a=0, b=0, n=256, m=128), "128x256x16.F16.F16"),
        ("tf32", dict(d=1, a=2, b=2, n=8, m=64), "64x8x8.F32.TF32"),
        ("f8f6f4", dict(d=1, a=0, b=1, n=128, m=256), "256x128x32.F32.E4M3.E5M2"),
        ("i8", dict(d=2, a=1, b=1, n=64, m=128), "128x64x32.S32.S8"),
    ],
)
def test_the_mma_shape_of_blackwell_is_read_from_its_descriptor(kind, fields, shape):
    shifted = dict(d=fields["d"] << 4, a=fields["a"] << 7, b=fields["b"] << 10)
    descriptor = sum(shifted.values()) | fields["n"] // 8 << 17 | fields["m"] // 16 << 24
    mma = f"@%p1 tcgen05.mma.cta_group::1.kind::{kind} [ %r9 + 0 ], %rd1, %rd2, %r7, %p2;"
    lines = [CodeLine(f"    mov.b32     %r7, {descriptor};", None), CodeLine(mma, ("f.py", 3))]
    assert _mma_shapes(lines) == {("f.py", 3): {shape}}
    assert _mma_shapes(lines[1:]) == {}
    lines[0] = CodeLine(f"    mov.b32     %r7, {descriptor | 7 << 7};", None)
    assert _mma_shapes(lines) == {}


def test_hfma2_with_zero_operands_is_a_move():
    lines = [
        CodeLine("        /*0020*/                   HFMA2.MMA R7, -RZ, RZ, 1.625, 0 ;", None),
        CodeLine("        /*0030*/                   HFMA2.MMA R7, -RZ, R2, R3 ;", None),
        CodeLine("        /*0040*/                   HFMA2.BF16_V2 R7, R4, R2, R3 ;", None),
    ]
    assert [one.kind for one in read_instructions(lines, False)] == ["integer and other", "fp16", "fp16"]


def test_occupancy_of_amd_matches_llvm():
    found = inspected("copy", 2**20, "mi300x")
    expected = int(re.search(r"; Occupancy: (\d+)", found.compiled.texts["amdgcn"])[1])
    assert found.occupancy.warps == 4 * expected


@pytest.mark.parametrize(
    ("opcode", "is_amd", "kind", "width"),
    [
        ("LDG.E.128", False, "global load", 16),
        ("LDG.E.LTC128B.64", False, "global load", 8),
        ("LDG.E", False, "global load", 4),
        ("LDG.E.U16.CONSTANT", False, "global load", 2),
        ("STG.E.U8", False, "global store", 1),
        ("LDGSTS.E.BYPASS.LTC128B.128", False, "async copy", 16),
        ("UTMALDG.2D", False, "bulk copy", 0),
        ("UBLKCP.S.G", False, "bulk copy", 0),
        ("LDSM.16.M88.4", False, "shared load", 16),
        ("LDL.LU.64", False, "local load", 8),
        ("HFMA2.MMA.BF16_V2", False, "fp16", 0),
        ("HMMA.16816.F32.BF16", False, "tensor core", 0),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", False, "tensor core", 0),
        ("IMMA.16832.S8.S8", False, "tensor core", 0),
        ("UTCHMMA", False, "tensor core", 0),
        ("REDG.E.ADD.F32.FTZ.RN.STRONG.GPU", False, "atomic", 0),
        ("RED.E.ADD.STRONG.GPU", False, "atomic", 0),
        ("REDUX.SUM", False, "shuffle", 0),
        ("ATOMS.CAS", False, "atomic", 0),
        ("BAR.SYNC.DEFER_BLOCKING", False, "barrier", 0),
        ("DEPBAR.LE", False, "wait", 0),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT", False, "wait", 0),
        ("DFMA", False, "fp64", 0),
        ("FFMA", False, "fp32", 0),
        ("LDC.64", False, "constant load", 0),
        ("global_load_dwordx4", True, "global load", 16),
        ("buffer_load_ushort", True, "global load", 2),
        ("buffer_store_dwordx2", True, "global store", 8),
        ("global_load_lds_dwordx4", True, "async copy", 16),
        ("ds_read2_b64", True, "shared load", 16),
        ("ds_write_b128", True, "shared store", 16),
        ("ds_read_u16", True, "shared load", 2),
        ("ds_bpermute_b32", True, "shuffle", 0),
        ("scratch_load_dword", True, "local load", 4),
        ("v_mfma_f32_32x32x8_bf16", True, "tensor core", 0),
        ("v_exp_f32_e32", True, "special function", 0),
        ("global_atomic_add_f32", True, "atomic", 0),
        ("v_fma_f64", True, "fp64", 0),
        ("s_cbranch_vccnz", True, "branch", 0),
    ],
)
def test_opcodes_are_classified(opcode, is_amd, kind, width):
    found = next(name for name, matches in _MATCHERS[is_amd].items() if matches(opcode))
    assert found == kind
    assert width == (_width(opcode, is_amd) if width else 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gpu", ["h200", "mi300x"])
def test_code_lines_have_source_lines(gpu, form):
    found = inspected("copy", 2**20, gpu)
    lines = code_lines(found.compiled, form)
    loads = {"ttir": "tt.load", "ttgir": "tt.load", "llir": "ld.global", "ptx": "ld.global", "sass": "LDG"}
    word = loads[form] if gpu == "h200" or form == "ttir" else "buffer" if form == "llir" else "buffer_load"
    hits = [line for line in lines if word in line.code and line.source_line == (str(FILE), marked("the load"))]
    assert hits, lines
    assert not any("loc(" in line.code or line.code.strip().startswith((".loc", "//##")) for line in lines)


def test_a_copy_of_a_file_has_its_own_path_in_line_info(tmp_path):
    """Although the compiler cache is keyed by the text, which is the same."""
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        file = Path(shutil.copy(FILE, folder))
        launches = call_launches(
            lambda file=file: (registry.launcher(file, "copy"), [torch.empty(64)]), datasheet("h200")
        )
        places = {line.source_line for line in code_lines(inspect_launch(next(iter(launches)), "copy").compiled, "ptx")}
        assert {place[0] for place in places if place} == {str(file)}


def test_kernels_that_torch_compile_would_generate():
    op = registry.load("dot")
    found = [*inspect_kernel(op, op.kernels["compile"], op.bench[0].with_dtype("float32"), datasheet("h200"))]
    assert [one.launch.code.function.fn.__name__[:10] for one in found] == ["triton_red", "triton_per"]
    assert found[0].mix.mean_width("global load") == 16
    assert found[0].launch.programs > 1 == found[1].launch.programs
    (file,) = {file for file, _ in found[0].mix.by_line("global load")}
    assert "tl.load(" in Path(file).read_text()


def test_an_error_in_a_helper_function_has_its_line():
    for gpu in ("h200", "mi300x"):
        found = inspected("mistaken", 128, gpu)
        assert isinstance(found, CompileFailure)
        assert found.error.line == marked("the mistake")
        assert "equal ranks" in str(found.error)
        assert found.as_json()["line"] == found.error.line


def test_gluon_compiles_or_fails_by_target():
    assert isinstance(inspected("for_nvidia", 128), Inspection)
    found = inspected("for_nvidia", 128, "mi300x")
    assert isinstance(found, CompileFailure)
    assert found.error.line == marked("the layout")
    assert found.error.what.endswith("Layout has 32 threads per warp, but the module specifies 64 threads per warp.")
    assert problem(found) == str(found.error)


def test_a_compiler_that_aborts_is_a_compile_failure():
    assert isinstance(inspected("from_hopper_on", (8, 128)), Inspection)
    found = inspected("from_hopper_on", (8, 128), "a100")
    assert isinstance(found, CompileFailure)
    assert str(found.error).startswith(f"{FILE}: does not compile for sm_80: Cannot select: intrinsic")


def test_a_compiler_that_is_killed_is_a_compile_failure(monkeypatch):
    launches = call_launches(lambda: (registry.launcher(FILE, "copy"), [torch.empty(64)]), datasheet("h200"))
    monkeypatch.setattr("triton.knobs.compilation.always_compile", True)
    monkeypatch.setattr(ASTSource, "make_ir", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert problem(inspect_launch(launches[0], "")).endswith("the compiler was killed by SIGKILL")


def test_assembler_errors_are_shown():
    nvidia, amd = inspected("unheard_of", 128), inspected("unheard_of", 128, "mi300x")
    assert nvidia.error.line == marked("the assembly")
    assert nvidia.error.what == "Not a name of any known instruction: 'frobnicate'"
    assert amd.error.what.startswith("invalid instruction: frobnicate ")


def test_too_many_threads_are_a_launch_error():
    op = registry.load("softmax")
    case = op.bench[-1].with_dtype("bfloat16")
    (launch,) = kernel_launches(op, op.kernels["triton-three-pass"], case, datasheet("mi300x"))
    found = inspect_launch(with_config(launch, {"num_warps": 32}), "")
    assert found.launch_error == problem(found) == "2048 threads per block exceed the limit of 1024"
    assert found.waves is None


@pytest.mark.parametrize(
    ("gpu", "grid", "error"),
    [
        ("h200", (2**31 - 1, 65535, 65535), None),
        ("h200", (1, 65536), "65536 blocks in grid dimension y exceed the limit of 65535"),
        ("h200", (1, 1, 100000), "100000 blocks in grid dimension z exceed the limit of 65535"),
        ("h200", (2**31,), "2147483648 blocks in grid dimension x exceed the limit of 2147483647"),
        ("mi300x", (1, 100000), None),
        (
            "mi300x",
            (2**24,),
            "16777216 blocks of 256 threads in grid dimension x exceed the limit of 4294967295 threads",
        ),
    ],
)
def test_a_grid_over_the_limit_is_a_launch_error(gpu, grid, error):
    def load():
        return registry.launcher(FILE, "copy_on_grid"), [torch.empty(1024, device="meta"), *grid]

    (launch,) = call_launches(load, datasheet(gpu))
    assert inspect_launch(launch, "").launch_error == error


def test_an_empty_grid_has_no_work_per_program():
    op = registry.load("relu")
    kernel = replace(op.kernels["triton"], fn=lambda x: registry.launcher(FILE, "copy_on_grid")(x, 0))
    (found,) = inspect_kernel(op, kernel, op.bench[0].with_dtype("float32"), datasheet("h200"))
    assert found.launch.programs == 0
    assert found.roofline.bytes_per_program is None


def test_intensity_and_ridge_point():
    roofline = Roofline(Cost(read=600, written=400, flops={"fp32": 5000.0, "special": 10.0}), datasheet("h200"), 10)
    assert (roofline.unit, roofline.intensity, roofline.bytes_per_program, roofline.flops_per_program) == (
        "fp32",
        5.0,
        100,
        501,
    )
    assert roofline.ridge == pytest.approx(66.9e12 / 4.8e12)


def test_the_work_of_several_launches_is_that_of_the_call():
    op = registry.load("sum")
    found = [*inspect_kernel(op, op.kernels["triton"], op.bench[0].with_dtype("float32"), datasheet("h200"))]
    assert len(found) > 1
    for one in found:
        assert (one.roofline.bytes_per_program, one.roofline.flops_per_program) == (None, None)
        content = one.as_json()["roofline"]
        assert content["bytes"] == one.roofline.cost.bytes
        assert content["flops"] > 0
        assert content["intensity"] < content["ridge"]


def test_a_diff_of_configurations():
    first = inspected("copy", 2**20)
    same = KernelDiff(first, Variant.parse("copy").apply([first]))
    assert all(a == b for a, b in same.numbers.values())
    other = KernelDiff(first, Variant.parse("copy:BLOCK=256,num_warps=8").apply([first]))
    assert other.numbers["BLOCK"] == ("1024", "256")
    assert other.numbers["blocks per SM"] == (16, 8)
    lines = other.code("ttgir", ("before", "after"))
    assert lines[:2] == ["--- before", "+++ after"]
    assert any(line.startswith("+ ") for line in lines[2:])


def test_a_diff_of_languages_omits_figures_that_one_lacks():
    op = registry.load("add")
    case = op.bench[0].with_dtype("float32")
    triton, cuda = (next(inspect_kernel(op, op.kernels[name], case, datasheet("h200"))) for name in ("triton", "cuda"))
    numbers = KernelDiff(triton, cuda).numbers
    assert numbers["threads"] == (triton.compiled.threads, cuda.compiled.threads)
    assert numbers["num_warps"][1] is None
    assert numbers["  constant load LDC"][0] >= 0
    assert all(None not in pair for name, pair in numbers.items() if name.startswith("  ") or "bytes" in name)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_machine_code_of_a_cuda_kernel_has_source_lines():
    op = registry.load("add")
    (found,) = inspect_kernel(op, op.kernels["cuda"], op.bench[0].with_dtype("float32"), datasheet("h200"))
    assert isinstance(found, Inspection)
    files = {Path(line.source_line[0]) for line in code_lines(found.compiled, "sass") if line.source_line}
    assert Path(found.launch.code.file) in files


def test_a_cuda_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    file = tmp_path / "two.cu"
    file.write_text(
        "__global__ void turn(float* x) {\n  __shared__ float s[512];\n  s[threadIdx.x] = x[threadIdx.x];\n"
        "  __syncthreads();\n  x[threadIdx.x] = s[511 - threadIdx.x];\n}\n"
        "__global__ void plain(float4* x) { x[threadIdx.x].x += 1; }\nint main() { turn<<<1, 512>>>(nullptr); }\n"
    )
    found = {one.name: one for one in inspect_cuda_file(file, datasheet("h200"), 512, 1024)}
    assert set(found) == {"turn", "plain"}
    assert found["turn"].resources.shared == 512 * 4 + 1024
    assert found["turn"].occupancy.blocks == 4
    assert found["turn"].mix.kinds["barrier"] == 1
    assert [*found["plain"].mix.by_line("global load")] == [(str(file), 7)]
    with pytest.raises(CodeNotAvailable, match="it has ptx, sass"):
        code_lines(found["plain"].compiled, "ttgir")
    file.write_text("__global__ void f(float* x) {\n  x[0] = ;\n}\n")
    (refused,) = inspect_cuda_file(file, datasheet("h200"), 512, 0)
    assert refused.error.line == 2
    (refused,) = inspect_cuda_file(file, datasheet("mi300x"), 512, 0)
    assert "NVIDIA" in str(refused.error)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_a_cuda_file_that_is_not_utf8(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    file = tmp_path / "bytes.cu"
    file.write_bytes(b"__global__ void f(float* x) {\n  // \xe9\n  x[0] = \xe9;\n}\n")
    (refused,) = inspect_cuda_file(file, datasheet("h200"), 512, 0)
    assert refused.error.line == 3
    file.write_bytes(bytes(range(256)))
    with pytest.raises(FileBroken, match="it is not text"):
        list(inspect_cuda_file(file, datasheet("h200"), 512, 0))

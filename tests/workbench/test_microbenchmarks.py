"""The microbenchmarks do all of the work they are timed for, in the interpreter and in machine code."""

import json
import subprocess
import sys

import pytest
import torch
import triton.language as tl

from tilewright.workbench.bench import microbenchmarks
from tilewright.workbench.bench.microbenchmarks import _copy, _is_unsupported, _matmul, _multiply_add, _read, _write

BLOCK = 16


def numbers(count: int, device: str) -> torch.Tensor:
    """Return integers, so that the sum does not depend on the order."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-9, 10, (count,), generator=generator).to(device, torch.float32)


@pytest.mark.parametrize("passes", [1, 2, 7])
@pytest.mark.parametrize(("blocks", "programs"), [(1, 1), (6, 6), (7, 3), (8, 3)])
def test_read_sums_every_element_once_per_pass(device, blocks, programs, passes):
    x = numbers(blocks * BLOCK, device)
    y = torch.full((programs + 1,), -1.0, device=device)
    _read[(programs,)](x, y, blocks, passes, BLOCK=BLOCK)
    assert float(y[:-1].sum()) == passes * float(x.sum())
    assert float(y[-1]) == -1.0
    sums = x.view(blocks, BLOCK).sum(1)
    for program in range(programs):
        mine = [(block + turn) % blocks for turn in range(passes) for block in range(program, blocks, programs)]
        assert float(y[program]) == sum(float(sums[block]) for block in mine)


def test_copy_and_write_cover_every_element(device):
    x = numbers(5 * BLOCK, device)
    y = torch.full_like(x, -1.0)
    _copy[(5,)](x, y, BLOCK=BLOCK)
    assert torch.equal(x, y)
    _write[(5,)](y, 1.5, BLOCK=BLOCK)
    assert torch.equal(y, torch.full_like(y, 1.5))


def test_every_element_gets_all_fmas(device):
    x = numbers(2 * BLOCK, device)
    y = torch.empty_like(x)
    _multiply_add[(2,)](x, y, 1.0, 2.0, STEPS=96, BLOCK=BLOCK)
    assert torch.equal(y, x + 192)
    _multiply_add[(2,)](x, y, -1.0, 0.0, STEPS=32, BLOCK=BLOCK)
    assert torch.equal(y, x)


@pytest.mark.parametrize("size", [32, 96, 160, 352])  # fewer block rows than a group, and incomplete groups
def test_matmul_is_correct(device, size):
    x, y = (numbers(size * size, device).view(size, size).to(torch.int8) for _ in range(2))
    z = torch.full((size, size), 10**9, dtype=torch.int32, device=device)
    _matmul[(size // 16 * (size // 32),)](x, y, z, size, ACC=tl.int32, BLOCK_M=16, BLOCK_N=32, BLOCK_K=32)
    assert torch.equal(z.cpu(), (x.cpu().double() @ y.cpu().double().t()).to(torch.int32))


COUNT = """
import json, re, subprocess, tempfile
from collections import Counter
from pathlib import Path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tilewright.workbench.bench import microbenchmarks

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {"x_ptr": "*fp32", "y_ptr": "*fp32", "a": "fp32", "b": "fp32", "value": "fp32"}

def count(fn, warps, types=TYPES, stages=3, **constants):
    names = [parameter.name for parameter in fn.params]
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith("_ptr")}
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(ASTSource(fn, signature, constants, aligned), GPUTarget("cuda", 90, 32), options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        sass = subprocess.run([TOOLS / "cuobjdump", "-sass", file.name], capture_output=True, text=True, check=True)
    found = Counter(re.findall(r"[*]/\\s+(?:@!?U?P\\w+ )?([A-Z][A-Z0-9]+)", sass.stdout))
    trips = re.search(r"UMOV UR\\d+, 0x([0-9a-f]+)", sass.stdout) if re.search(r"@P0 BRA", sass.stdout) else None
    print(json.dumps({**found, "shared": made.metadata.shared, "trips": int(trips[1], 16) if trips else 1}))

for block, warps in ((1024, 4), (2048, 4), (2048, 8)):
    count(microbenchmarks._multiply_add, warps, STEPS=microbenchmarks.STEPS, BLOCK=block)
    count(microbenchmarks._reciprocal_root, warps, STEPS=microbenchmarks.STEPS, BLOCK=block)
count(microbenchmarks._copy, 4, BLOCK=1024)
count(microbenchmarks._write, 4, BLOCK=1024)
count(microbenchmarks._read, 4, BLOCK=2048)
int8 = {"x_ptr": "*i8", "y_ptr": "*i8", "z_ptr": "*i32"}
count(microbenchmarks._matmul, 8, int8, ACC=tl.int32, BLOCK_M=128, BLOCK_N=256, BLOCK_K=128)
"""


@pytest.fixture(scope="module")
def machine_code():
    """Return the count of each instruction in the H200 code of each kernel."""
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.xdist_group("microbenchmarks")  # compiled once, in one process
def test_the_compiler_keeps_all_arithmetic(machine_code):
    """One instruction per element and step, and no others."""
    arithmetic = {"FFMA", "FMUL", "FADD", "MUFU"}
    each = [8, 8, 16, 16, 8, 8]  # elements per thread
    for number, found in enumerate(machine_code[:6]):
        unit = ("FFMA", "MUFU")[number % 2]
        assert found[unit] * found["trips"] == each[number] * microbenchmarks.STEPS
        assert arithmetic & found.keys() == {unit}


@pytest.mark.slow
@pytest.mark.xdist_group("microbenchmarks")  # compiled once, in one process
def test_the_compiler_keeps_every_access(machine_code):
    copy, write, read = machine_code[6:9]
    assert (copy["LDG"], copy["STG"]) == (2, 2), "four elements at a time"
    assert (write.get("LDG", 0), write["STG"]) == (0, 2)
    assert read["LDG"] >= 4
    assert read["LDG"] * 4 <= read["FADD"], "each element is used"


@pytest.mark.slow
@pytest.mark.xdist_group("microbenchmarks")  # compiled once, in one process
def test_the_matmul_uses_tensor_cores_without_spills(machine_code):
    product = machine_code[9]
    assert product["IGMMA"] > 0
    assert product["shared"] <= 227 * 1024


def test_an_unsupported_unit_differs_from_a_broken_gpu():
    assert _is_unsupported(RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability"))
    assert _is_unsupported(RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"))
    assert not _is_unsupported(RuntimeError("CUDA error: an illegal memory access was encountered"))


class FakeTimer:
    """A timer that calls nothing; the second of several calls is the fastest."""

    def interleave(self, calls, samples):
        return {name: [30.0 - 10 * (n == 1)] * (samples - 1) + [0.1] for n, name in enumerate(calls)}


def test_the_smallest_median_counts():
    assert microbenchmarks._fastest(FakeTimer(), dict.fromkeys("abc")) == pytest.approx(20e-6)  # type: ignore[arg-type]


def test_an_unsupported_unit_is_omitted_and_a_broken_one_raises(monkeypatch):
    def lacking(_):
        raise RuntimeError("not supported on this GPU")

    def broken(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(microbenchmarks, "_memory", lambda _: {"copy": 1.0})
    monkeypatch.setattr(microbenchmarks, "_l2", lambda _: 2.0)
    monkeypatch.setattr(microbenchmarks, "_arithmetic", lambda _: {"fp32": 3.0})
    units = {"tensor.a": lambda n: {"one": None, "two": None}, "tensor.b": lacking}
    monkeypatch.setattr(microbenchmarks, "GEMMS", units)
    found = microbenchmarks.measure(FakeTimer())  # type: ignore[arg-type]
    assert found == {"copy": 1.0, "l2": 2.0, "fp32": 3.0, "tensor.a": pytest.approx(2 * 8192**3 / 20e-6)}
    monkeypatch.setattr(microbenchmarks, "GEMMS", {"tensor.b": broken})
    with pytest.raises(RuntimeError, match="illegal"):
        microbenchmarks.measure(FakeTimer())  # type: ignore[arg-type]

"""A launch fingerprint changes if and only if the launch or its machine code changes."""

import re
from pathlib import Path

import pytest
import torch

from tilewright import registry, spec
from tilewright.cost import Cost
from tilewright.errors import IncompleteTrace, LauncherFailed
from tilewright.hardware import datasheet
from tilewright.runtime import cuda
from tilewright.workbench.inspect.fingerprint import fingerprint, toolchain

TRITON = """
import torch
import triton
import triton.language as tl

@triton.jit
def _scale_fwd(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_ptr + offs, mask=offs < N)
    tl.store(y_ptr + offs, x * 2.0, mask=offs < N)

def scale(x):
    y = torch.empty_like(x)
    blocks = triton.cdiv(x.numel(), 1024)
    _scale_fwd[(blocks,)](x, y, x.numel(), BLOCK=1024, num_warps=4)
    return y
"""
GLUON = """
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def _scale_fwd(x_ptr, y_ptr, N, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    offs = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)  # [BLOCK]
    x = gl.load(x_ptr + offs, mask=offs < N)
    gl.store(y_ptr + offs, x * 2.0, mask=offs < N)

def scale(x):
    y = torch.empty_like(x)
    blocks = triton.cdiv(x.numel(), 1024)
    _scale_fwd[(blocks,)](x, y, x.numel(), BLOCK=1024, num_warps=4)
    return y
"""
CUDA = """
import torch
from tilewright.runtime.cuda import CudaSource

CUDA = CudaSource("FOLDER/scale.cu", "scale_fwd")

def scale(x):
    y = torch.empty_like(x)
    blocks = -(-x.numel() // 128)
    CUDA.prepare("scale_fwd", x.dtype, x.get_device(), (blocks,), 128, x.numel())(x, y)
    return y
"""
CUDA_KERNEL = """
#include "dtypes.cuh"

template <typename T> __global__ void scale_fwd(const T* x, T* y, long long N) {
    long long n = blockIdx.x * (long long)blockDim.x + threadIdx.x;  // one element per thread
    if (n < N) y[n] = T((float)x[n] * 2.0f);
}
"""
NEEDS_CUDA = pytest.mark.skipif(not cuda.is_installed(), reason="needs cuda-core")
LANGUAGES = ["triton", "gluon", pytest.param("cuda", marks=NEEDS_CUDA)]


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """A function that returns the fingerprint of a kernel after replacing text in its source."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))

    def run(language: str, *replacements: tuple[str, str], file: str = "scale.py", N: int = 2**16) -> list[str]:
        text, kernel = {"triton": TRITON, "gluon": GLUON, "cuda": CUDA}[language], CUDA_KERNEL
        for old, new in replacements:
            assert old in text or (language == "cuda" and old in kernel)
            text, kernel = text.replace(old, new), kernel.replace(old, new)
        path: Path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("FOLDER", str(tmp_path)))
        (tmp_path / "scale.cu").write_text(kernel)
        module = registry.load_module(path)
        case = spec.Case((("N", N),), "float32")
        op = spec.Op("scale", lambda x: 2 * x, lambda x: Cost(0, 0), lambda d: (d.randn("N").abs(),), [case], [case])
        op.kernel(language, language=language, differentiable=False)(module.scale)
        return fingerprint(op, op.kernels[language], case, datasheet("h200"))

    return run


def parts(one: str) -> dict[str, str]:
    words = one.split()
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_fingerprint_names_the_launch(trace, language):
    (one,) = trace(language)  # drawing the inputs does not count
    found = parts(one)
    blocks = 512 if language == "cuda" else 64
    assert (found["grid"], found["block"], found["cluster"], found["shared"]) == (f"{blocks}x1x1", "128", "1", "0")
    assert re.fullmatch("[0-9a-f]{16}", found["code"])


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    ("old", "new"),
    [("scale_fwd", "multiply_forward"), ("# [BLOCK]", "# offsets"), ("    y = torch", "\n\n    y = torch"), ("", "")],
    ids=["renamed kernel", "changed comment", "moved lines", "unchanged"],
)
def test_names_comments_and_lines_do_not_count(trace, language, old, new):
    if language == "cuda":
        old, new = {"# [BLOCK]": ("// one", "// 1"), "    y = torch": ("template", "\n\ntemplate")}.get(old, (old, new))
    assert trace(language) == trace(language, (old, new))


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_file_does_not_count(trace, language):
    assert trace(language) == trace(language, file="elsewhere/other_name.py")


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_changed_constant_changes_the_code_alone(trace, language):
    before, after = trace(language)[0], trace(language, ("* 2.0", "* 3.0"))[0]
    assert {name for name, value in parts(before).items() if parts(after)[name] != value} == {"code"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_changed_block_or_grid_changes_the_launch(trace, language):
    (before,) = trace(language)
    if language == "cuda":
        (block,) = trace(language, ("(blocks,), 128", "(blocks,), 256"))
    elif language == "gluon":
        (block,) = trace(language, ("num_warps=4", "num_warps=8"), ("[4], [0]", "[8], [0]"))
    else:
        (block,) = trace(language, ("num_warps=4", "num_warps=8"))
    assert (parts(before)["block"], parts(block)["block"]) == ("128", "256")
    (grid,) = trace(language, ("(blocks,)", "(2 * blocks,)"))
    changed = {name for name, value in parts(before).items() if parts(grid)[name] != value}
    assert changed == {"grid"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_changed_size_changes_the_arguments(trace, language):
    before, after = trace(language)[0], trace(language, N=2**16 - 16)[0]
    changed = {name for name, value in parts(before).items() if parts(after)[name] != value}
    assert changed == {"arguments"} if language != "cuda" else changed >= {"arguments"}


def test_every_launch_counts_in_order(trace):
    launch = "    _scale_fwd[(blocks,)](x, y, x.numel(), BLOCK=1024, num_warps=4)\n"
    smaller = launch.replace("(blocks,)", "(1,)")
    two, other = trace("triton", (launch, launch + smaller)), trace("triton", (launch, smaller + launch))
    assert [parts(one)["grid"] for one in two] == ["64x1x1", "1x1x1"]
    assert two == other[::-1]
    assert two != other


def test_torch_functions_count(trace):
    plain, relu, exp = (
        trace("triton", ("return y", f"return {result}")) for result in ("y", "torch.relu(y)", "torch.exp(y)")
    )
    assert plain == relu[:1] == exp[:1]
    assert relu[1].startswith("torch 1 functions ")
    assert exp[1].startswith("torch 1 functions ")
    assert relu[1] != exp[1]


def test_the_toolchain_names_compilers_and_torch():
    found = toolchain()
    assert found["torch"] == torch.__version__.partition("+")[0]
    assert {"triton", "nvrtc"} <= found.keys()


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("    return y\n", "    return y * y.max().item()\n", IncompleteTrace),
        ("    y = torch.empty_like(x)\n", "    y = x * x.max().item()\n", LauncherFailed),
    ],
    ids=("after the launch", "before it"),
)
def test_a_kernel_that_reads_values_has_no_fingerprint(trace, old, new, error):
    """The launches after the read are not traced, so equal beginnings would hide a change."""
    with pytest.raises(error):
        trace("triton", (old, new))

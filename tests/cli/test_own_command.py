"""Operations in users' files, through every command that takes them."""

import json
import textwrap

import pytest
from command import assert_one_line, run

FUSED = """
import torch
import triton
import triton.language as tl


def in_torch(x, w, eps):
    return torch.nn.functional.silu(torch.nn.functional.rms_norm(x, x.shape[-1:], w, eps))


@triton.jit
def _fused(x_ptr, w_ptr, y_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + offs, mask=offs < N, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / N + eps) * w
    tl.store(y_ptr + row * N + offs, (y * tl.sigmoid(y)).to(y_ptr.dtype.element_ty), mask=offs < N)


def fused(x, w, eps):
    assert x.is_cuda
    x, w, y = x.contiguous(), w.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        with torch.cuda.device(x.device):
            _fused[(x.shape[0],)](x, w, y, x.shape[1], eps, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
"""
WHOLE = """
from tilewright.spec import Cost, grid

reference = in_torch
cases = grid(M=(1, 5), N=(1, 77))


def inputs(draw):
    return draw.randn("M", "N"), draw.randn("N"), 1e-6


def cost(x, w, eps):
    return Cost(x.nbytes + w.nbytes, x.nbytes, {"fp32": 8 * x.numel()})
"""
BY_NAME = ["-f", "fused", "--reference", "in_torch", "-i", "5x77:bf16", "-i", "77:bf16", "-i", "1e-6"]
without_gpu = pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="for machines without a GPU")


@pytest.fixture
def fused(tmp_path):
    path = tmp_path / "fused.py"
    path.write_text(FUSED)
    return path


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "whole.py"
    path.write_text(FUSED + WHOLE)
    return path


def test_a_file_alone_points_the_way(fused, tmp_path):
    done = run("check", fused)
    assert_one_line(done, 2, "no `reference`", "only in_torch, fused")
    command = done.stderr.strip().partition("as in: tilewright ")[2]
    assert command == f"check {fused} -f fused --reference in_torch -i 64x1000:bf16 -i 64x1000:bf16 -i 1e-6"
    (tmp_path / "mine.py").write_text("def softmax(x): return x")
    assert_one_line(run("check", tmp_path / "mine.py"), 2, f"tilewright check softmax {tmp_path / 'mine.py'}")
    (tmp_path / "solution.py").write_text("class ModelNew: pass")
    assert_one_line(run("bench", tmp_path / "solution.py"), 2, "--problem PROBLEM.py")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["check", "softmax", "--reference", "f"], ["--reference: only for a FILE"]),
        (["check", "FILE", "--reference", "nothing", "-i", "3"], ["no function named 'nothing'"]),
        (["check", "FILE", "--reference", "in_torch"], ["defines no `inputs`", "in_torch(x, w, eps)"]),
        (["check", "FILE", "--reference", "in_torch", "-i", "3x4"], ["missing a required argument: 'w'"]),
        (
            ["check", "FILE", "--reference", "in_torch", "-i", "3x", "-i", "4", "-i", "1"],
            ["cannot read the input '3x'"],
        ),
        (
            ["check", "FILE", "--reference", "in_torch", "-i", "3x4", "-i", "4", "-i", "1e-6"],
            ["a tensor of 4 elements is written 4:fp32"],
        ),
        (["inspect", "FILE", "--reference", "in_torch", "--threads", "3", "-i", "3"], ["only for a .cu FILE"]),
    ],
)
def test_mistakes_are_one_line(command, words, fused):
    assert_one_line(run(*[fused if word == "FILE" else word for word in command]), 2, *words)


@pytest.mark.slow
def test_a_function_is_checked_against_a_reference_of_the_same_file(fused, tmp_path):
    done = run("check", fused, *BY_NAME, "--quick", "--record", tmp_path / "r.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fused   right" in done.stdout
    assert f"Next: tilewright explain {fused} -f fused --reference in_torch -i 5x77:bf16" in done.stdout
    (record,) = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert (record["op"], record["kernel"], record["file"]) == ("fused.py", "fused", str(fused))
    fused.write_text(FUSED.replace("/ N + eps", "/ BLOCK + eps"))
    done = run("check", fused, *BY_NAME, "--quick")
    assert (done.returncode, "wrong" in done.stdout) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["audit", "FILE", "-d", "bf16"], "whole.py, fused, M=5,N=77 bfloat16"),
        (["inspect", "FILE", "-c", "M=5,N=77"], "FLOP/byte on FP32"),
        (["explain", "FILE", "-c", "M=4096,N=1000"], "DRAM traffic is 1.00 times the minimum"),
        (["ops", "FILE"], "Next: tilewright check"),
    ],
)
def test_every_tool_takes_the_operation(command, printed, whole):
    done = run(*[whole if word == "FILE" else word for word in command])
    assert done.returncode in (0, 1), done.stderr
    assert printed in done.stdout, done.stdout


@pytest.mark.slow
@without_gpu
def test_bench_and_profile_load_the_operation_and_need_a_gpu(whole):
    done = run("bench", whole, "-k", "fused", "-d", "bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fused   right" in done.stdout
    assert f"Next: tilewright explain {whole}" in done.stdout
    assert_one_line(run("profile", whole), 2, "profile needs a GPU", f"`tilewright inspect {whole}`")
    named = f"{whole} -f fused -i 5x77:bf16"
    assert_one_line(run("profile", *named.split()), 2, f"`tilewright explain {named}`")


@pytest.mark.slow
def test_a_call_of_a_users_operation_can_be_loaded_in_another_process(fused):
    from tilewright.workbench.profile.calls import min_cost, prepare, title

    given = {"file": str(fused), "reference": "in_torch", "inputs": ["5x77:bf16", "77:bf16", "1e-6"]}
    case = dict(zip(("x", "w", "eps"), given["inputs"], strict=True))
    call = {"op": "fused.py", "kernel": "eager", "case": case, "dtype": "bfloat16", "direction": "backward"}
    call |= {"operation": given}
    assert [g.shape for g in prepare(call, "cpu")()] == [(5, 77), (77,)]
    assert min_cost(call) is None
    assert title(call).startswith("fused.py, eager, x=5x77:bf16")


@pytest.mark.slow
@without_gpu
def test_a_kernel_that_needs_a_gpu_fails_a_check_only_if_it_is_strict(tmp_path):
    selected = ["check", "relu", "-k", "eager", "-k", "compile", "--quick", "-d", "fp32"]
    done = run(*selected)
    assert (done.returncode, done.stderr.strip()) == (0, "tilewright: not checked on this machine: compile")
    assert run(*selected, "--strict").returncode == 1
    declines = tmp_path / "declines.py"
    declines.write_text("def relu(x): raise NotImplementedError")
    assert run(*selected, declines).returncode == 1  # a GPU would not help


def test_ops_shows_the_signature_to_implement():
    done = run("ops", "rms_norm")
    assert done.returncode == 0, done.stderr
    for words in ("rms_norm(x, weight, eps, weight_offset)", "def reference(x", '@tilewright.kernel("rms_norm")'):
        assert words in done.stdout
    about = json.loads(run("ops", "rms_norm", "--json").stdout)
    assert [*about["arguments"]] == ["x", "weight", "eps", "weight_offset"]
    assert_one_line(run("ops", "rms_nom"), 2, "did you mean 'rms_norm'?")


def test_fits_leaves_out_the_cases_that_a_kernel_does_not_take(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(
        textwrap.dedent("""
        import tilewright, torch

        @tilewright.kernel("relu", fits=lambda x: x.numel() % 2 == 0)
        def mine(x):
            assert x.numel() % 2 == 0
            return torch.relu(x)
        """)
    )
    done = run("check", "relu", path, "--quick", "-d", "fp32", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"]) == (0, "right"), found["reason"]
    assert any("left out: the kernel does not take such a case" in label for label in found["labels"])

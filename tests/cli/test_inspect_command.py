"""Tests of `tilewright inspect`."""

import json
import re
import shutil
from pathlib import Path

import pytest

from cli.command import assert_one_line, in_process, run
from tilewright import record, source

KERNELS = Path(__file__).parent.parent / "workbench" / "inspect_kernels.py"
SMALL = ("relu", "-k", "triton", "--case", "N=4096")


@pytest.fixture
def inspect(capsys, monkeypatch):
    """The command in this process, which has imported torch."""
    return in_process("inspect", monkeypatch, capsys)


def test_an_op_for_two_gpus_as_json():
    done = run("inspect", *SMALL, "--gpu", "h200,mi300x", "--json")
    assert done.returncode == 0, done.stderr
    nvidia, amd = map(json.loads, done.stdout.splitlines())
    assert (nvidia["arch"], amd["arch"]) == ("sm_90", "gfx942")
    assert nvidia["bytes_per_load"] == 16
    assert nvidia["registers"] > 0
    assert nvidia["spills"] == 0
    assert set(nvidia["instructions"]) >= {"global load", "global store", "branch"}
    assert 0 < nvidia["idle"] < 1
    assert nvidia["roofline"]["intensity"] < nvidia["roofline"]["ridge"]


def test_a_table_and_code_beside_its_source(inspect):
    done = inspect(*SMALL)
    assert done.returncode == 0, done.stderr
    for words in ("registers", "global load", "below the ridge"):
        assert words in done.stdout
    done = inspect(*SMALL, "--sass", "--ttgir")
    assert "LDG" in done.stdout
    assert any("│" in line and "tl.load(" in line.rpartition("│")[2] for line in done.stdout.splitlines())


def words_of(done):
    return " ".join(done.stdout.split())


def test_minimum_work(inspect):
    output = words_of(inspect("softmax", "-k", "triton"))
    assert "8.2 KB and 10.2 KFLOP per program; 0.25 FLOP/byte" in output
    output = words_of(inspect("sum", "-k", "triton"))
    assert output.count("The call on h200: at least 536.9 MB and 268.4 MFLOP for all launches together") == 1
    assert "The backward call on h200" in words_of(inspect("linear", "-k", "triton", "--direction", "backward"))
    assert "and no FLOP per program; memory-bound." in words_of(inspect("transpose", "-k", "triton"))
    assert "a file does not define its cost" in words_of(inspect(KERNELS, "-f", "copy", "-i", "64:fp32"))


def test_a_failed_compilation_does_not_stop_other_gpus(inspect):
    done = inspect(KERNELS, "-f", "for_nvidia", "-i", "128:fp32", "--gpu", "mi300x,h200")
    assert done.returncode == 1, done.stderr
    assert "does not compile for gfx942" in done.stdout
    assert f"{KERNELS.name}, line" in done.stdout.replace("\n", "")
    assert "_warps_of_32  h200" in done.stdout
    done = inspect(KERNELS, "-f", "from_hopper_on", "-i", "8x128:fp32", "--gpu", "a100,h200")
    assert done.returncode == 1, done.stderr
    assert "does not compile for sm_80: Cannot select" in done.stdout
    assert "_from_hopper_on  h200" in done.stdout


def test_a_replacement_of_cuda_is_reported(inspect):
    done = inspect("softmax", "-k", "cuda", "--gpu", "mi300x")
    assert done.returncode == 0, done.stderr
    assert "CUDA C++ does not run on mi300x; the call launches this kernel instead." in done.stdout
    assert "does not run" not in inspect("softmax", "-k", "cuda", "--gpu", "h200").stdout
    assert (
        "does not compile for gfx942: CUDA C++ compiles for NVIDIA GPUs only"
        in inspect("add", "-k", "cuda", "--gpu", "mi300x").stdout
    )


def test_the_stack_column_appears_if_a_kernel_uses_the_stack(inspect):
    def columns(name):
        done = inspect(KERNELS, "-f", name, "-i", "1024:fp32")
        header, row = (re.split(r" {2,}", line) for line in done.stdout.splitlines()[1:3])
        return dict(zip(header, row, strict=False))

    assert columns("sines")["spilled"] == "0"
    assert columns("sines")["stack"] == "32 B"
    assert "stack" not in columns("copy")


def last_line(done) -> str:
    return done.stdout.splitlines()[-1]


def test_the_next_command_repeats_the_arguments(inspect, tmp_path):
    inspected = f"tilewright inspect {KERNELS}"
    done = inspect(KERNELS, "-f", "copy", "-i", "4096:fp16", "--gpu", "h200,mi300x")
    others = "--sass  (or --ttgir, --llir, --ptx)"
    assert last_line(done) == f"Next: {inspected} -f copy -i 4096:fp16 --gpu h200,mi300x {others}"
    done = inspect(KERNELS, "-f", "mistaken", "-i", "128:fp32")
    assert "Next:" not in done.stdout


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_a_cuda_file_has_no_triton_ir(inspect, tmp_path):
    file = tmp_path / "my file.cu"
    file.write_text("__global__ void one(float* x) { x[0] = 1; }\n")
    assert last_line(inspect(file)) == f"Next: tilewright inspect '{file}' --sass  (or --ptx)"
    file.write_text("int one() { return 1; }\n")
    assert_one_line(inspect(file), 2, "contains no kernel; declare one with __global__")


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_select_a_kernel_of_a_cuda_file(inspect, tmp_path):
    file = tmp_path / "some.cu"
    file.write_text(
        "namespace { __global__ void first(float* x) { x[0] = 1; } }\n"
        "__global__ void second(float* x) { x[0] = 1; }\n"
        "template <class T> __global__ void third(T* x) { x[0] = 1; }\n"
        "template __global__ void third<float>(float*);\n"
        "template __global__ void third<int>(int*);\n"
        "void use() { first<<<1, 1>>>(nullptr); }\n"
    )

    def names(*args):
        return [json.loads(line)["kernel"] for line in inspect(file, *args, "--json").stdout.splitlines()]

    assert names() == ["(anonymous namespace)::first", "second", "third<float>", "third<int>"]
    assert names("-f", "first") == ["(anonymous namespace)::first"]
    assert names("-f", "second") == ["second"]
    assert names("-f", "third") == ["third<float>", "third<int>"]
    assert names("-f", "third<int>") == ["third<int>"]
    assert_one_line(inspect(file, "-f", "secnd"), 2, "some.cu has no function named 'secnd'; did you mean 'second'?")
    assert_one_line(inspect(file, "-f", "second", "--ttgir"), 2, "second has no ttgir; it has ptx, sass")


def test_a_file_cannot_exit_the_process(inspect, tmp_path):
    file = tmp_path / "leaves.py"
    file.write_text("import os\ndef f():\n    os._exit(0)\n")
    assert_one_line(inspect(file), 2, "f fails before it launches", "it calls os._exit(0)")
    file.write_text(
        "import os\nif not (child := os.fork()):\n    os._exit(7)\nassert os.waitpid(child, 0)[1] >> 8 == 7\n"
    )
    assert_one_line(inspect(file), 2, "define one that launches the kernels")
    file.write_text("import os\nos._exit(0)\n")
    assert_one_line(inspect(file), 2, "leaves.py, line 2", "it calls os._exit(0)")


def test_empty_and_invalid_grids(inspect):
    call = (KERNELS, "-f", "copy_on_grid", "-i", "1024:fp32", "-i")
    done = inspect(*call, "0")
    assert done.returncode == 0, done.stderr
    assert "_copy on h200: the grid is empty; nothing is launched." in done.stdout
    assert "_copy   h200     0" in done.stdout
    done = inspect(*call, "1", "-i", "70000")
    assert done.returncode == 1, done.stderr
    assert "cannot be launched: 70000 blocks in grid dimension y" in done.stdout
    assert "1x70000" in done.stdout


def test_diff(inspect):
    done = inspect("relu", "--case", "N=4096", "--diff", "triton", "triton:num_warps=8")
    assert done.returncode == 0, done.stderr
    assert any(line.split() == ["num_warps", "4", "8"] for line in done.stdout.splitlines()), done.stdout
    assert "relu, N=4096 bfloat16, h200: differences" in done.stdout


def test_diff_with_a_kernel_in_a_file(inspect, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(KERNELS.read_text() + "relu = copy\n")
    done = inspect("relu", file, "--case", "N=4096", "--diff", "triton", "mine.py", "--sass")
    assert done.returncode == 0, done.stderr
    assert any(line.split()[:1] == ["registers"] for line in done.stdout.splitlines()), done.stdout
    assert "\n--- triton\n+++ mine.py\n" in done.stdout
    done = inspect("relu", file, "--diff", "triton", "mine")
    assert_one_line(done, 2, "relu has no kernel named 'mine'; did you mean 'mine.py'?")


def test_mistakes_are_one_line(inspect, tmp_path):
    assert_one_line(inspect("relu", "--gpu", "h200,h20"), 2, "did you mean 'h200'?")
    assert_one_line(inspect(KERNELS, "-f", "of_values", "-i", "9x9"), 2, "launched no Triton or CUDA C++ kernel")
    assert_one_line(inspect(tmp_path / "no.cu"), 2, "no file at")
    assert_one_line(inspect("relu", "-k", "triton", "-k", "eager"), 2, "eager of relu is part of torch")
    assert_one_line(inspect("add", "-k", "numba"), 2, "numba of add is compiled by Numba")
    assert_one_line(inspect("relu", "-k", "compile-max"), 2, "the result of an autotuning search on the GPU")
    assert_one_line(inspect("argmax", "--direction", "backward"), 2, "argmax has no gradient")
    assert_one_line(inspect("relu", "--diff", "triton", "triton:BLOK=8"), 2, "did you mean 'BLOCK")
    assert_one_line(inspect(KERNELS, "-k", "triton"), 2, "only for an OP")
    assert_one_line(inspect("relu", "--direction", "up"), 2, "not one of forward, backward, both")
    assert_one_line(inspect(KERNELS, "-f", "copy"), 2, "copy(x) cannot be called", "'x'", "with --input")
    assert_one_line(inspect(tmp_path, "-i", "8:fp32"), 2, "is a directory; name a .py or .cu file in it")
    (tmp_path / "x.ptx").touch()
    assert_one_line(inspect(tmp_path / "x.ptx"), 2, "neither an operation nor a .py or .cu file")
    assert_one_line(inspect("relu", "--gpu", "sm_90a"), 2, "GPUs of this architecture are: h100-sxm, h100-pcie, h200")
    assert_one_line(inspect("relu", "--gpu", "GFX942"), 2, "GPUs of this architecture are: mi300x")


def test_a_file_that_launches_nothing(inspect, tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("def launch(x):\n    return x + 1\n")
    assert_one_line(
        inspect(file, "-i", "64:fp32"), 2, "launched no Triton or CUDA C++ kernel; try another --function or --input"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("relu", "--threads", "256"), "--threads: only for a .cu FILE"),
        ((KERNELS, "-f", "copy", "-i", "64:fp32", "--shared", "1"), "--shared: only for a .cu FILE"),
        (
            (KERNELS, "-f", "copy", "-i", "64:fp32", "--direction", "backward"),
            "--direction: only for an OP; a .py FILE takes",
        ),
        (("x.cu", "-i", "64:fp32"), "--input: only for a .py FILE"),
        (("x.cu", "-k", "one"), "--kernel: only for an OP; a .cu FILE takes --function"),
        ((*SMALL, "--json", "--sass"), "--sass: not with --json"),
        ((*SMALL, "--diff", "triton", "cuda"), "--kernel: not with --diff"),
        (("relu", "-c", "N=64", "-c", "N=128", "--diff", "triton", "cuda"), "--diff compares one call"),
        (("--everywhere", "--gpu", "h200", "--sass"), "--gpu, --sass: not with --everywhere"),
    ],
)
def test_options_without_effect_are_refused(inspect, args, words):
    assert_one_line(inspect(*args), 2, words)


def test_a_repeated_gpu_is_shown_once(inspect):
    done = inspect(*SMALL, "--gpu", "h200,H200", "--json")
    assert len(done.stdout.splitlines()) == 1, done.stderr


def test_everywhere_is_recorded(inspect, monkeypatch, tmp_path):
    only = {"dot": source.op_files()["dot"]}
    monkeypatch.setattr("tilewright.source.op_files", lambda: only)
    monkeypatch.setattr("tilewright.workbench.inspect.portability.TARGETS", ("a100-80gb", "mi300x"))
    path = tmp_path / "r.jsonl"
    done = inspect("--everywhere", "--record", path)
    assert done.returncode == 0, done.stderr
    assert "3 kernels, 2 GPUs: 6 fit, 0 do not." in done.stdout
    found = {r["kernel"]: r for r in record.read(path).records}
    assert set(found) == {"_dot_chunk", "_dot_bwd", "_combine_parts"}
    assert found["_dot_chunk"]["gpus"].keys() == {"a100-80gb", "mi300x"}
    assert found["_dot_chunk"]["gpus"]["a100-80gb"]["spills"] == 0
    assert not any(map(record.is_stale, found.values()))


@pytest.mark.parametrize(
    "args", [(), ("dot", "--everywhere"), ("--everywhere", "-k", "triton"), ("dot", "--record", "x")]
)
def test_everywhere_covers_all_operations(inspect, args):
    done = inspect(*args)
    assert done.returncode == 2
    assert "--everywhere" in done.stderr

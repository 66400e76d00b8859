"""`tilewright inspect` as a user types it."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.command import assert_one_line, run
from tilewright import record, source
from tilewright.cli import main

KERNELS = Path(__file__).parent.parent / "workbench" / "inspected.py"
SMALL = ("relu", "-k", "triton", "--case", "N=4096")


@pytest.fixture
def inspect(capsys, monkeypatch):
    """The command in this process, where torch is loaded."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["tilewright", "inspect", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code, stdout=said.out, stderr=said.err)

    return call


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
    assert nvidia["work"]["intensity"] < nvidia["work"]["ridge"]


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


def test_the_least_work_is_said_or_why_it_is_not(inspect):
    said = words_of(inspect("softmax", "-k", "triton"))
    assert "8.2 KB and 10.2 K operations a program; 0.25 operations a byte" in said
    said = words_of(inspect("sum", "-k", "triton"))
    assert said.count("The call on h200: at least 536.9 MB and 268.4 M operations, of which the share") == 1
    assert "The backward call on h200" in words_of(inspect("linear", "-k", "triton", "--direction", "backward"))
    assert "and no operations a program; memory binds." in words_of(inspect("transpose", "-k", "triton"))
    assert "a file does not say what it computes" in words_of(inspect(KERNELS, "-f", "copy", "-i", "64:fp32"))


def test_other_gpus_go_on_where_one_compiler_refuses(inspect):
    done = inspect(KERNELS, "-f", "for_nvidia", "-i", "128:fp32", "--gpu", "mi300x,h200")
    assert done.returncode == 1, done.stderr
    assert "does not compile for gfx942" in done.stdout
    assert f"{KERNELS.name}, line" in done.stdout.replace("\n", "")
    assert "_warps_of_32  h200" in done.stdout
    done = inspect(KERNELS, "-f", "from_hopper_on", "-i", "8x128:fp32", "--gpu", "a100,h200")
    assert done.returncode == 1, done.stderr
    assert "does not compile for sm_80: Cannot select" in done.stdout
    assert "_from_hopper_on  h200" in done.stdout


def test_what_runs_instead_of_cuda_is_said(inspect):
    done = inspect("softmax", "-k", "cuda", "--gpu", "mi300x")
    assert done.returncode == 0, done.stderr
    assert "CUDA C++ does not run on mi300x; this is what a call launches there instead." in done.stdout
    assert "does not run" not in inspect("softmax", "-k", "cuda", "--gpu", "h200").stdout
    assert "does not compile for gfx942: CUDA C++ is NVIDIA's" in inspect("add", "-k", "cuda", "--gpu", "mi300x").stdout


def test_a_stack_is_shown_where_there_is_one(inspect):
    def columns(name):
        done = inspect(KERNELS, "-f", name, "-i", "1024:fp32")
        header, row = (re.split(r" {2,}", line) for line in done.stdout.splitlines()[1:3])
        return dict(zip(header, row, strict=False))

    assert columns("sines")["spilled"] == "0"
    assert columns("sines")["stack"] == "32 B"
    assert "stack" not in columns("copy")


def last_line(done) -> str:
    return done.stdout.splitlines()[-1]


def test_the_next_command_repeats_what_was_given(inspect, tmp_path):
    inspected = f"tilewright inspect {KERNELS}"
    done = inspect(KERNELS, "-f", "copy", "-i", "4096:fp16", "--gpu", "h200,mi300x")
    others = "--sass  (or --ttgir, --llir, --ptx)"
    assert last_line(done) == f"Next: {inspected} -f copy -i 4096:fp16 --gpu h200,mi300x {others}"
    done = inspect(KERNELS, "-f", "mistaken", "-i", "128:fp32")
    assert "Next:" not in done.stdout


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_a_cuda_file_has_no_code_of_triton(inspect, tmp_path):
    file = tmp_path / "my file.cu"
    file.write_text("__global__ void one(float* x) { x[0] = 1; }\n")
    assert last_line(inspect(file)) == f"Next: tilewright inspect '{file}' --sass  (or --ptx)"
    file.write_text("int one() { return 1; }\n")
    assert_one_line(inspect(file), 2, "compiles to no kernel; mark one with __global__")


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_a_kernel_of_a_cuda_file_by_its_name(inspect, tmp_path):
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


def test_a_file_cannot_end_the_process(inspect, tmp_path):
    file = tmp_path / "leaves.py"
    file.write_text("import os\ndef f():\n    os._exit(0)\n")
    assert_one_line(inspect(file), 2, "f fails before it launches", "it ends the process by os._exit(0)")
    file.write_text(
        "import os\nif not (child := os.fork()):\n    os._exit(7)\nassert os.waitpid(child, 0)[1] >> 8 == 7\n"
    )
    assert_one_line(inspect(file), 2, "define one that launches the kernels")
    file.write_text("import os\nos._exit(0)\n")
    assert_one_line(inspect(file), 2, "leaves.py, line 2", "it ends the process by os._exit(0)")


def test_a_grid_is_shown_as_it_is(inspect):
    call = (KERNELS, "-f", "copy_on_grid", "-i", "1024:fp32", "-i")
    done = inspect(*call, "0")
    assert done.returncode == 0, done.stderr
    assert "_copy on h200: its grid is empty, so nothing is launched." in done.stdout
    assert "_copy   h200     0" in done.stdout
    done = inspect(*call, "1", "-i", "70000")
    assert done.returncode == 1, done.stderr
    assert "cannot be launched: a grid with 70000 blocks in y" in done.stdout
    assert "1x70000" in done.stdout


def test_a_difference(inspect):
    done = inspect("relu", "--case", "N=4096", "--diff", "triton", "triton:num_warps=8")
    assert done.returncode == 0, done.stderr
    assert any(line.split() == ["num_warps", "4", "8"] for line in done.stdout.splitlines()), done.stdout
    assert "relu, N=4096 bfloat16, h200: what differs" in done.stdout


def test_a_kernel_of_the_operation_and_one_of_a_file_differ(inspect, tmp_path):
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
    assert_one_line(inspect(KERNELS, "-f", "of_values", "-i", "9x9"), 2, "of_values fails before it launches")
    assert_one_line(inspect(tmp_path / "no.cu"), 2, "no file at")
    assert_one_line(inspect("relu", "-k", "triton", "-k", "eager"), 2, "eager of relu is torch's own")
    assert_one_line(inspect("add", "-k", "numba"), 2, "numba of add is compiled by numba")
    assert_one_line(inspect("relu", "-k", "compile-max"), 2, "found by a search on the GPU")
    assert_one_line(inspect("argmax", "--direction", "backward"), 2, "argmax has no gradient")
    assert_one_line(inspect("relu", "--diff", "triton", "triton:BLOK=8"), 2, "did you mean 'BLOCK")
    assert_one_line(inspect(KERNELS, "-k", "triton"), 2, "for an OP")
    assert_one_line(inspect("relu", "--direction", "up"), 2, "none of forward, backward, both")
    assert_one_line(inspect(KERNELS, "-f", "copy"), 2, "copy(x) cannot be called", "'x'", "with --input")
    assert_one_line(inspect(tmp_path, "-i", "8:fp32"), 2, "is a directory; name a .py or .cu file in it")
    (tmp_path / "x.ptx").touch()
    assert_one_line(inspect(tmp_path / "x.ptx"), 2, "neither an operation nor a .py or .cu file")
    assert_one_line(inspect("relu", "--gpu", "sm_90a"), 2, "GPUs of this architecture are: h100-sxm, h100-pcie, h200")
    assert_one_line(inspect("relu", "--gpu", "GFX942"), 2, "GPUs of this architecture are: mi300x")


def test_a_file_that_launches_nothing_is_told_of_its_own_options(inspect, tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("def launch(x):\n    return x + 1\n")
    assert_one_line(inspect(file, "-i", "64:fp32"), 2, "launched; try another --function or --input")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("relu", "--threads", "256"), "--threads: for a .cu FILE"),
        ((KERNELS, "-f", "copy", "-i", "64:fp32", "--shared", "1"), "--shared: for a .cu FILE"),
        ((KERNELS, "-f", "copy", "-i", "64:fp32", "--direction", "backward"), "--direction: for an OP; a .py FILE has"),
        (("x.cu", "-i", "64:fp32"), "--input: for a .py FILE"),
        (("x.cu", "-k", "one"), "--kernel: for an OP; a .cu FILE has --function"),
        ((*SMALL, "--json", "--sass"), "--sass: not with --json"),
        ((*SMALL, "--diff", "triton", "cuda"), "--kernel: not with --diff"),
        (("relu", "-c", "N=64", "-c", "N=128", "--diff", "triton", "cuda"), "--diff is of one call"),
        (("--everywhere", "--gpu", "h200", "--sass"), "--gpu, --sass: not with --everywhere"),
    ],
)
def test_what_would_not_be_heeded_is_refused(inspect, args, words):
    assert_one_line(inspect(*args), 2, words)


def test_a_gpu_named_twice_is_shown_once(inspect):
    done = inspect(*SMALL, "--gpu", "h200,H200", "--json")
    assert len(done.stdout.splitlines()) == 1, done.stderr


def test_every_kernel_everywhere_is_recorded(inspect, monkeypatch, tmp_path):
    only = {"dot": source.op_files()["dot"]}
    monkeypatch.setattr("tilewright.source.op_files", lambda: only)
    monkeypatch.setattr("tilewright.workbench.inspect.portability.TARGETS", ("a100-80gb", "mi300x"))
    path = tmp_path / "r.jsonl"
    done = inspect("--everywhere", "--record", path)
    assert done.returncode == 0, done.stderr
    assert "kernels for 2 GPUs: 6 fit, 0 do not." in done.stdout
    found = {r["kernel"]: r for r in record.read(path).records}
    assert set(found) == {"_dot_chunk", "_dot_bwd", "_reduce_pieces"}
    assert found["_dot_chunk"]["gpus"].keys() == {"a100-80gb", "mi300x"}
    assert found["_dot_chunk"]["gpus"]["a100-80gb"]["spills"] == 0
    assert not any(map(record.is_stale, found.values()))


@pytest.mark.parametrize(
    "args", [(), ("dot", "--everywhere"), ("--everywhere", "-k", "triton"), ("dot", "--record", "x")]
)
def test_everywhere_is_of_all_operations(inspect, args):
    done = inspect(*args)
    assert done.returncode == 2
    assert "--everywhere" in done.stderr

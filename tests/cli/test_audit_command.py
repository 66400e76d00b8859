"""Tests of `tilewright audit`."""

import json
from pathlib import Path

import pytest

from cli.command import assert_one_line, run

KERNELS = Path(__file__).parent.parent / "interpreter" / "kernels.py"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SMALL = ("--case", "M=3,N=500")


@pytest.mark.slow
def test_an_op_shows_the_traffic_of_its_kernels():
    done = run("audit", "softmax", *SMALL)
    assert done.returncode == 0, done.stderr
    for words in ("triton-three-pass", "Moves 2.00x", "`x_ptr` is read 3 times", "Moves 1.50x", "Moves 1.00x"):
        assert words in done.stdout
    assert "Next: tilewright audit softmax --case M=3,N=500 --html audit.html" in done.stdout


@pytest.mark.slow
def test_json_and_records_agree(tmp_path):
    path = tmp_path / "audit.jsonl"
    done = run("audit", "softmax", "-k", "triton", *SMALL, "--json", "--record", path)
    printed, recorded = json.loads(done.stdout), json.loads(path.read_text())
    assert printed["moved"] == recorded["moved"] == 4 * 3 * 500
    assert recorded["kind"] == "audit"
    assert recorded["call"]["case"] == {"M": 3, "N": 500}
    assert recorded["source"]


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [("transpose.py", "70x90:bf16"), ("rms_norm.py", "70x90:bf16", "90:fp32")])
def test_examples(inputs):
    file, *given = inputs
    done = run("audit", EXAMPLES / file, *(word for text in given for word in ("--input", text)))
    assert done.returncode == 0, done.stderr
    assert "loaded" in done.stdout


def test_a_kernel_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from tilewright.registry import load\n\nsoftmax = load('softmax').kernels['triton-online'].fn\n")
    done = run("audit", "softmax", file, *SMALL)
    assert "Moves 1.50x" in done.stdout, done.stdout + done.stderr


def test_an_invalid_access_is_reported_and_exits_with_1(tmp_path):
    page = tmp_path / "page.html"
    done = run("audit", KERNELS, "-f", "copy_too_much", "-i", "100:fp32", "--html", page)
    assert done.returncode == 1
    assert "out of bounds in _copy_too_much, program (1, 0, 0)" in done.stdout
    assert "out of bounds" in page.read_text()


def test_an_aborted_kernel_is_one_line(tmp_path):
    done = run("audit", KERNELS, "-f", "assembly", "-i", "64:fp32")
    assert done.returncode == 1
    assert "uses tl.inline_asm_elementwise, which the interpreter cannot run" in done.stdout
    done = run("audit", KERNELS, "-f", "endless_loop", "-i", "1:int32", "--steps", "300")
    assert done.returncode == 1
    assert "still running after" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_case_that_is_too_large_is_refused_with_a_smaller_one():
    done = run("audit", "softmax", "-k", "triton-online", "--case", "M=1000000,N=8192")
    assert_one_line(done, 2, "try --case M=")
    fitting = done.stderr.partition("try --case ")[2].split()[0]
    assert (
        run("audit", "softmax", "-k", "triton-online", "--case", fitting, "--steps", "1").stdout.count("too many") == 0
    )


@pytest.mark.slow
def test_mistakes_are_one_line(tmp_path):
    assert_one_line(run("audit", "softmaks"), 2, "did you mean 'softmax'?")
    assert_one_line(run("audit", tmp_path / "no.py"), 2, "no file at")
    assert_one_line(run("audit", KERNELS), 2, "--function")
    assert_one_line(run("audit", KERNELS, "-f", "copi"), 2, "did you mean 'copy'?")
    assert_one_line(run("audit", KERNELS, "-f", "copy", "-i", "3xb"), 2, "is not a shape")
    assert_one_line(run("audit", "softmax", "--gpu", "h20"), 2, "did you mean 'h200'?")
    assert_one_line(run("audit", "softmax", "--measure"), 2, "needs a GPU")
    assert_one_line(run("audit", "softmax", *SMALL, "-k", "triton", "--html", KERNELS / "x.html"), 2, "cannot write")
    assert_one_line(run("audit", KERNELS, "-f", "copy"), 2, "missing a required argument", "with --input")
    assert_one_line(run("audit", "kernel.cu"), 2, "tilewright inspect", "See: tilewright audit --help")
    assert_one_line(run("audit", KERNELS, "-f", "copy", "-i", "100000x100000"), 2, "too many to interpret")
    assert_one_line(run("audit", KERNELS, "-f", "copy", "-i", "9" * 30 + "x4"), 2, "too many to interpret")
    assert_one_line(run("audit", KERNELS, "-f", "copy", "-c", "M=3,N=4"), 2, "only for an OP")
    assert_one_line(run("audit", "softmax", "-i", "3x4"), 2, "only for a FILE")


def test_a_function_that_raises_exits_or_launches_nothing(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import sys, torch\n\ndef softmax(x):\n    raise ValueError('no')\n\ndef leave():\n    sys.exit(3)\n\n"
        "def plain():\n    print('noise')\n    return torch.ones(3)\n"
    )
    done = run("audit", "softmax", file, *SMALL)
    assert done.returncode == 1
    assert "mine.py fails: ValueError: no" in done.stdout
    assert "--html" not in done.stdout + done.stderr  # there is nothing to draw
    done = run("audit", file, "-f", "softmax", "-i", "100")
    assert "ValueError: no; no input is a tensor: -i 100 is a number, -i 100:fp32 a tensor" in done.stdout
    done = run("audit", file, "-f", "leave")
    assert done.returncode == 1
    assert "leave fails: SystemExit: 3" in done.stdout
    done = run("audit", file, "-f", "plain", "--json")
    assert done.returncode == 2
    assert "noise" not in done.stdout
    assert "launched no Triton kernel" in done.stderr

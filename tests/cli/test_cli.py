"""Tests of commands as a user types them: output, exit code, and one line for every mistake."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

import tilewright
from cli.command import assert_one_line, run
from sample_records import timing_record
from tilewright import cli, record, source

RIGHT = "import torch\n\ndef softmax(x):\n    return torch.softmax(x, dim=-1)\n"
MARKED = (
    "import tilewright, torch\n\n@tilewright.kernel('softmax')\ndef whatever(x):\n    return torch.softmax(x, dim=-1)\n"
)
TRITON = """
import torch, triton, triton.language as tl

@triton.jit
def _rows(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * N + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + tl.program_id(0) * N + offs, (e / tl.sum(e, axis=0)).to(y_ptr.dtype.element_ty), mask=offs < N)

def softmax(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    _rows[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
"""
ONE_CASE = ("--case", "M=3,N=50", "--dtype", "float32")


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.slow
def test_unusual_but_valid_files_are_loaded(tmp_path):
    folder = tmp_path / "with space ü"
    folder.mkdir()
    (folder / "helper_of_mine.py").write_text("import torch\nrows = lambda x: torch.softmax(x, -1)\n")
    (folder / "triton.py").write_text("raise RuntimeError('hides the real one')\n")
    path = folder / "mine.py"
    path.write_bytes(
        b"\xef\xbb\xbffrom __future__ import annotations\n"
        b"from dataclasses import dataclass\nfrom helper_of_mine import rows\n\n"
        b"@dataclass\nclass Config:\n    size: int = 1\n\n"
        b"class Softmax:\n    def __call__(self, x):\n        return rows(x)\n\nsoftmax = Softmax()\n"
    )
    done = run("check", "softmax", path, *ONE_CASE, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"'{path}'" in done.stdout, "the path in the next command is quoted"


@pytest.mark.slow
def test_a_kernel_that_changes_its_input_is_wrong(file):
    text = "import torch\ndef softmax(x):\n    y = torch.softmax(x, -1)\n    x.data.zero_()\n    return y\n"
    done = run("check", "softmax", file(text), *ONE_CASE)
    assert done.returncode == 1
    assert "its argument 1 was changed" in done.stdout


@pytest.mark.parametrize("name", ["mine.txt", "mine"])
def test_a_file_without_py_suffix_is_one_line(file, name):
    assert_one_line(run("check", "softmax", file(RIGHT, name), *ONE_CASE), 2, "does not end in .py")


def test_two_files_with_one_name_are_refused(file, tmp_path):
    (tmp_path / "other").mkdir()
    assert_one_line(
        run("check", "softmax", file(RIGHT), file(RIGHT, "other/mine.py")), 2, "two files are named 'mine.py'"
    )


def test_a_closed_pipe_is_not_a_failure():
    done = subprocess.run(
        f"{sys.executable} -m tilewright ops --json | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


COMMANDS = [command.name or command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands]
COMMANDS += ["kernels build", "records", "records list", "records verify"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(monkeypatch, capsys, command):
    """Every option has a help text that is a sentence."""
    monkeypatch.setattr(sys, "argv", ["tilewright", *command.split(), "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = capsys.readouterr().out
    assert end.value.code == 0
    assert printed.startswith(f"Usage: tilewright {command}".strip())
    options = printed.partition("Options:\n")[2].partition("\nCommands:")[0]
    for entry in re.split(r"\n  (?=-)", f"\n{options}")[1:]:
        text = re.sub(r"\[.*?\]", "", " ".join(entry.split())).strip()
        assert text.endswith("."), f"{entry} has no help"


def test_help_is_fast():
    """It imports none of the modules that take long."""
    code = "import sys; sys.argv = ['tilewright', 'bench', '--help']; from tilewright import cli\ntry: cli.main()\n"
    code += "finally: print('imported', *sorted({'torch', 'triton', 'numpy', 'rich', 'pynvml'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported"


def test_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tilewright", "--version"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, capsys.readouterr().out) == (0, f"tilewright {tilewright.__version__}\n")


def test_ops_lists_every_op_with_its_kernels():
    lines = [json.loads(line) for line in run("ops", "--json").stdout.splitlines()]
    assert [line["op"] for line in lines] == list(source.op_files())
    assert all({"eager", "compile", "triton"} <= set(line["kernels"]) for line in lines)
    assert "y[n, m] = x[m, n]" in run("ops").stdout, "brackets are not markup"


def test_gpu():
    sheet = json.loads(run("gpu", "h200", "--json").stdout)
    assert sheet["sms"] == 132
    shown = run("gpu", "h200").stdout
    for words in ("memory bandwidth         4.80 TB/s", "memory                   141 GB", "66.9 TFLOP/s"):
        assert " ".join(words.split()) in " ".join(shown.split())
    assert run("gpu").returncode == 0
    assert_one_line(run("gpu", "h2000"), 2, "did you mean 'h200'")


@pytest.mark.parametrize("text", [RIGHT, MARKED, TRITON], ids=["named", "marked", "triton"])
def test_a_correct_file_is_right(file, text):
    done = run("check", "softmax", file(text), *ONE_CASE, "--json")
    assert done.returncode == 0, done.stderr
    (verdict,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (verdict["op"], verdict["kernel"], verdict["verdict"]) == ("softmax", "mine.py", "right")
    assert verdict["cases"][0]["case"] == "M=3,N=50"


def test_a_wrong_file_is_wrong_with_evidence(file):
    done = run("check", "softmax", file("import torch\ndef softmax(x): return torch.zeros_like(x)\n"), *ONE_CASE)
    assert done.returncode == 1
    assert "wrong" in done.stdout
    assert "expected" in done.stdout
    assert done.stderr == ""


def test_a_crash_is_a_verdict_and_the_next_file_is_checked(file):
    dying = file("import os\ndef softmax(x): os._exit(0)\n", "dying.py")
    done = run("check", "softmax", dying, file(RIGHT), *ONE_CASE, "--json")
    verdicts = {v["kernel"]: v["verdict"] for v in map(json.loads, done.stdout.splitlines())}
    assert verdicts == {"dying.py": "crashed", "mine.py": "right"}
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def softmax(x:\n", ("line 1", "syntax error")),
        ("x = 1\n", ("define a function named 'softmax'", '@tilewright.kernel("softmax")')),
        ("def softmax(): pass\n", ("too many positional arguments", "softmax(x)")),
        ("def softmax(x, y): pass\n", ("missing a required argument: 'y'", "softmax(x)")),
        ("import torch\n\nimport no_such_package\n", ("needs the package 'no_such_package'", "install it")),
        ("\0", ()),
        ("raise ValueError('one\\ntwo')\n", ("line 1", "ValueError: one")),
        ("import sys\nsys.exit('bye')\n", ("line 2", "SystemExit: bye")),
        (MARKED + MARKED.replace("whatever", "other"), ("2 functions are marked",)),
    ],
)
def test_an_invalid_file_is_one_line(file, text, words):
    assert_one_line(run("check", "softmax", file(text), *ONE_CASE), 2, "mine.py", *words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("check sofmax", ("did you mean 'softmax'",)),
        ("check softmax -k tritn", ("did you mean 'triton'",)),
        ("check softmax missing.py", ("no file at 'missing.py'",)),
        ("check softmax /", ("'/' is a folder", "a Python file with a kernel")),
        ("check softmax --dtype float23", ("did you mean 'float32'",)),
        ("check softmax --case M=3", ("N is missing", "--case M=")),
        ("check softmax --case M=3,N=2,M=4", ("M is given twice",)),
        ("check softmax --case M=1000000,N=1000000", ("1000000000000 elements",)),
        ("check gelu --case N=10,approximate=foo", ("gelu does not accept it",)),
        ("check attention --case B=1,H=3,HKV=2,LQ=4,LK=4,D=8,causal=true", ("attention does not accept it",)),
        ("check softmax --seed -1", ("--seed",)),
        ("check softmax a/k.py a/k.py", ("no file at 'a/k.py'",)),
        ("gpu h200 --measure", ("leave out the name",)),
        ("bench softmax --direction up", ("forward, backward, both",)),
        ("bench softmax --samples 1", ("--samples",)),
        ("bench softmax --record /", ("cannot write '/'",)),
        ("never", ("never", "See: tilewright --help")),
        ("records never", ("no operation named 'never'",)),
        ("records verify --update --sample 3", ("--update needs all records", "See: tilewright records verify --help")),
        ("records --gpu b200", ("no records of 'b200'; there are records of cpu, h200",)),
        ("report missing.jsonl", ("no file at 'missing.jsonl'", "a file of records")),
        ("report --fill missing.md", ("no file at 'missing.md'",)),
        ("report --out /proc/site", ("cannot write '/proc/site",)),
    ],
)
def test_every_mistake_is_one_line_and_code_2(command, words):
    assert_one_line(run(*command.split()), 2, *words)


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "results" / "h200" / "softmax.jsonl"
    record.append(path, [timing_record("eager", 200.0), timing_record("triton", 80.0)])
    return path


without_gpu = pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="for machines without a GPU")


@pytest.mark.slow
@without_gpu
def test_a_kernel_that_cannot_run_here_is_not_a_success(file, tmp_path):
    assert_one_line(
        run("check", "softmax", "-k", "cuda"), 2, "no kernel could be checked on this machine: cuda needs a GPU"
    )
    assert_one_line(run("gpu", "--measure"), 2, "needs a GPU")
    done = run("bench", "softmax", "-k", "compile", "--record", tmp_path / "r.jsonl")
    assert "nothing was timed, so nothing was written" in done.stderr
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.slow
@without_gpu
def test_a_missing_package_is_not_a_success(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError\n")
    done = run(
        "check",
        "add",
        "-k",
        "numba",
        "--case",
        "N=2",
        "-d",
        "fp32",
        PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}",
    )
    assert_one_line(done, 2, "pip install numba-cuda")


@without_gpu
def test_bench_without_a_gpu_checks_and_shows_records(recorded):
    done = run("bench", "softmax", "-k", "eager", *ONE_CASE, TILEWRIGHT_RESULTS=str(recorded.parent.parent))
    assert done.returncode == 0, done.stderr
    assert "No GPU found" in done.stdout
    assert "recorded on NVIDIA H200" in done.stdout
    assert " 200 " in done.stdout
    assert " 80.0 " not in done.stdout, "the time of a kernel that was not selected"
    assert "stale" not in done.stdout


@pytest.mark.slow
@without_gpu
def test_stale_timings_are_marked_and_broken_lines_are_reported(recorded):
    record.append(recorded, [timing_record("eager", 170.0) | {"source": "0" * 16}])
    with recorded.open("a") as out:
        out.write('{"cut": "of\n')
        out.write("not a record\n")
    done = run("bench", "softmax", "-k", "eager", *ONE_CASE, TILEWRIGHT_RESULTS=str(recorded.parent.parent))
    assert done.returncode == 2
    assert " 170 " in done.stdout
    assert "right, stale" in done.stdout
    first, second = done.stderr.strip().splitlines()
    assert "line 4 is incomplete" in first
    assert "line 5 is not a record" in second


def test_report_updates_the_tables_of_a_page(recorded, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Softmax\n<!-- records: softmax forward -->\nplaceholder\n<!-- end -->\nafter\n")
    done = run("report", "--fill", page, TILEWRIGHT_RESULTS=str(recorded.parent.parent))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "placeholder" not in text
    assert "| M=3,N=50 float32 | 200 | **80.0** |" in text
    assert "NVIDIA H200" in text
    assert text.endswith("after\n")
    done = run("report", "--fill", page, "--json", TILEWRIGHT_RESULTS=str(recorded.parent.parent))
    assert json.loads(done.stdout) == {"file": str(page), "changed": False}


def test_report_lists_the_files_of_the_site(recorded, tmp_path):
    done = run("report", recorded, "--out", tmp_path / "site", "--json")
    assert done.returncode == 0, done.stderr
    files = {line["file"]: line["bytes"] for line in map(json.loads, done.stdout.splitlines())}
    index = tmp_path / "site" / "index.html"
    assert files[str(index)] == index.stat().st_size


def test_an_unexpected_error_is_one_line(monkeypatch, capsys):
    def broken():
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(source, "op_files", broken)
    monkeypatch.setattr(sys, "argv", ["tilewright", "ops"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 3
    assert capsys.readouterr().err.splitlines() == [
        "tilewright: unexpected RuntimeError: first line; set TILEWRIGHT_DEBUG=1 for the traceback"
    ]


def test_options_whose_metavar_is_their_name_are_spelled_out():
    """Typer 0.27.0 drops such an option if its flag is derived from the parameter."""
    found = 0
    for path in (source.PACKAGE / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg | ast.AnnAssign | ast.Assign) and (call := _option(node)):
                name = node.arg if isinstance(node, ast.arg) else "direction"  # the alias in options.py
                metavar = next((k.value for k in call.keywords if k.arg == "metavar"), None)
                if isinstance(metavar, ast.Constant) and metavar.value == name.upper():
                    found += 1
                    assert call.args, f"{path.name}: pass --{name} to typer.Option"
    assert found


def _option(node: ast.arg | ast.AnnAssign | ast.Assign) -> ast.Call | None:
    """Return the `typer.Option(...)` in the annotation of a parameter, or in the value of an alias."""
    about = node.value if isinstance(node, ast.Assign) else node.annotation
    calls = (one for one in ast.walk(about or ast.Pass()) if isinstance(one, ast.Call))
    return next((one for one in calls if ast.unparse(one.func) == "typer.Option"), None)

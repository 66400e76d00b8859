"""Whatever the generator does is one line, and costs no more than its time limit."""

import sys
import time

import pytest

from tilewright.agents import generator
from tilewright.agents.generator import extract_code, generate, parse_command
from tilewright.errors import GeneratorNotFound

CODE = "def softmax(x):\n    return x.softmax(-1)\n"


def program(text):
    return [sys.executable, "-c", text]


@pytest.mark.parametrize(
    "text",
    [
        CODE,
        f"```python\n{CODE}```",
        f"Here is the kernel:\n\n```python\n{CODE}```\n\nIt fuses the passes.",
        f"~~~\n```py title='x'\n{CODE}```",
        f"First try:\n```python\ndef (\n```\nBetter:\n```\n{CODE}```",
        f"```console\n$ pip install triton\n```\n```python\n{CODE}```\n```text\nnotes\n```",
        f"  ```python\n{CODE}",
        f"```python\r\n{CODE}```",
    ],
)
def test_the_kernel_is_found_in_prose(text):
    assert extract_code(text).strip() == CODE.strip()


@pytest.mark.parametrize("text", ["", "\n \n", "I cannot write this kernel.", "# only a comment", "a\0b", "```\n\n```"])
def test_prose_alone_holds_no_kernel(text):
    assert extract_code(text) == ""


def test_a_block_that_does_not_parse_is_judged_for_its_error():
    assert extract_code("```python\ndef softmax(x)\n```") == "def softmax(x)\n"


def test_the_program_reads_the_prompt():
    echo = program("import sys; print('def f():', sys.stdin.read())")
    found = generate(echo, "return 7", 20)
    assert (found.code.strip(), found.error) == ("def f(): return 7", "")
    assert 0 < found.seconds < 20


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("pass", "it wrote nothing"),
        ("print('No.')\nprint('I will not.')", "its output holds no Python code"),
        ("import sys; print('x = 1'); sys.exit('no key\\nset KEY')", "it exited with 1: set KEY"),
        ("import os; os.abort()", "it was killed by SIGABRT"),
        ("while True: print('x' * 65536)", "it wrote more than 1 MiB"),
    ],
)
def test_each_failure_is_one_line(text, error):
    found = generate(program(text), "", 20)
    assert (found.code, found.error) == ("", error)


@pytest.mark.parametrize(
    "text", ["import time; print('x = 1', flush=True); time.sleep(60)", "import os, time\nos.close(1); time.sleep(60)"]
)
def test_a_program_that_hangs_is_killed_with_its_children(text):
    began = time.monotonic()
    found = generate(["/bin/sh", "-c", f'{sys.executable} -c "{text}"; true'], "", 1.5)
    assert found.error == "it did not end within 2 s"
    assert time.monotonic() - began < 10


def test_a_program_that_does_not_read_a_long_prompt_works():
    assert generate(program("print('x = 1')"), "word " * 10**6, 20).code == "x = 1\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "empty"), ("'unclosed", "no closing quotation"), ("no-such-program --fast", "no such program")],
)
def test_a_command_that_cannot_run_is_refused_before_the_first_round(text, why):
    with pytest.raises(GeneratorNotFound, match=why):
        parse_command(text)


def test_a_command_is_not_run_by_a_shell():
    assert parse_command("echo 'a b'; rm x") == ["echo", "a b;", "rm", "x"]
    assert generator.parse_command(f"{sys.executable} -c 'print(1)'")[1:] == ["-c", "print(1)"]

"""Run the program that writes kernels, and find the kernel in what it writes."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from tilewright.errors import GeneratorNotFound

MAX_OUTPUT = 2**20  # bytes
LOG_TAIL = 4000  # bytes of standard error that are read
POLL_SECONDS = 0.2  # after which a run that was stopped is noticed
LINE = 200  # characters of its last line that are shown
FENCED = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
PYTHON = ("", "python", "py", "python3")


@dataclass(frozen=True)
class Generated:
    """The kernel that a program wrote, or the reason why there is none."""

    code: str = ""
    error: str = ""
    seconds: float = 0.0


def parse_command(text: str) -> list[str]:
    """Return a command as a list of words; raise unless its program can be found."""
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise GeneratorNotFound(text, str(error).lower()) from None
    if not command:
        raise GeneratorNotFound(text, "it is empty")
    if not shutil.which(command[0]):
        raise GeneratorNotFound(command[0], "no such program on PATH, or no permission to run it")
    return command


def generate(
    command: list[str], prompt: str, seconds: float, is_cancelled: Callable[[], bool] = lambda: False
) -> Generated:
    """Run the command with the prompt on its standard input, and return the kernel from its standard output."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as log:
        given.write(prompt.encode())
        given.seek(0)
        try:
            process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        except OSError as error:
            raise GeneratorNotFound(command[0], error.strerror or str(error)) from None
        try:
            output, error = _read(process, began + seconds, is_cancelled)
        except TimeoutError:
            output, error = b"", f"it did not end within {seconds:.0f} s"
        finally:
            _kill(process)
        if not error and process.returncode:
            error = f"it {_describe_exit(process.returncode)}{_last_line(log)}"
    code = "" if error else extract_code(output.decode(errors="replace"))
    missing = "its output holds no Python code" if output.strip() else "it wrote nothing"
    return Generated(code, error or ("" if code else missing), time.monotonic() - began)


def extract_code(text: str) -> str:
    """Return the Python code in a text: the last fenced block that parses, or the whole text if it does.

    A fenced block that does not parse is returned if there is no better one: its error says what to fix.
    """
    blocks = [body for language, body in FENCED.findall(text) if language.lower() in PYTHON and body.strip()]
    for block in reversed(blocks):
        if _parses(block):
            return block
    if blocks:
        return blocks[-1]
    return text if text.strip() and _parses(text) else ""


def _parses(code: str) -> bool:
    """Return whether this is Python that names something. `ast` sometimes fails in several threads."""
    try:
        return bool(compile(code, "<answer>", "exec", dont_inherit=True).co_names)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _read(process: subprocess.Popen[bytes], deadline: float, is_cancelled: Callable[[], bool]) -> tuple[bytes, str]:
    """Return all that the process writes, once it has ended, or an error. Raises TimeoutError at the deadline."""
    assert process.stdout
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if is_cancelled():
            return b"", "the run was stopped"
        if not select.select([process.stdout], [], [], min(left, POLL_SECONDS))[0]:
            continue
        if not (part := os.read(process.stdout.fileno(), 1 << 16)):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError from None
            return data, ""
        data += part
        if len(data) > MAX_OUTPUT:
            return b"", f"it wrote more than {MAX_OUTPUT // 2**20} MiB"
    raise TimeoutError


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout:
        process.stdout.close()


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _last_line(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1].strip()[:LINE]}" if lines else ""

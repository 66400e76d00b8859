"""Run each profiler in its own process: profilers conflict, and ncu must attach when the process starts."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright.errors import ProfilerFailed
from tilewright.workbench.profile.calls import Call

SOURCES = {"ncu": "ncu", "proton": "proton", "torch": "torch_profiler"}  # modules with `run_in_child`

Reply = Callable[[], Any]


@contextmanager
def child_command(source: str, calls: Sequence[Call], trace: str | None = None) -> Iterator[tuple[list[str], Reply]]:
    """Yield the command of a process that does the calls, and a function that returns its result after it exits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reply.json"
        request = json.dumps({"source": source, "calls": list(calls), "trace": trace, "reply": str(path)})

        def reply() -> Any:
            if not path.exists():
                raise ProfilerFailed(source, "its process exited early")
            return json.loads(path.read_text())

        yield [sys.executable, "-c", f"from {__name__} import main; main()", request], reply


def run(source: str, calls: Sequence[Call], trace: str | None = None) -> Any:
    with child_command(source, calls, trace) as (command, reply):
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ProfilerFailed(source, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        return reply()


def main() -> None:
    request = json.loads(sys.argv[1])
    os.dup2(2, 1)  # keeps the output of kernels out of the output of ncu
    module = importlib.import_module(f"tilewright.workbench.profile.{SOURCES[request['source']]}")
    Path(request["reply"]).write_text(json.dumps(module.run_in_child(request["calls"], request["trace"])))

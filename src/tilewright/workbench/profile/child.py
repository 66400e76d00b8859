"""A process of its own for each source: profilers do not share one, and ncu must watch from the beginning."""

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

from tilewright.errors import SourceFailed
from tilewright.workbench.profile.calls import Call

SOURCES = {"ncu": "ncu", "proton": "scopes", "torch": "trace"}  # the modules whose `perform` is called


Reply = Callable[[], Any]


@contextmanager
def asked(source: str, calls: Sequence[Call], trace: str | None = None) -> Iterator[tuple[list[str], Reply]]:
    """The command of a process that performs the calls, and what it has replied once it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reply.json"
        wanted = json.dumps({"source": source, "calls": list(calls), "trace": trace, "reply": str(path)})

        def reply() -> Any:
            if not path.exists():
                raise SourceFailed(source, "its process ended early")
            return json.loads(path.read_text())

        yield [sys.executable, "-c", f"from {__name__} import main; main()", wanted], reply


def run(source: str, calls: Sequence[Call], trace: str | None = None) -> Any:
    with asked(source, calls, trace) as (command, reply):
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SourceFailed(source, (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1])
        return reply()


def main() -> None:
    wanted = json.loads(sys.argv[1])
    os.dup2(2, 1)  # what a kernel prints is not what ncu says
    module = importlib.import_module(f"tilewright.workbench.profile.{SOURCES[wanted['source']]}")
    Path(wanted["reply"]).write_text(json.dumps(module.perform(wanted["calls"], wanted["trace"])))

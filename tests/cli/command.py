"""The command line in a process of its own, forked from one that has imported all it may need: that takes seconds."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, CompletedProcess

NURSERY = Path(__file__).with_name("nursery.py")


@functools.cache
def _nursery() -> subprocess.Popen[str]:
    started = subprocess.Popen([sys.executable, NURSERY], stdin=PIPE, stdout=PIPE, text=True)
    atexit.register(started.__exit__, None, None, None)  # closes its pipes, at which it ends
    return started


def run(*args, cwd=None, **env):
    args = [str(arg) for arg in args]
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        request = {
            "args": args,
            "cwd": str(cwd or Path.cwd()),
            "env": os.environ | env,
            "out": str(out),
            "err": str(err),
        }
        nursery = _nursery()
        print(json.dumps(request), file=nursery.stdin, flush=True)
        code = int(nursery.stdout.readline())
        return CompletedProcess(args, code, out.read_text(), err.read_text())


def assert_one_line(done, code: int, *words: str):
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0]

"""Run the command line in its own process, forked from one that has imported torch, which takes seconds."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, CompletedProcess
from types import SimpleNamespace

import pytest

from tilewright import cli

FORK_SERVER = Path(__file__).with_name("fork_server.py")


@functools.cache
def _fork_server() -> subprocess.Popen[str]:
    started = subprocess.Popen([sys.executable, FORK_SERVER], stdin=PIPE, stdout=PIPE, text=True)
    atexit.register(started.__exit__, None, None, None)  # closes its stdin, which ends it
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
        server = _fork_server()
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return CompletedProcess(args, code, out.read_text(), err.read_text())


def in_process(name, monkeypatch, capsys):
    """Return a function that runs a command in this process, where a test can replace what it calls."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["tilewright", name, *map(str, args)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code, stdout=printed.out, stderr=printed.err)

    return call


def assert_one_line(done, code: int, *words: str):
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0]

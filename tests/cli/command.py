"""The command line in a process of its own."""

import os
import subprocess
import sys


def run(*args, cwd=None, **env):
    program = "import sys; sys.path[:] = [p for p in sys.path if p]; from tilewright.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | env,
        cwd=cwd,
    )


def assert_one_line(done, code: int, *words: str):
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0]

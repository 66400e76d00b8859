"""Times that users feel, measured on whole processes. Not tests: machines differ, and a test must not.

python tools/measure.py start-up    how long the command line takes to answer
python tools/measure.py make-test   `make test` in a fresh clone, installation included
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = 15


def seconds(command: list[str], **where) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, **where)
    return time.perf_counter() - begin


def start_up() -> None:
    quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"PYTHONPATH": str(ROOT / "src")}}
    for words in ("--help", "--version", "ops", "gpu h200"):
        command = [sys.executable, "-m", "tilewright", *words.split()]
        seconds(command, **quiet)  # fills the bytecode and file caches
        taken = sorted(1e3 * seconds(command, **quiet) for _ in range(RUNS))
        print(f"tilewright {words:10} median {statistics.median(taken):4.0f} ms, {taken[0]:.0f} to {taken[-1]:.0f} ms")


def make_test() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        print(f"make test in a fresh clone: {seconds(['make', '-C', folder, 'test']):.0f} s")


if __name__ == "__main__":
    wanted = {"start-up": start_up, "make-test": make_test}
    if len(sys.argv) != 2 or sys.argv[1] not in wanted:
        sys.exit(f"usage: python tools/measure.py {' | '.join(wanted)}")
    wanted[sys.argv[1]]()

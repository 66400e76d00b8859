"""Submit every trick in tests/submissions to an arena with its own server and judges. None may be ranked.

    python scripts/arena_tricks.py --workers 2

Honest Triton kernels are submitted beside them and must be ranked: an arena that refuses everything proves nothing.
Exits with 1 if a trick is ranked or an honest kernel is not.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewright.arena.client import FINISHED, Client

FOLDER = Path(__file__).parent.parent / "tests" / "submissions"
TIMED = {"softmax": "M=64,N=1024", "sum": "M=64,N=1024", "gelu": "N=65536,approximate=tanh", "add": "N=65536"}
HONEST = ("triton_online", "triton_heuristics", "triton_autotuned")


def submissions(pattern: str) -> list[tuple[Path, bool]]:
    """Return the files whose name contains the pattern, and whether each is honest."""
    tricks = [(path, False) for path in sorted((FOLDER / "adversarial").glob("[!_]*.py"))]
    honest = [(FOLDER / "honest" / f"{name}.py", True) for name in HONEST]
    return [(path, is_honest) for path, is_honest in tricks + honest if pattern in path.stem]


def operation(path: Path) -> str:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "OP":
            return str(ast.literal_eval(node.value))
    return "softmax"


@contextlib.contextmanager
def serving(folder: Path, workers: int) -> Iterator[Client]:
    """Serve an arena with the operations that the tricks are about."""
    arena = [sys.executable, "-m", "tilewright", "arena"]
    for name, case in TIMED.items():
        command = [*arena, "problem", "add", name, "--data", str(folder), "--case", case]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    command = [*arena, "serve", "--data", str(folder), "--port", "0", "--workers", str(workers)]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as server:
        assert server.stdout
        address = re.search(rb"http://\S+", server.stdout.readline())
        assert address, (folder / "log").read_text()
        try:
            with Client(address.group().decode()) as client:
                yield client
        finally:
            server.terminate()
            server.stdout.close()


def run(pattern: str, workers: int) -> list[dict[str, Any]]:
    """Return a row per submission: its file, whether it is honest, its state, its reason and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), workers) as client:
        waiting: dict[int, dict[str, Any]] = {}
        for path, is_honest in submissions(pattern):
            done = client.submit(operation(path), path.read_text(encoding="utf-8"), path.name)
            waiting[done["id"]] = {"file": f"{path.parent.name}/{path.name}", "is_honest": is_honest}
        found = []
        while waiting:
            time.sleep(2.0)
            for number in [*waiting]:
                (job,) = client.submission(number)["jobs"]
                if job["state"] in FINISHED:
                    seconds = (job["result"] or {}).get("seconds")
                    row = waiting.pop(number) | {"state": job["state"], "reason": job["reason"], "seconds": seconds}
                    print(json.dumps(row), flush=True)
                    found.append(row)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="judges at a time")
    parser.add_argument("--only", default="", metavar="TEXT", help="submit files with this in their name")
    given = parser.parse_args()
    started = time.monotonic()
    found = run(given.only, given.workers)
    for is_honest, what in ((False, "tricks"), (True, "honest kernels")):
        states = Counter(row["state"] for row in found if row["is_honest"] == is_honest)
        print(f"{what}: {dict(states)}")
    print(f"{time.monotonic() - started:.0f} s")
    if any((row["state"] == "ranked") != row["is_honest"] for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

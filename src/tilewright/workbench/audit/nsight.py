"""NVIDIA Nsight Compute, which reads the hardware's counters while a process runs."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Sequence

from tilewright.errors import CountersFailed, CountersForbidden, MissingTool

NAME = "ncu"
PRINTED = ("--csv", "--page", "raw", "--print-units", "base")
UNDISTURBED = ("--clock-control", "none", "--cache-control", "all")
FORBIDDEN = "ERR_NVGPUCTRPERM"
ERROR = "==ERROR=="
NOTHING = "No kernels were profiled"


def watch(options: Sequence[str], command: Sequence[str]) -> list[dict[str, str]]:
    """What ncu prints about a process, row by row: the first holds the units. None where it had nothing to look at."""
    try:
        done = subprocess.run(
            [NAME, *PRINTED, *UNDISTURBED, *options, *command], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise MissingTool("counting", NAME, "NVIDIA Nsight Compute") from None
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    said = done.stdout + done.stderr
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix(ERROR).strip() for line in lines if line.startswith(ERROR)]
    if rows and not done.returncode:
        return rows
    if FORBIDDEN in said:
        raise CountersForbidden(FORBIDDEN)
    if NOTHING in said and not errors and not done.returncode:
        return []
    raise CountersFailed((errors or lines[-1:] or [f"ncu ended with code {done.returncode}"])[0], said)

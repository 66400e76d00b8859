"""Run a process under NVIDIA Nsight Compute, which reads hardware counters."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Sequence

from tilewright.errors import CountersFailed, CountersForbidden, MissingTool

NAME = "ncu"
OUTPUT = ("--csv", "--page", "raw", "--print-units", "base")
CONTROLS = ("--clock-control", "none", "--cache-control", "all")
FORBIDDEN = "ERR_NVGPUCTRPERM"
ERROR = "==ERROR=="
NOTHING = "No kernels were profiled"


def run_ncu(options: Sequence[str], command: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows that ncu prints, the units first; an empty list if it profiled no kernel."""
    try:
        done = subprocess.run(
            [NAME, *OUTPUT, *CONTROLS, *options, *command], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise MissingTool("counting", NAME, "NVIDIA Nsight Compute") from None
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    output = done.stdout + done.stderr
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix(ERROR).strip() for line in lines if line.startswith(ERROR)]
    if rows and not done.returncode:
        return rows
    if FORBIDDEN in output:
        raise CountersForbidden(FORBIDDEN)
    if NOTHING in output and not errors and not done.returncode:
        return []
    raise CountersFailed((errors or lines[-1:] or [f"ncu exited with code {done.returncode}"])[0], output)

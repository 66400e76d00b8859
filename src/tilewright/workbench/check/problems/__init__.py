"""Third-party problems as Ops: KernelBench files, gpu-mode task folders and flashinfer-bench definitions."""

from __future__ import annotations

from pathlib import Path

from tilewright.workbench.check.problems.base import Problem
from tilewright.workbench.check.problems.flashinfer import Definition
from tilewright.workbench.check.problems.gpumode import Task
from tilewright.workbench.check.problems.kernelbench import KernelBench

__all__ = ["Definition", "KernelBench", "Problem", "Task", "load"]


def load(path: Path) -> Problem:
    """Load the problem at a path. `select` chooses its cases, and `close` deletes its temporary files."""
    if path.is_dir() or path.suffix in (".yml", ".yaml"):
        return Task(path)
    if path.suffix == ".json":
        return Definition(path)
    return KernelBench(path)

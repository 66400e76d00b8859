"""Hardware counters, by running a process with the calls under Nsight Compute.

ncu replays each kernel several times with flushed caches. Kernels that make inputs or warm up are not profiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tilewright.counters import METRICS, Counters, combined, from_row
from tilewright.errors import CountersFailed, first_line
from tilewright.workbench.audit.nsight import NAME, run_ncu
from tilewright.workbench.profile import child_process
from tilewright.workbench.profile.calls import Call, prepare, profiler_range, title

SEPARATOR = "spin_kernel"  # torch.cuda._sleep launches it; it precedes the kernels of each call


def measure(calls: Sequence[Call]) -> list[Any]:
    """Return the counters of each call, or the reason why it has none. Raises TilewrightError if ncu does not work."""
    return _measure(calls, METRICS)


def _measure(calls: Sequence[Call], metrics: Sequence[str]) -> list[Any]:
    options = ["--profile-from-start", "off", "--metrics", ",".join(metrics)]
    with child_process.child_command(NAME, calls) as (command, reply):
        try:
            rows = run_ncu(options, command)
        except CountersFailed as error:
            supported = [name for name in metrics if name.partition(".")[0] not in error.output]
            if not supported or len(supported) == len(metrics):
                raise
            return _measure(calls, supported)
        errors = reply()
    groups = iter(by_call(rows))
    return [error or next(groups, "ncu saw none of its kernels") for error in errors]


def by_call(rows: Sequence[dict[str, str]]) -> Iterator[Counters | str]:
    """Yield the combined counters of the kernels of each call. The first row has the units."""
    units = rows[0] if rows else {}
    groups: list[list[Counters]] = []
    for row in rows[1:]:
        if SEPARATOR in row["Kernel Name"]:
            groups.append([])
        elif groups:
            groups[-1].append(from_row(row, units))
    for group in groups:
        yield combined(group) if group else "it launches no kernel"


def run_in_child(calls: Sequence[Call], _: str | None) -> list[str | None]:
    """Do every call once between the start and stop of the profiler. Return the error of each call, or None."""
    profiler: Any = torch.cuda.cudart()
    errors: list[str | None] = []
    for call in calls:
        try:
            run = prepare(call, "cuda")
            run()  # warm-up
        except (Exception, SystemExit) as error:
            errors.append(first_line(error))
            continue
        torch.cuda.synchronize()
        profiler.cudaProfilerStart()
        torch.cuda._sleep(1)
        with profiler_range(title(call)):
            run()
        torch.cuda.synchronize()
        profiler.cudaProfilerStop()
        errors.append(None)
        del run
        torch.cuda.empty_cache()
    return errors

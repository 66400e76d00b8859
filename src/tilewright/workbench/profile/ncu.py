"""Counters of the hardware, by Nsight Compute: it watches a process that makes the calls, and measures each kernel in
them over and over, with caches emptied before. Kernels that make inputs or compile are not looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tilewright.counters import METRICS, Counters, combined, of_row
from tilewright.errors import CountersFailed, first_line
from tilewright.workbench.audit.nsight import NAME, watch
from tilewright.workbench.profile import child
from tilewright.workbench.profile.calls import Call, prepared, ranged, title

SEPARATOR = "spin_kernel"  # torch.cuda._sleep's: it stands before the kernels of each call


def measure(calls: Sequence[Call]) -> list[Any]:
    """Counters of each call, or a text: why it has none. Raises a TilewrightError where ncu cannot count at all."""
    return _measured(calls, METRICS)


def _measured(calls: Sequence[Call], metrics: Sequence[str]) -> list[Any]:
    options = ["--profile-from-start", "off", "--metrics", ",".join(metrics)]
    with child.asked(NAME, calls) as (command, reply):
        try:
            rows = watch(options, command)
        except CountersFailed as error:
            known = [name for name in metrics if name.partition(".")[0] not in error.said]
            if not known or len(known) == len(metrics):
                raise
            return _measured(calls, known)  # without those that this GPU or this version does not have
        errors = reply()
    groups = iter(by_call(rows))
    return [error or next(groups, "ncu has seen none of its kernels") for error in errors]


def by_call(rows: Sequence[dict[str, str]]) -> Iterator[Counters | str]:
    """The kernels of each call added up; of these rows the first holds the units."""
    units = rows[0] if rows else {}
    groups: list[list[Counters]] = []
    for row in rows[1:]:
        if SEPARATOR in row["Kernel Name"]:
            groups.append([])
        elif groups:
            groups[-1].append(of_row(row, units))
    for group in groups:
        yield combined(group) if group else "it launches no kernel"


def perform(calls: Sequence[Call], _: str | None) -> list[str | None]:
    """In the watched process: every call once, between the marks that ncu looks for. Returns why one failed."""
    marks: Any = torch.cuda.cudart()
    errors: list[str | None] = []
    for call in calls:
        try:
            run = prepared(call, "cuda")
            run()  # compiles
        except (Exception, SystemExit) as error:
            errors.append(first_line(error))
            continue
        torch.cuda.synchronize()
        marks.cudaProfilerStart()
        torch.cuda._sleep(1)
        with ranged(title(call)):
            run()
        torch.cuda.synchronize()
        marks.cudaProfilerStop()
        errors.append(None)
        del run
        torch.cuda.empty_cache()
    return errors

"""Operators and kernels of a call with their times, by torch.profiler, and a trace for Perfetto."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from tilewright.errors import first_line
from tilewright.workbench.profile import child_process
from tilewright.workbench.profile.calls import Call, prepare, profiler_range, title

NAME = "torch"
TIMES = 3  # runs per call, with warm caches


@dataclass(frozen=True)
class Row:
    """A kernel or an operator, per call."""

    name: str
    count: float
    device_us: float
    host_us: float
    is_kernel: bool


def measure(calls: Sequence[Call], trace: str | None = None) -> list[Any]:
    """Return the rows of each call, or the reason why it has none. The events of all calls are written to `trace`."""
    found = child_process.run(NAME, calls, trace)
    return [[Row(**row) for row in one] if isinstance(one, list) else one for one in found]


def run_in_child(calls: Sequence[Call], trace: str | None) -> list[list[dict[str, Any]] | str]:
    """Return the rows of each call, or its error."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: list[list[dict[str, Any]] | str] = []
    events: dict[str, Any] = {"traceEvents": []}
    for call in calls:
        try:
            run = prepare(call, device)
            run()
        except (Exception, SystemExit) as error:
            found.append(first_line(error))
            continue
        with profile() as profiler:
            for _ in range(TIMES):
                with profiler_range(title(call)):
                    run()
            if device == "cuda":
                torch.cuda.synchronize()
        found.append([asdict(row) for row in _rows(profiler, title(call))])
        if trace:
            exported = _chrome_trace(profiler)
            events = exported | {"traceEvents": [*events["traceEvents"], *exported["traceEvents"]]}
    if trace:
        Path(trace).write_text(json.dumps(events))
    return found


def _rows(profiler: Any, range_name: str) -> Iterator[Row]:
    """Yield operators and kernels by self time, longest first."""
    rows = [
        Row(
            name=event.key,
            count=event.count / TIMES,
            device_us=event.self_device_time_total / TIMES,
            host_us=event.self_cpu_time_total / TIMES,
            is_kernel=event.device_type != DeviceType.CPU,
        )
        for event in profiler.key_averages()
        if event.key != range_name
    ]
    yield from sorted(rows, key=lambda row: (-row.device_us, -row.host_us))


def _chrome_trace(profiler: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text())

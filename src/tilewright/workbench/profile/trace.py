"""What PyTorch's profiler sees of a call: operators and kernels with their times, and a trace for Perfetto."""

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
from tilewright.workbench.profile import child
from tilewright.workbench.profile.calls import Call, prepared, ranged, title

NAME = "torch"
TIMES = 3  # each call, one after the other, with caches as they are


@dataclass(frozen=True)
class Row:
    """A kernel or an operator, in one call."""

    name: str
    count: float
    device_us: float
    host_us: float
    is_kernel: bool


def measure(calls: Sequence[Call], trace: str | None = None) -> list[Any]:
    """The rows of each call, or a text: why it has none. All of them together are written to `trace`."""
    found = child.run(NAME, calls, trace)
    return [[Row(**row) for row in one] if isinstance(one, list) else one for one in found]


def perform(calls: Sequence[Call], trace: str | None) -> list[list[dict[str, Any]] | str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: list[list[dict[str, Any]] | str] = []
    events: dict[str, Any] = {"traceEvents": []}
    for call in calls:
        try:
            run = prepared(call, device)
            run()
        except (Exception, SystemExit) as error:
            found.append(first_line(error))
            continue
        with profile() as seen:  # of all that there is: the host, and a GPU
            for _ in range(TIMES):
                with ranged(title(call)):
                    run()
            if device == "cuda":
                torch.cuda.synchronize()
        found.append([asdict(row) for row in _rows(seen, title(call))])
        if trace:
            written = _written(seen)
            events = written | {"traceEvents": [*events["traceEvents"], *written["traceEvents"]]}
    if trace:
        Path(trace).write_text(json.dumps(events))
    return found


def _rows(seen: Any, range_name: str) -> Iterator[Row]:
    """What takes time itself, longest first."""
    rows = [
        Row(
            name=event.key,
            count=event.count / TIMES,
            device_us=event.self_device_time_total / TIMES,
            host_us=event.self_cpu_time_total / TIMES,
            is_kernel=event.device_type != DeviceType.CPU,
        )
        for event in seen.key_averages()
        if event.key != range_name
    ]
    yield from sorted(rows, key=lambda row: (-row.device_us, -row.host_us))


def _written(seen: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        return json.loads(file.read_text())

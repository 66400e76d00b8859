"""The bytes that a call really moved through device memory, counted by the hardware.

`ncu` watches a process that makes the call once, with caches emptied before, and then reads a buffer larger than the
L2, so that what the call wrote has left the caches too. The same without the call is counted first and taken off.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tilewright.errors import CountersFailed
from tilewright.workbench.audit.inputs import loaded
from tilewright.workbench.audit.nsight import watch

METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum"}
FLUSH = 2**29  # bytes


def count(call: dict[str, Any]) -> dict[str, int]:
    """Bytes read and written by a call: of an op's kernel (op, kernel, case, dtype) or of a file's function (file,
    function, inputs)."""
    child = [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(call)]
    ranges = ["--replay-mode", "app-range", "--metrics", ",".join(METRICS.values())]
    rows = watch(ranges, child)
    if len(rows) < 3:  # units, the flush alone, and the call with it
        raise CountersFailed(f"ncu has seen {max(0, len(rows) - 1)} ranges of 2")
    alone, both = ({name: float(row[metric].replace(",", "")) for name, metric in METRICS.items()} for row in rows[1:3])
    return {name: max(0, int(both[name] - alone[name])) for name in METRICS}


def main() -> None:
    """In the watched process: the call, between the marks that ncu looks for."""
    fn, args = loaded(json.loads(sys.argv[1]), "cuda")
    marks: Any = torch.cuda.cudart()
    flush = torch.ones(FLUSH // 4, dtype=torch.float32, device="cuda")
    with torch.no_grad():
        fn(*args)  # compiles
        flush.sum()  # and leaves nothing in the caches that is still to be written
        for measured in ((), (fn,)):
            torch.cuda.synchronize()
            marks.cudaProfilerStart()
            for call in measured:
                call(*args)
            flush.sum()
            torch.cuda.synchronize()
            marks.cudaProfilerStop()

"""DRAM bytes of a call, counted by the hardware.

A process under `ncu` does the call once with flushed caches, then reads a buffer larger than the L2, so that what the
call wrote reaches DRAM. The bytes of the flush alone are counted first and subtracted.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tilewright.errors import CountersFailed
from tilewright.workbench.audit.inputs import load_call
from tilewright.workbench.audit.nsight import run_ncu

METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum"}
FLUSH = 2**29  # bytes


def count_dram_bytes(call: dict[str, Any]) -> dict[str, int]:
    """Return the DRAM bytes read and written by a call, in the form described in `audit.inputs`."""
    command = [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(call)]
    ranges = ["--replay-mode", "app-range", "--metrics", ",".join(METRICS.values())]
    rows = run_ncu(ranges, command)
    if len(rows) < 3:  # units, flush, call and flush
        raise CountersFailed(f"ncu reported {max(0, len(rows) - 1)} of 2 ranges")
    flush, both = ({name: float(row[metric].replace(",", "")) for name, metric in METRICS.items()} for row in rows[1:3])
    return {name: max(0, int(both[name] - flush[name])) for name in METRICS}


def main() -> None:
    """Do the call under ncu, between the start and stop of the profiler."""
    fn, args = load_call(json.loads(sys.argv[1]), "cuda")
    profiler: Any = torch.cuda.cudart()
    flush = torch.ones(FLUSH // 4, dtype=torch.float32, device="cuda")
    with torch.no_grad():
        fn(*args)  # warm-up
        flush.sum()  # writes back dirty lines of the L2
        for measured in ((), (fn,)):
            torch.cuda.synchronize()
            profiler.cudaProfilerStart()
            for call in measured:
                call(*args)
            flush.sum()
            torch.cuda.synchronize()
            profiler.cudaProfilerStop()

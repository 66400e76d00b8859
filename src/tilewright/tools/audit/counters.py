"""The bytes that a call really moved through device memory, counted by the hardware.

`ncu` watches a process that makes the call once, with caches emptied before, and then reads a buffer larger than the
L2, so that what the call wrote has left the caches too. The same without the call is counted first and taken off.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tilewright import registry
from tilewright.errors import CountersFailed, MissingPackage
from tilewright.spec import Case
from tilewright.tools.audit.inputs import make

METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum"}
FLUSH = 2**29  # bytes


def count(call: dict[str, Any]) -> dict[str, int]:
    """Bytes read and written by a call: of an op's kernel (op, kernel, case, dtype) or of a file's function (file,
    function, inputs)."""
    child = [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(call)]
    options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--cache-control", "all"]
    ranges = ["--replay-mode", "app-range", "--metrics", ",".join(METRICS.values())]
    try:
        done = subprocess.run(["ncu", *options, *ranges, *child], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MissingPackage("--measure", "Nsight Compute (ncu)") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    if done.returncode or len(rows) < 3:  # units, the flush alone, and the call with it
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise CountersFailed(said[-1] if said else f"ncu ended with code {done.returncode}")
    alone, both = ({name: float(row[metric].replace(",", "")) for name, metric in METRICS.items()} for row in rows[1:3])
    return {name: max(0, int(both[name] - alone[name])) for name in METRICS}


def main() -> None:
    """In the watched process: the call, between the marks that ncu looks for."""
    wanted = json.loads(sys.argv[1])
    if "op" in wanted:
        op = registry.load(wanted["op"])
        fn = registry.pick(op, [wanted["kernel"]])[0].fn
        args: tuple[Any, ...] = op.make(Case(tuple(wanted["case"].items()), wanted["dtype"]), "cuda")
    else:
        fn = registry.launcher(Path(wanted["file"]), wanted["function"])
        args = tuple(make(text, "cuda") for text in wanted["inputs"])
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

"""Time a workload with and without four measuring mistakes on this GPU. See docs/measuring.md.

python scripts/traps.py results/h200/traps.jsonl     append a record for each mistake
"""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tilewright import hardware, source
from tilewright.record import append, stamp
from tilewright.timer import Timer
from tilewright.workbench.bench import intervals

SAMPLES = 101
SIZE = 8192  # rows and columns of the matrices
STREAKS = 3  # each with the same values, like a benchmark that never changes its inputs


def measured(timer: Timer, call: Callable[[], Any]) -> list[float]:
    return timer.interleave({"": call}, SAMPLES)[""]


def zeros() -> dict[str, Any]:
    """Multiply zeros instead of random numbers: fewer bits flip, so the GPU needs less power and clocks higher."""
    timer = Timer()
    taken: dict[str, list[float]] = {"zeros": [], "random": []}
    for _ in range(STREAKS):
        for name in taken:
            x, y = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            if name == "zeros":
                x.zero_(), y.zero_()
            taken[name] += measured(timer, lambda x=x, y=y: x @ y)
    what = f"bf16 matmul {SIZE}x{SIZE}x{SIZE}"
    return {"what": what, "flops": 2 * SIZE**3, "wrong": taken["zeros"], "right": taken["random"]}


def warm_cache() -> dict[str, Any]:
    """Reuse one input for every call: it is read from the L2."""
    x = torch.randn(2**23, device="cuda")
    call = lambda: x.sum()
    return {
        "what": "sum of 32 MiB",
        "bytes": x.nbytes,
        "wrong": measured(Timer(flush="none"), call),
        "right": measured(Timer(), call),
    }


def dirty_flush() -> dict[str, Any]:
    """Flush the L2 by writing to it: the dirty lines are written back during the timed call."""
    x = torch.randn(2**24, device="cuda")
    call = lambda: x.sum()
    return {
        "what": "sum of 64 MiB",
        "bytes": x.nbytes,
        "wrong": measured(Timer(flush="write"), call),
        "right": measured(Timer(), call),
    }


def unqueued() -> dict[str, Any]:
    """Time on an idle GPU: it waits for the host between the two events."""
    x = torch.randn(256, 1024, device="cuda")
    call = lambda: torch.softmax(x, -1)
    return {
        "what": "softmax of 1 MiB",
        "bytes": 2 * x.nbytes,
        "wrong": measured(Timer(flush="none", queues=False), call),
        "right": measured(Timer(flush="none"), call),
    }


TRAPS = {"zeros": zeros, "warm cache": warm_cache, "dirty flush": dirty_flush, "unqueued": unqueued}


def main(path: Path) -> None:
    about = {"file": "scripts/traps.py", "device": hardware.current_gpu(), "versions": hardware.versions()}
    for name, trap in TRAPS.items():
        found = trap()
        ratio, *interval = intervals.of_ratio(found["right"], found["wrong"], paired=False)
        content = found | {
            "wrong": [round(us, 3) for us in found["wrong"]],
            "right": [round(us, 3) for us in found["right"]],
            "ratio": round(ratio, 4),
            "interval": [round(edge, 4) for edge in interval],
        }
        append(path, [stamp("trap", "traps", name, source.file_hash(Path(__file__)), **content, **about)])
        print(f"{name:12} {found['what']:28} {median(found['wrong']):8.1f} us against {median(found['right']):8.1f} us")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if not hardware.has_gpu():
        sys.exit("no GPU found; run this on a machine with one")
    main(Path(sys.argv[1]))

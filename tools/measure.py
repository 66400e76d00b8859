"""Times that users feel, measured on whole processes. Not tests: machines differ, and a test must not.

python tools/measure.py start-up    how long the command line takes to answer
python tools/measure.py make-test   `make test` in a fresh clone, installation included
python tools/measure.py check       `tilewright check` of one file for softmax, at each depth
python tools/measure.py interpreter our interpreter with all its checks against Triton's own, on the same launches
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = 15


def seconds(command: list[str], **where) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, **where)
    return time.perf_counter() - begin


def start_up() -> None:
    quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"PYTHONPATH": str(ROOT / "src")}}
    for words in ("--help", "--version", "ops", "gpu h200"):
        command = [sys.executable, "-m", "tilewright", *words.split()]
        seconds(command, **quiet)  # fills the bytecode and file caches
        taken = sorted(1e3 * seconds(command, **quiet) for _ in range(RUNS))
        print(f"tilewright {words:10} median {statistics.median(taken):4.0f} ms, {taken[0]:.0f} to {taken[-1]:.0f} ms")


def check() -> None:
    file = ROOT / "tests" / "submissions" / "honest" / "triton_one_pass.py"
    quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"PYTHONPATH": str(ROOT / "src")}}
    for depth in ([], ["--quick"], ["--full"]):
        command = [sys.executable, "-m", "tilewright", "check", "softmax", str(file), *depth]
        taken = sorted(seconds(command, **quiet) for _ in range(3))
        print(f"check softmax FILE {' '.join(depth):8} {taken[0]:.1f} to {taken[-1]:.1f} s")


def make_test() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        print(f"make test in a fresh clone: {seconds(['make', '-C', folder, 'test']):.0f} s")


# Op, kernel and case; float32, which Triton's own interpreter computes rightly (with numpy before 2.4).
INTERPRETED = (
    ("softmax", "triton-three-pass", {"M": 64, "N": 1000}),
    ("softmax", "triton", {"M": 64, "N": 1000}),
    ("add", "triton", {"N": 200003}),
    ("sum", "triton", {"M": 67, "N": 4096}),
    ("linear", "triton", {"M": 512, "N": 512, "K": 512, "relu": True}),
    ("attention", "triton", {"B": 2, "H": 2, "HKV": 2, "LQ": 256, "LK": 256, "D": 64, "causal": True}),
)
RUN = """
import json, statistics, sys, time
from tilewright import registry
from tilewright.spec import Case
audited, name, kernel, point = sys.argv[1] == "audited", *sys.argv[2:4], json.loads(sys.argv[4])
op = registry.load(name)
fn, args = op.kernels[kernel].fn, op.make(Case(tuple(point.items())))
if audited:
    from tilewright.tools.audit import audit
    call = lambda: audit(fn, *args)
else:
    call = lambda: fn(*args)
call()
taken = []
for _ in range(3):
    begin = time.perf_counter()
    call()
    taken.append(time.perf_counter() - begin)
print(statistics.median(taken))
"""


def interpreter() -> None:
    for name, kernel, point in INTERPRETED:
        taken = {}
        for how, more in (("stock", {"TRITON_INTERPRET": "1"}), ("audited", {})):
            environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | more
            command = [sys.executable, "-c", RUN, how, name, kernel, json.dumps(point)]
            done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
            taken[how] = float(done.stdout)
        case = ",".join(f"{k}={v}" for k, v in point.items())
        print(
            f"{name + ' ' + kernel:26} {case:48} Triton's {taken['stock']:7.3f} s, ours with the audit "
            f"{taken['audited']:6.3f} s: {taken['stock'] / taken['audited']:5.1f}x as fast"
        )


if __name__ == "__main__":
    wanted = {"start-up": start_up, "make-test": make_test, "check": check, "interpreter": interpreter}
    if len(sys.argv) != 2 or sys.argv[1] not in wanted:
        sys.exit(f"usage: python tools/measure.py {' | '.join(wanted)}")
    wanted[sys.argv[1]]()

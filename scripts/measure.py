"""Measure the time of whole commands. These are not tests, because the times depend on the machine.

python scripts/measure.py start-up     start-up time of the command line
python scripts/measure.py make-test    `make test` in a fresh clone, including the installation
python scripts/measure.py check        `tilewright check` of one softmax file, at each depth
python scripts/measure.py interpreter  Tilewright's interpreter with all checks, and Triton's, on the same launches
python scripts/measure.py site         `tilewright report` of 10 000 records: build time, and load time in Chromium
"""

import itertools
import json
import os
import shutil
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
        seconds(command, **quiet)  # warm the bytecode and file caches
        times = sorted(1e3 * seconds(command, **quiet) for _ in range(RUNS))
        print(f"tilewright {words:10} median {statistics.median(times):4.0f} ms, {times[0]:.0f} to {times[-1]:.0f} ms")


def check() -> None:
    file = ROOT / "tests" / "submissions" / "honest" / "triton_one_pass.py"
    quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"PYTHONPATH": str(ROOT / "src")}}
    for depth in ([], ["--quick"], ["--full"]):
        command = [sys.executable, "-m", "tilewright", "check", "softmax", str(file), *depth]
        times = sorted(seconds(command, **quiet) for _ in range(3))
        print(f"check softmax FILE {' '.join(depth):8} {times[0]:.1f} to {times[-1]:.1f} s")


def make_test() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        print(f"make test in a fresh clone: {seconds(['make', '-C', folder, 'test']):.0f} s")


# Op, kernel and case, in float32: Triton's own interpreter is wrong in bfloat16 (and needs numpy before 2.4).
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
    from tilewright.workbench.audit import audit
    call = lambda: audit(fn, *args)
else:
    call = lambda: fn(*args)
call()
times = []
for _ in range(3):
    begin = time.perf_counter()
    call()
    times.append(time.perf_counter() - begin)
print(statistics.median(times))
"""


def interpreter() -> None:
    for name, kernel, point in INTERPRETED:
        times = {}
        for how, more in (("stock", {"TRITON_INTERPRET": "1"}), ("audited", {})):
            environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | more
            command = [sys.executable, "-c", RUN, how, name, kernel, json.dumps(point)]
            done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
            times[how] = float(done.stdout)
        case = ",".join(f"{k}={v}" for k, v in point.items())
        print(
            f"{name + ' ' + kernel:26} {case:48} Triton {times['stock']:7.3f} s, Tilewright with audit "
            f"{times['audited']:6.3f} s: speedup {times['stock'] / times['audited']:5.1f}"
        )


SITE = 10_000  # records
OPENED = "const [page] = performance.getEntriesByType('navigation'); return page.loadEventEnd"


def site() -> None:
    from selenium import webdriver

    with tempfile.TemporaryDirectory() as folder:
        records, out = Path(folder) / "records.jsonl", Path(folder) / "site"
        records.write_text("".join(json.dumps(r) + "\n" for r in itertools.islice(synthetic_records(), SITE)))
        quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"PYTHONPATH": str(ROOT / "src")}}
        command = [sys.executable, "-m", "tilewright", "report", str(records), "--out", str(out)]
        times = sorted(seconds(command, **quiet) for _ in range(3))
        print(f"report of {SITE} records: built in {times[0]:.1f} to {times[-1]:.1f} s, including process start")
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"):
            options.add_argument(f"--{flag}")
        with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as browser:
            for name in ("index", "softmax", "roofline"):
                times = []
                for _ in range(5):
                    browser.get(
                        (out / f"{name}.html").as_uri()
                    )  # returns after the load event, when the charts are drawn
                    times.append(browser.execute_script(OPENED))
                print(
                    f"{name}.html: loaded in {min(times) / 1e3:.2f} to {max(times) / 1e3:.2f} s, including the charts"
                )


def synthetic_records():
    """Yield timings of all ops and kernels, in every direction and dtype, on two GPUs."""
    from tilewright import record, source

    ceilings = {"copy": 4.2e12, "read": 4.4e12, "write": 4.1e12, "l2": 9e12, "fp32": 5.2e13, "special": 4e12}
    ceilings |= {f"tensor.{name}": 7e14 for name in ("bfloat16", "float16", "tf32", "int8")}
    versions = {"tilewright": "0.1.0", "python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
    axes = (("h200", "h100-sxm"), ("forward", "backward", "both"), ("bfloat16", "float16", "float32"))
    for step in itertools.count(8):
        for op, gpu, direction, dtype in itertools.product(source.op_files(), *axes):
            for place, kernel in enumerate(source.kernels(op)):
                us = 2.0**step / 1e3 * (3 - 0.3 * place) + 5
                elements = 2**step * 1024
                content = {
                    "case": {"M": 1024, "N": 2**step},
                    "dtype": dtype,
                    "direction": direction,
                    "cost": {"read": 2 * elements, "written": 2 * elements, "flops": {"fp32": 4 * elements}},
                    "verdict": "right",
                    "reason": "",
                    "is_baseline": place < 3,
                    "calls": 1,
                    "samples_us": [round(us * (1 + k % 7 / 100), 3) for k in range(50)],
                    "median_us": us,
                    "interval_us": [0.99 * us, 1.02 * us],
                    "against": {"kernel": "eager", "ratio": 1.2, "interval": [1.1, 1.3]},
                    "host_us": 9.0,
                    "extra_bytes": 0,
                    "state": {"sm_clock_mhz": [1900, 1980], "throttled": []},
                    "timer": {},
                    "ceilings": ceilings,
                    "device": {"gpu": gpu, "name": f"NVIDIA {gpu.upper()}", "driver": "580.1"},
                    "versions": versions,
                }
                yield record.stamp("timing", op, kernel, source.kernel_hash(op, kernel) or "", **content)


if __name__ == "__main__":
    wanted = {"start-up": start_up, "make-test": make_test, "check": check, "interpreter": interpreter, "site": site}
    if len(sys.argv) != 2 or sys.argv[1] not in wanted:
        sys.exit(__doc__)
    wanted[sys.argv[1]]()

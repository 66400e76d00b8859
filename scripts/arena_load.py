"""Load an arena, kill its server and its workers with SIGKILL, and count what was lost or stored twice.

    python scripts/arena_load.py --submissions 1000

The server, its database, the leases and the worker's loop are the real ones. The judge is not: it takes a few
milliseconds and accepts everything, since the queue is measured here and not the verifier.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tilewright.arena.client import Client
from tilewright.arena.server import open_store
from tilewright.arena.worker import Worker
from tilewright.errors import TilewrightError

BOARD = "h200 predicted"
PROBLEM = {
    "name": "softmax", "kind": "op", "description": "", "files": {"entry": "softmax"}, "cases": ["M=4,N=8"],
    "dtype": "bfloat16", "boards": [BOARD], "rule": "geomean", "threshold": 1.0, "deadline": "", "private": False,
}  # fmt: skip
LEASE_SECONDS = 3.0


def work(address: str, log: Path) -> None:
    """Run a worker whose judge takes milliseconds, and write down every job it judges."""

    def judge(job: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
        report("timing")
        time.sleep(random.uniform(0.002, 0.01))
        with log.open("a") as file:
            file.write(f"{job['job']}\n")
        us = random.uniform(10.0, 1000.0)
        times = {"us": us, "low": us, "high": us}
        case = {"case": "M=4,N=8", "dtype": "bfloat16", "floor_us": 5.0, "eager_us": 20.0, "compile_us": None, **times}
        timing = {"kind": "predicted", "cases": [case], "share": 5.0 / us, "over_eager": 20.0 / us, **times}
        return {"ranked": True, "reason": "", "leader": None, "timing": timing | {"over_compile": None}}

    with Client(address) as client:
        Worker(client, judge, say=lambda line: None).run(threading.Event())


class Processes:
    """The server and the workers, which are killed and started again."""

    def __init__(self, folder: Path, workers: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address, self.log, self.kills = (
            f"http://127.0.0.1:{port}",
            folder / "judged.txt",
            {"server": 0, "worker": 0},
        )
        serve = ["-m", "tilewright", "arena", "serve", "--data", str(folder), "--port", str(port), "--workers", "0"]
        self._commands = {"server": [*serve, "--lease", str(LEASE_SECONDS)]}
        self._commands |= {f"worker {n}": [__file__, "--work", self.address, str(self.log)] for n in range(workers)}
        self._running = {name: self._start(name) for name in self._commands}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *self._commands[name]], stdout=subprocess.DEVNULL)

    def kill(self, kind: str) -> None:
        name = random.choice([name for name in self._running if name.startswith(kind)])
        self._running[name].send_signal(signal.SIGKILL)
        self._running[name].wait()
        self.kills[kind] += 1
        self._running[name] = self._start(name)

    def end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


def submit_all(address: str, count: int) -> int:
    """Submit from four threads; a request that fails because the server is down is repeated."""

    def one(number: int) -> None:
        while True:
            try:
                with Client(address) as client:
                    client.submit("softmax", f"x = {number}\n")
                return
            except TilewrightError:
                time.sleep(0.1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(count)))
    return count


def read_pages(address: str, ending: threading.Event, seconds: list[float], failures: list[str]) -> None:
    with httpx.Client(base_url=address, timeout=30.0, trust_env=False) as client:
        while not ending.is_set():
            started = time.perf_counter()
            try:
                status = client.get(f"/problems/softmax/boards/{BOARD}").status_code
                (seconds.append(time.perf_counter() - started) if status == 200 else failures.append(str(status)))
            except httpx.HTTPError as error:  # the server was just killed
                failures.append(type(error).__name__)
                time.sleep(0.2)
            ending.wait(random.uniform(0.5, 1.5))  # a reader looks at a page before the next one


def run(count: int, workers: int, kills: int, readers: int) -> dict[str, Any]:
    """Return the figures of a run; raise AssertionError if a submission was lost or stored twice."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = open_store(folder)
        store.add_problem(PROBLEM)
        store.close()
        processes, ending = Processes(folder, workers), threading.Event()
        seconds: list[float] = []
        failures: list[str] = []
        arguments = (processes.address, ending, seconds, failures)
        threads = [threading.Thread(target=read_pages, args=arguments) for _ in range(readers)]
        started = time.monotonic()
        try:
            submitting = threading.Thread(target=submit_all, args=(processes.address, count))
            submitting.start()
            for thread in threads:
                thread.start()
            for number in range(kills):
                _wait_until(folder, lambda done, n=number: done >= (n + 0.5) * count / kills)
                processes.kill("worker")
                processes.kill("server")
            submitting.join()
            _wait_until(folder, lambda done: done >= count)
        finally:
            ending.set()
            for thread in threads:
                thread.join()
            processes.end()
        took = time.monotonic() - started
        figures = _figures(folder, count) | {"seconds": round(took, 1), "kills": processes.kills}
        judged = processes.log.read_text().split()
        figures["judged again after a kill"] = len(judged) - len(set(judged))
        if seconds:
            figures["pages"] = len(seconds)
            figures["page ms, median"] = round(1e3 * statistics.median(seconds), 1)
            figures["page ms, 95 %"] = round(1e3 * statistics.quantiles(seconds, n=20)[-1], 1)
            figures["requests during a restart"] = len(failures)
        return figures


def _figures(folder: Path, count: int) -> dict[str, Any]:
    database = sqlite3.connect(folder / "arena.sqlite")
    one = lambda query: database.execute(query).fetchone()[0]
    ranked, entries = one("select count(*) from jobs where state = 'ranked'"), one("select count(*) from entries")
    submissions, jobs = one("select count(*) from submissions"), one("select count(distinct job) from entries")
    sound = one("pragma integrity_check")
    database.close()
    assert submissions == ranked == entries == jobs == count, (submissions, ranked, entries, jobs)
    assert sound == "ok", sound
    return {"submissions": submissions, "ranked": ranked, "entries": entries}


def _wait_until(folder: Path, is_reached: Callable[[int], bool]) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        database = sqlite3.connect(folder / "arena.sqlite", timeout=30)
        done = database.execute("select count(*) from jobs where state = 'ranked'").fetchone()[0]
        database.close()
        if is_reached(done):
            return
        time.sleep(0.05)
    raise TimeoutError("the queue does not move")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--submissions", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5, help="of the server, and as many of a worker")
    parser.add_argument("--readers", type=int, default=50, help="threads that read the board meanwhile")
    parser.add_argument("--work", nargs=2, metavar=("URL", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work[0], Path(given.work[1]))
        return
    for name, value in run(given.submissions, given.workers, given.kills, given.readers).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()

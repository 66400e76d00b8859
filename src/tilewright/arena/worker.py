"""A worker: pulls jobs from an arena and has them judged in a process of its own.

This process only talks to the server. The judge's process can hang, crash or fill its folder: it is killed, and the job
is refused or given back, while the queue continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tilewright import settings
from tilewright.arena.client import Client
from tilewright.arena.errors import ArenaNotReachable, ArenaRefused, LeaseLost
from tilewright.arena.service import printable

BOOTSTRAP = "import sys; sys.path[:] = [p for p in sys.path if p]; from tilewright.arena.judge import serve; serve()"
IDLE_SECONDS = 2.0
MAX_IDLE_SECONDS = 30.0
JOB_SECONDS = 1800.0
MAX_SCRATCH = 4 * 2**30  # bytes that the files of one job may take
MIN_FREE = 2**30  # bytes of free disk that a job needs
SANDBOX_USERS = 0x70000000  # the first user id that a sandbox switches to
SHARED_MEMORY = "/dev/shm"
Job = dict[str, Any]


class JudgeLost(Exception):
    """The judge's process ended or was killed. `is_final`: judging the submission again would end in the same way."""

    def __init__(self, reason: str, is_final: bool = False):
        super().__init__(reason)
        self.is_final = is_final


class NotNow(Exception):
    """The server or this machine cannot continue now, but may later."""


class Judging(Protocol):
    """Judges one job and returns its result; `report` gets each new state."""

    def __call__(self, job: Job, report: Callable[[str], None]) -> dict[str, Any]: ...


class JudgeProcess:
    """A process that judges jobs one after the other; started on first use, and again after it was killed."""

    def __init__(self, options: dict[str, Any], seconds: float = JOB_SECONDS, scratch: int = MAX_SCRATCH):
        self._options, self._seconds, self._max_scratch = options, seconds, scratch
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._buffer = b""

    def __call__(self, job: Job, report: Callable[[str], None]) -> dict[str, Any]:
        process = self._start()
        assert process.stdin
        deadline = time.monotonic() + self._seconds
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            while True:
                answer = json.loads(self._line(deadline))
                if "result" in answer:
                    return answer["result"]
                if "unable" in answer:
                    raise NotNow(f"this machine cannot judge ({answer['unable']})")
                if "fault" in answer:
                    raise JudgeLost(f"the judge failed: {answer['fault']}")
                report(answer["state"])
        except (OSError, ValueError) as error:
            raise JudgeLost(f"the judge's process ended ({error})") from None
        finally:
            if sys.exc_info()[0] is not None:
                self.close()
            _shared_memory(process.pid)

    def close(self) -> None:
        process, self._process = self._process, None
        if process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe:
                        pipe.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._folder = Path(tempfile.mkdtemp(prefix="tilewright-judge-"))
            environment = settings.worker_environment(simulate=False) | {"TMPDIR": str(self._folder)}
            self._buffer = b""
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, json.dumps(self._options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=settings.without_secrets(environment),
                start_new_session=True,
            )
        return self._process

    def _line(self, deadline: float) -> bytes:
        """Return the next line of the judge. Raise if it is late, ends, or its files grow too large."""
        assert self._process
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if time.monotonic() > deadline:
                    raise JudgeLost(f"not judged within {self._seconds:.0f} s", is_final=True)
                if (used := _disk_usage(self._folder) + _shared_memory(self._process.pid)) > self._max_scratch:
                    raise JudgeLost(f"wrote {used / 2**30:.1f} GiB to disk and shared memory", is_final=True)
                if selector.select(0.5):
                    if not (part := os.read(self._process.stdout.fileno(), 1 << 16)):
                        raise JudgeLost(f"the judge's process ended with code {self._process.wait()}")
                    self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


@dataclass
class Worker:
    client: Client
    judge: Judging
    name: str = ""
    gpu: str | None = None  # None: predicts times
    say: Callable[[str], None] = print

    def run(self, ending: threading.Event, *, once: bool = False) -> int:
        """Judge jobs until `ending` is set; with `once`, until there is none. Return how many were judged."""
        idle, count = IDLE_SECONDS, 0
        request = {"worker": self.name or socket.gethostname(), "gpu": self.gpu}
        while not ending.is_set():
            try:
                _require_disk()
                job = self._request("/api/jobs/lease", request)["job"]
                count += bool(job) and self._judge(job, ending)
            except NotNow as reason:
                self.say(f"{reason}; trying again in {idle:.0f} s")
                ending.wait(idle)
                idle = min(2 * idle, MAX_IDLE_SECONDS)
                continue
            idle = IDLE_SECONDS
            if job is None:
                if once:
                    return count
                ending.wait(IDLE_SECONDS)
        return count

    def _judge(self, job: Job, ending: threading.Event) -> bool:
        done = threading.Event()
        state: list[str | None] = [None]

        def report(new: str | None) -> None:
            state[0] = new
            with contextlib.suppress(NotNow, ArenaRefused, LeaseLost):  # the result tells
                self._post(job, "renew", {"state": new})

        def renew() -> None:
            while not done.wait(job["renew_seconds"]):
                report(state[0])

        renewing = threading.Thread(target=renew, daemon=True)
        renewing.start()
        try:
            result = self.judge(job, report)
        except JudgeLost as lost:
            if not lost.is_final:
                self._deliver(job, "back", {"reason": str(lost)}, ending)
                self.say(f"job {job['job']}: given back, {lost}")
                return False
            result = {"ranked": False, "reason": str(lost)}
        except (KeyboardInterrupt, NotNow) as error:
            # A machine that fails before it has begun is at fault; later, the submission may have broken it.
            counts, reason = isinstance(error, NotNow) and bool(state[0]), str(error) or "its worker was stopped"
            with contextlib.suppress(NotNow, ArenaRefused, LeaseLost):
                self._post(job, "back", {"reason": reason, "counts": counts})
            raise
        finally:
            done.set()
        self._deliver(job, "result", {"result": result}, ending)
        return True

    def _deliver(self, job: Job, what: str, body: dict[str, Any], ending: threading.Event) -> None:
        """Report the result until the server has stored it, also if it restarts or its disk is full."""
        idle = IDLE_SECONDS
        while True:
            try:
                answer = self._post(job, what, body)
            except (LeaseLost, ArenaRefused) as error:
                return self.say(f"job {job['job']}: {error}")
            except NotNow as reason:
                self.say(f"job {job['job']}: {reason}; trying again in {idle:.0f} s")
                if ending.wait(idle):
                    return None
                idle = min(2 * idle, MAX_IDLE_SECONDS)
            else:
                if what == "result":
                    self.say(printable(f"job {job['job']}: {answer['state']} {body['result'].get('reason', '')}"))
                return None

    def _post(self, job: Job, what: str, body: dict[str, Any]) -> Any:
        return self._request(f"/api/jobs/{job['job']}/{what}", {"lease": job["lease"], **body})

    def _request(self, address: str, body: dict[str, Any]) -> Any:
        try:
            return self.client.request("POST", address, body)
        except ArenaNotReachable as error:
            raise NotNow(str(error)) from None
        except ArenaRefused as error:
            if error.status >= 500:
                raise NotNow(str(error)) from None
            raise


def _require_disk() -> None:
    folder = tempfile.gettempdir()
    if (free := shutil.disk_usage(folder).free) < MIN_FREE:
        raise NotNow(f"{folder} has {free / 2**20:.0f} MiB free, and a job needs {MIN_FREE / 2**20:.0f} MiB")


def _disk_usage(folder: Path) -> int:
    """Return the bytes that files below a folder take on disk; files vanish while it looks."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def _shared_memory(judge: int) -> int:
    """Return the bytes that the sandboxed processes of a judge take in /dev/shm; remove what ended ones left there.

    A sandbox switches to a user of its own, whose id tells its process; without root there are no such users.
    """
    total = 0
    for entry in os.scandir(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else ():
        with contextlib.suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            if found.st_uid >= SANDBOX_USERS and entry.is_file(follow_symlinks=False):
                parents = _parents(found.st_uid - SANDBOX_USERS)
                total += found.st_blocks * 512 if judge in parents else 0
                if not parents:
                    os.unlink(entry.path)
    return total


def _parents(process: int) -> list[int]:
    """Return the ids of the processes from whom this one descends; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        while process > 1:
            status = Path(f"/proc/{process}/stat").read_text(errors="replace")
            process = int(status.rpartition(")")[2].split()[1])
            found.append(process)
    return found

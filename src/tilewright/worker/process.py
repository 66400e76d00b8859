"""The child process: started, and ended. Knows nothing of torch, so that it can start while the parent imports that."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile

from tilewright import settings

# Without the working folder in sys.path: a user's triton.py there must not hide the real one.
BOOTSTRAP = "import sys; sys.path[:] = [p for p in sys.path if p]; from tilewright.worker.child import serve; serve()"
MEMORY = 8 * 2**30  # bytes that a user's file may use, without a GPU


class Process:
    def __init__(self, device: str, memory: int = MEMORY):
        self.device, self.memory = device, memory
        self.is_awake = False
        self.folder = tempfile.mkdtemp(prefix="tilewright-")  # all that it may write to
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, device, str(memory), self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=settings.worker_environment(simulate=device == "cpu", folder=self.folder),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid, self.stdin, self.stdout = self._process.pid, self._process.stdin, self._process.stdout
        os.set_blocking(self.stdin.fileno(), False)  # a child that does not read must not hold us up

    def obituary(self) -> str:
        """Why it died, in one line."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.returncode
        if code is not None and code < 0:
            return f"the process was killed by {signal.Signals(-code).name}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the process ended with code {code}" + (f": {lines[-1]}" if lines else "")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self.stdin, self.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_early: list[Process] = []


def start_early(device: str) -> None:
    """Start one that the next `take` will have, while other things are done."""
    _early.append(Process(device))
    atexit.register(lambda: [process.end() for process in _early])


def take(device: str, memory: int) -> Process:
    if _early and (_early[0].device, _early[0].memory) == (device, memory):
        return _early.pop()
    return Process(device, memory)

"""Child processes: started, and ended. Knows nothing of torch, so that they can start while the parent imports that."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from tilewright import settings

# Without the working folder in sys.path: a user's triton.py there must not hide the real one.
BOOTSTRAP = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from tilewright.worker.forkserver import serve; serve()"
)
MEMORY = 8 * 2**30  # bytes that a user's file may use, without a GPU
START_SECONDS = 120.0  # importing torch on a cold, loaded machine
END_SECONDS = 10.0  # for a process that is ending


class Nursery:
    """A process that has imported torch, and forks others in milliseconds."""

    def __init__(self, device: str, environment: dict[str, str]):
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, device, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.end)

    @property
    def is_alive(self) -> bool:
        """In a fork of the process that started it, it is not."""
        return self._process.poll() is None

    def ask(self, message: dict[str, Any], files: tuple[int, ...] = ()) -> Any:
        """Raises EOFError, with the reason, if it has ended."""
        try:
            with self._lock:
                socket.send_fds(self._control, [json.dumps(message).encode()], files)
                answer = self._control.recv(64)
        except TimeoutError:
            self.end()
            raise EOFError(f"torch was not imported within {START_SECONDS:.0f} s") from None
        except OSError:
            answer = b""
        except BaseException:  # stopped half-way: the answer that is still to come must not be taken for the next one
            self.end()
            raise
        if not answer:
            raise EOFError(_told(self._process.wait(), self._log))
        return json.loads(answer)

    def end(self) -> None:
        if os.getpid() == self._owner:
            atexit.unregister(self.end)
            self._process.kill()
            self._process.wait()
            self._control.close()
            self._log.close()


_nurseries: dict[tuple[str, str], Nursery] = {}


def nursery(device: str) -> Nursery:
    """Begins to start one, which takes a second or more, if there is none."""
    environment = settings.worker_environment(device == "cpu")
    key = device, environment["PYTHONPATH"]
    found = _nurseries.get(key)
    if found and not found.is_alive:
        found.end()
    if found is None or not found.is_alive:
        found = _nurseries[key] = Nursery(device, environment)
    return found


class Process:
    """One to run kernels in. Raises EOFError where none can be started."""

    def __init__(self, device: str, memory: int = MEMORY):
        self._nursery = nursery(device)
        self._code: int | None = None
        self.folder = tempfile.mkdtemp(prefix="tilewright-")  # all that it may write to
        self.environment = settings.worker_environment(device == "cpu") | settings.folder_of_worker(self.folder)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        (theirs_in, stdin), (stdout, theirs_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        os.set_blocking(stdin, False)  # a child that does not read must not hold us up
        try:
            asked = {"memory": memory, "folder": self.folder}
            self.pid: int | None = self._nursery.ask(asked, (theirs_in, theirs_out, self._log.fileno()))
        except EOFError:
            self.pid = None
            self.end()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def obituary(self) -> str:
        """Why it died, in one line."""
        return _told(self._exit_code(), self._log)

    def end(self) -> None:
        try:
            if self.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._exit_code()
        finally:
            for file in (self.stdin, self.stdout, self._log):
                with contextlib.suppress(BrokenPipeError):
                    file.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _exit_code(self) -> int | None:
        if self._code is None:
            with contextlib.suppress(EOFError):
                self._code = self._nursery.ask({"wait": self.pid, "seconds": END_SECONDS})
        return self._code


def _told(code: int | None, log: IO[bytes]) -> str:
    """How a process ended, in one line."""
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    log.seek(max(0, log.seek(0, os.SEEK_END) - 4000))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return f"the process ended with code {code}" + (f": {lines[-1]}" if lines else "")

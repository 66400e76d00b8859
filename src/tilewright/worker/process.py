"""Start and end child processes. Does not import torch, so that they can start while the parent imports it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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

# Removes the working folder from sys.path: a triton.py there must not shadow the real one.
BOOTSTRAP = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from tilewright.worker.forkserver import serve; serve()"
)
MEMORY_LIMIT = 8 * 2**30  # bytes for a user's file, without a GPU
START_SECONDS = 120.0  # importing torch on a cold, loaded machine
END_SECONDS = 10.0  # to wait for a killed process


class ForkServer:
    """A process that has imported torch and forks children in milliseconds."""

    def __init__(self, device: str, environment: dict[str, str]):
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, device, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                pass_fds=[child_end.fileno()],
                start_new_session=True,
            )
        atexit.register(self.end)

    @property
    def is_alive(self) -> bool:
        """Return whether the server runs, as seen by the process that started it; False in a fork of that process."""
        return self._process.poll() is None

    def request(self, message: dict[str, Any], files: tuple[int, ...] = ()) -> Any:
        """Send a message and return the reply. Raises EOFError, with the reason, if the server has ended."""
        try:
            with self._lock:
                socket.send_fds(self._control, [json.dumps(message).encode()], files)
                reply = self._control.recv(64)
        except TimeoutError:
            self.end()
            raise EOFError(f"torch was not imported within {START_SECONDS:.0f} s") from None
        except OSError:
            reply = b""
        except BaseException:  # interrupted: the pending reply must not be taken for the next one
            self.end()
            raise
        if not reply:
            raise EOFError(_describe_exit(self._process.wait(), self._log))
        return json.loads(reply)

    def end(self) -> None:
        if os.getpid() == self._owner:
            atexit.unregister(self.end)
            self._process.kill()
            self._process.wait()
            self._control.close()
            self._log.close()


_fork_servers: dict[tuple[str, str], ForkServer] = {}
_starting = threading.Lock()  # two threads must not start two servers for one device


def fork_server(device: str) -> ForkServer:
    """Return the fork server of a device; start one if there is none, which takes a second or more."""
    environment = settings.worker_environment(device == "cpu")
    key = device, environment["PYTHONPATH"]
    with _starting:
        found = _fork_servers.get(key)
        if found and not found.is_alive:
            found.end()
        if found is None or not found.is_alive:
            found = _fork_servers[key] = ForkServer(device, environment)
        return found


class Process:
    """A child process to run kernels in. Raises EOFError if none can be started."""

    def __init__(self, device: str, memory: int = MEMORY_LIMIT, shared: int | None = None):
        """Start a process that may use this much memory, and inherits `shared`, the descriptor of shared memory."""
        self._fork_server = fork_server(device)
        self._code: int | None = None
        self.folder = tempfile.mkdtemp(prefix="tilewright-")  # the only folder it may write to
        self.environment = settings.worker_environment(device == "cpu") | settings.redirected_caches(self.folder)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        (child_in, stdin), (stdout, child_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        os.set_blocking(stdin, False)  # a child that does not read must not block the parent
        try:
            message = {"memory": memory, "folder": self.folder}
            files = (child_in, child_out, self._log.fileno(), *([] if shared is None else [shared]))
            self.pid: int | None = self._fork_server.request(message, files)
        except EOFError:
            self.pid = None
            self.end()
            raise
        finally:
            os.close(child_in)
            os.close(child_out)

    def exit_reason(self) -> str:
        """Return how the process ended, in one line."""
        return _describe_exit(self._exit_code(), self._log)

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
                self._code = self._fork_server.request({"wait": self.pid, "seconds": END_SECONDS})
        return self._code


def die_with_parent() -> None:
    """Have Linux kill this process when its parent, or the thread that started it, ends for whatever reason."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _describe_exit(code: int | None, log: IO[bytes]) -> str:
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    log.seek(max(0, log.seek(0, os.SEEK_END) - 4000))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return f"the process ended with code {code}" + (f": {lines[-1]}" if lines else "")

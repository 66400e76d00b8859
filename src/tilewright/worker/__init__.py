"""A kernel in a process of its own: for Numba's simulator, whose switch is read at import, and for users' files.

The child's own stdout is turned away from the pipe, and a child that crashes, hangs or outgrows its memory costs only
itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewright import settings
from tilewright.worker import messages, wire
from tilewright.worker.memory import Placed
from tilewright.worker.stage import KernelFailed, Reply, Request

# Without the working folder in sys.path: a user's triton.py there must not hide the real one.
BOOTSTRAP = "import sys; sys.path[:] = [p for p in sys.path if p]; from tilewright.worker.child import serve; serve()"
START_SECONDS = 120.0  # importing torch on a cold, loaded machine
FAILURES = ("wrong", "crashed", "timeout", "tampered", "unsupported", "usage")
SMALL = 2**20  # bytes beyond what was asked for that a reply may have

__all__ = ["KernelFailed", "Placed", "Reply", "Request", "Worker"]


class Worker:
    """A child process that runs kernels on inputs sent to it."""

    def __init__(self, *, device: str, seconds: float = 60.0, memory: int = 8 * 2**30):
        self.device = device
        self.seconds = seconds
        self._memory = memory
        self.isolation: list[str] = []  # the layers that hold a user's file
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: dict[str, Any] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to start the process, which takes seconds, while other things are done."""
        if self._process is None:
            self._process = self._start()

    def load(
        self,
        op: str | None,
        *,
        kernel: str | None = None,
        file: Path | None = None,
        solution: dict[str, Any] | None = None,
    ) -> None:
        """Choose what `call` runs: a kernel of the project, that of a user's file, or its solution of a problem."""
        wanted = {"op": op, "kernel": kernel, "file": str(file.resolve()) if file else None, "solution": solution}
        if self._loaded != wanted or self._process is None:
            self._loaded = wanted
            self._load()

    def call(self, request: Request) -> Reply:
        if self._loaded is not None and self._process is None:  # the one before died: start again
            self._load()
        plain, tensors = messages.of_request(request)
        sizes = [prod(like.shape) * like.dtype.itemsize for like in request.wanted]
        most = sum(sizes) + 2 * sum(len(t) for t in tensors) + SMALL
        answer, results = self._exchange({"do": "call", "request": plain}, tensors, self.seconds, most)
        try:
            return messages.reply(answer, results)
        except (KeyError, TypeError, ValueError, StopIteration):
            raise self._tampered() from None

    def blocks(self, numbers: Sequence[int], size: int) -> list[list[Tensor]]:
        """Parts of the results of a call whose arguments were repeated."""
        message = {"do": "blocks", "numbers": list(numbers), "size": size}
        _, results = self._exchange(message, [], self.seconds, 2**32)
        each = len(results) // len(numbers)
        return [results[i * each : (i + 1) * each] for i in range(len(numbers))]

    def _load(self) -> None:
        if self._process is None:
            self._process = self._start()
        if not self._awake:
            self._exchange({"do": "wake"}, [], START_SECONDS)  # so that the limit below is the file's own
            self._awake = True
        answer, _ = self._exchange({"do": "load", **(self._loaded or {})}, [], self.seconds)
        self.isolation = answer["isolation"]

    def close(self) -> None:
        self._kill()
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._folder = tempfile.mkdtemp(prefix="tilewright-")
        self._awake = False
        process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, self.device, str(self._memory), self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=settings.worker_environment(simulate=self.device == "cpu", folder=self._folder),
            start_new_session=True,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a child that does not read must not hold us up
        return process

    def _exchange(
        self, message: dict[str, Any], tensors: list[Tensor], seconds: float, most: int = SMALL
    ) -> tuple[Any, list[Tensor]]:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        token = secrets.token_bytes(16)
        try:
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            wire.send(stdin, token, message, tensors, deadline)
            _, reply, outputs = wire.receive(stdout, deadline, token, most)
        except TimeoutError:
            self._kill()
            raise KernelFailed("timeout", f"no answer within {seconds:.0f} s") from None
        except EOFError:
            raise KernelFailed("crashed", self._obituary()) from None
        except wire.NotAReply:
            raise self._tampered() from None
        if not isinstance(reply, dict) or ("error" in reply and reply.get("kind") not in FAILURES):
            raise self._tampered()
        if "error" in reply:
            raise KernelFailed(reply["kind"], str(reply["error"]))
        return reply, outputs

    def _tampered(self) -> KernelFailed:
        self._kill()
        return KernelFailed("tampered", "what came over the pipe of replies was not written by Tilewright")

    def _obituary(self) -> str:
        """Why the child died, in one line."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.returncode
        self._kill()
        if code is not None and code < 0:
            return f"the process was killed by {signal.Signals(-code).name}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the process ended with code {code}" + (f": {lines[-1]}" if lines else "")

    def _kill(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close() if pipe else None
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

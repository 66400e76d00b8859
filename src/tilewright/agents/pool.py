"""Processes that run tool calls, several at once; one that hangs or crashes is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import IO, Any

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from tilewright import settings
from tilewright.errors import CallFailed, TilewrightError

# Removes the working folder from sys.path: a triton.py there must not shadow the real one.
BOOTSTRAP = "import sys; sys.path[:] = [p for p in sys.path if p]; from tilewright.agents.host import serve; serve()"
MAX_REPLY_BYTES = 2**24
LOG_TAIL = 4000  # bytes read for the reason of a crash

OnProgress = Callable[[int, "int | None", str], Awaitable[None]]


class ToolFailed(TilewrightError):
    """A tool call that the agent has to change; the message is the tool's."""


class Host:
    """One process. It runs one call at a time."""

    def __init__(self, process: anyio.abc.Process, log: IO[bytes]):
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._log = process, log
        self._requests, self._replies = process.stdin, BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def start(cls, command: Sequence[str]) -> Host:
        log = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        environment = settings.without_secrets(settings.worker_environment(simulate=False))
        process = await anyio.open_process(
            [*command], stdin=subprocess.PIPE, stderr=log, env=environment, start_new_session=True
        )
        return cls(process, log)

    async def call(self, tool: str, arguments: dict[str, Any], on_progress: OnProgress) -> Any:
        """Return the result of a tool. Raises CallFailed if the process ends before it answers."""
        request = json.dumps({"tool": tool, "arguments": arguments}) + "\n"
        try:
            await self._requests.send(request.encode())
            while True:
                reply = json.loads(await self._replies.receive_until(b"\n", MAX_REPLY_BYTES))
                if "progress" in reply:
                    await on_progress(*reply["progress"])
                elif "error" in reply:
                    raise ToolFailed(reply["error"])
                else:
                    return reply["result"]
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.IncompleteRead, anyio.ClosedResourceError):
            raise CallFailed(tool, await self._exit_reason()) from None

    async def end(self) -> None:
        """Kill the process with everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.aclose()
        self._log.close()

    async def _exit_reason(self) -> str:
        code = await self._process.wait()
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with code {code}" + (f": {lines[-1]}" if lines else "")


class Pool:
    """Runs up to `jobs` calls at once, each for at most `seconds`."""

    def __init__(self, jobs: int, seconds: float, command: Sequence[str] = (sys.executable, "-c", BOOTSTRAP)):
        self.seconds = seconds
        self._command = command
        self._slots = anyio.Semaphore(jobs)
        self._idle: list[Host] = []

    async def warm(self) -> None:
        """Start one process, so that the first call does not wait for torch."""
        self._idle.append(await Host.start(self._command))

    async def call(self, tool: str, arguments: dict[str, Any], on_progress: OnProgress) -> Any:
        async with self._slots:
            host = self._idle.pop() if self._idle else await Host.start(self._command)
            try:
                with anyio.fail_after(self.seconds):
                    result = await host.call(tool, arguments, on_progress)
            except ToolFailed:
                self._idle.append(host)
                raise
            except BaseException as error:  # too long, crashed, or cancelled by the client
                with anyio.CancelScope(shield=True):
                    await host.end()
                if isinstance(error, TimeoutError):
                    raise CallFailed(tool, f"it took longer than {self.seconds:.0f} s") from None
                raise
            self._idle.append(host)
            return result

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().end()

"""The parent's side: what it asks a child process, and what it makes of the answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewright.worker import framing, messages, process
from tilewright.worker.execute import KernelFailed, Reply, Request
from tilewright.worker.timed_run import Lap

SECONDS = {"cpu": 60.0, "cuda": 180.0}  # for an answer; on a GPU the first may wait for compilers
FAILURES = ("wrong", "crashed", "timeout", "tampered", "unsupported", "memory", "usage")
SMALL = 2**20  # bytes beyond what was asked for that a reply may have
LARGEST_BLOCKS = 2**32  # bytes
NONSENSE = (
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    StopIteration,
)  # what reading an answer of another form raises


class Worker:
    """A child process that runs kernels on inputs sent to it. One that crashes, hangs or outgrows its memory costs only
    itself: the next call starts another."""

    def __init__(self, *, device: str, seconds: float | None = None, memory: int = process.MEMORY):
        self.device = device
        self.seconds = seconds or SECONDS[device]
        self._memory = memory
        self.isolation: list[str] = []  # the layers that hold a user's file
        self._process: process.Process | None = None
        self._loaded: dict[str, Any] = {}
        self._longest_lap = SMALL

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin what takes seconds, while other things are done."""
        process.nursery(self.device)

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
        if self._process is None:  # the one before died: start again
            self._load()
        plain, tensors = messages.of_request(request)
        most = _size(request) + 2 * sum(len(t) for t in tensors) + SMALL
        answer, results = self._exchange({"do": "call", "request": plain}, tensors, self.seconds, most)
        try:
            return messages.reply(answer, results)
        except NONSENSE:
            raise self._tampered() from None

    def blocks(self, numbers: Sequence[int], size: int) -> list[list[Tensor]]:
        """Parts of the results of a call whose arguments were repeated."""
        message = {"do": "blocks", "numbers": list(numbers), "size": size}
        _, results = self._exchange(message, [], self.seconds, LARGEST_BLOCKS)
        each = len(results) // len(numbers)
        return [results[i * each : (i + 1) * each] for i in range(len(numbers))]

    def begin(self, requests: Sequence[Request], direction: str) -> None:
        """Make ready to time what is loaded on the inputs of these requests; then `warm_up`, `aside`, `sample` and
        `results` of the last sample."""
        if self._process is None:
            self._load()
        plain, tensors = zip(*map(messages.of_request, requests), strict=True)
        self._longest_lap = SMALL + max(sum(len(t) for t in group) for group in tensors) + max(map(_size, requests))
        message = {"do": "begin", "requests": plain, "direction": direction}
        self._exchange(message, [t for group in tensors for t in group], self.seconds)

    def warm_up(self, calls: int = 1) -> float:
        answer, _ = self._ask({"do": "warm up", "calls": calls})
        try:
            return float(answer["us"])
        except NONSENSE:
            raise self._tampered() from None

    def sample(self, values: int | None = None) -> Lap:
        answer, _ = self._ask({"do": "sample", "values": values})
        try:
            return Lap(float(answer["us"]), bool(answer["is_queued"]))
        except NONSENSE:
            raise self._tampered() from None

    def results(self) -> list[Tensor | None]:
        answer, results = self._ask({"do": "results"})
        try:
            return messages.results(answer, results)
        except NONSENSE:
            raise self._tampered() from None

    def aside(self) -> tuple[float, int | None]:
        answer, _ = self._ask({"do": "aside"})
        try:
            extra = answer["extra_bytes"]
            return float(answer["host_us"]), None if extra is None else int(extra)
        except NONSENSE:
            raise self._tampered() from None

    def end(self) -> None:
        """Free what `begin` made."""
        if self._process is not None:
            self._ask({"do": "end"})

    def _ask(self, message: dict[str, Any]) -> tuple[Any, list[Tensor]]:
        if self._process is None:
            raise KernelFailed("crashed", "it ended the process in which it was timed")
        return self._exchange(message, [], self.seconds, self._longest_lap)

    def close(self) -> None:
        ended, self._process = self._process, None
        if ended is not None:
            ended.end()

    def _load(self) -> None:
        if self._process is None:
            try:
                self._process = process.Process(self.device, self._memory)
            except EOFError as ended:
                raise KernelFailed("crashed", str(ended)) from None
            self._exchange({"do": "wake", "environment": self._process.environment}, [], self.seconds)
        answer, _ = self._exchange({"do": "load", **self._loaded}, [], self.seconds)
        self.isolation = answer["isolation"]

    def _exchange(
        self, message: dict[str, Any], tensors: list[Tensor], seconds: float, most: int = SMALL
    ) -> tuple[Any, list[Tensor]]:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        token = secrets.token_bytes(framing.TOKEN)
        try:
            framing.send(self._process.stdin, token, message, tensors, deadline)
            _, reply, outputs = framing.receive(self._process.stdout, deadline, token, most)
        except TimeoutError:
            self.close()
            raise KernelFailed("timeout", f"no answer within {seconds:.0f} s") from None
        except EOFError:
            reason = self._process.obituary()
            self.close()
            raise KernelFailed("crashed", reason) from None
        except framing.NotAReply:
            raise self._tampered() from None
        if not isinstance(reply, dict) or ("error" in reply and reply.get("kind") not in FAILURES):
            raise self._tampered()
        if "error" in reply:
            if reply["kind"] == "crashed" and self.device == "cuda":
                self.close()  # after some errors a process can do nothing more on the GPU; the next call starts another
            raise KernelFailed(reply["kind"], str(reply["error"]))
        return reply, outputs

    def _tampered(self) -> KernelFailed:
        self.close()
        return KernelFailed("tampered", "what came over the pipe of replies was not written by Tilewright")


def _size(request: Request) -> int:
    """Bytes of the results."""
    return sum(prod(like.shape) * like.dtype.itemsize for like in request.wanted)

"""The parent's side of a worker: send requests to a child process and validate its replies."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewright.worker import framing, messages, process
from tilewright.worker.execute import KernelFailed, Reply, Request
from tilewright.worker.timed_run import TimedSample

SECONDS = {"cpu": 60.0, "cuda": 180.0}  # per reply; on a GPU the first one may wait for compilers
FAILURE_KINDS = ("wrong", "crashed", "timeout", "tampered", "unsupported", "memory", "usage")
REPLY_SLACK = 2**20  # bytes of a reply beyond the requested tensors
MAX_BLOCK_BYTES = 2**32
# What decoding a malformed reply raises.
MALFORMED_REPLY = (KeyError, TypeError, ValueError, OverflowError, StopIteration)


class Worker:
    """A child process that runs kernels on inputs sent to it.

    If it crashes, hangs or exceeds its memory, the next call starts another one.
    """

    def __init__(self, *, device: str, seconds: float | None = None, memory: int = process.MEMORY_LIMIT):
        self.device = device
        self.seconds = seconds or SECONDS[device]
        self._memory = memory
        self.isolation: list[str] = []  # the sandbox layers that confine a user's file
        self._process: process.Process | None = None
        self._loaded: dict[str, Any] = {}
        self._max_result_bytes = REPLY_SLACK

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the fork server in the background: it imports torch, which takes seconds."""
        process.fork_server(self.device)

    def load(
        self,
        op: str | None,
        *,
        kernel: str | None = None,
        file: Path | None = None,
        solution: dict[str, Any] | None = None,
    ) -> None:
        """Select what `call` runs: a registered kernel, a user's file, or a file's solution of a problem."""
        selected = {"op": op, "kernel": kernel, "file": str(file.resolve()) if file else None, "solution": solution}
        if self._loaded != selected or self._process is None:
            self._loaded = selected
            self._load()

    def call(self, request: Request) -> Reply:
        if self._process is None:  # the previous one died
            self._load()
        encoded, tensors = messages.encode_request(request)
        max_bytes = _output_bytes(request) + 2 * sum(len(t) for t in tensors) + REPLY_SLACK
        reply, results = self._exchange({"do": "call", "request": encoded}, tensors, max_bytes)
        with self._decoding():
            return messages.decode_reply(reply, results)

    def blocks(self, numbers: Sequence[int], size: int) -> list[list[Tensor]]:
        """Return blocks of rows from the outputs of a call with repeated arguments."""
        message = {"do": "blocks", "numbers": list(numbers), "size": size}
        _, results = self._exchange(message, [], MAX_BLOCK_BYTES)
        each = len(results) // len(numbers)
        return [results[i * each : (i + 1) * each] for i in range(len(numbers))]

    def begin(self, requests: Sequence[Request], direction: str) -> None:
        """Prepare to time the loaded kernel on the inputs of these requests.

        Call `warm_up`, `overhead` and `sample` next, and `results` for the outputs of the last sample.
        """
        if self._process is None:
            self._load()
        encoded, tensors = zip(*map(messages.encode_request, requests), strict=True)
        input_bytes = max(sum(len(t) for t in group) for group in tensors)
        self._max_result_bytes = REPLY_SLACK + input_bytes + max(map(_output_bytes, requests))
        message = {"do": "begin", "requests": encoded, "direction": direction}
        self._exchange(message, [t for group in tensors for t in group])

    def warm_up(self, calls: int = 1) -> float:
        reply, _ = self._exchange_timed({"do": "warm up", "calls": calls})
        with self._decoding():
            return float(reply["us"])

    def sample(self, values: int | None = None) -> TimedSample:
        reply, _ = self._exchange_timed({"do": "sample", "values": values})
        with self._decoding():
            return TimedSample(float(reply["us"]), bool(reply["is_queued"]))

    def results(self) -> list[Tensor | None]:
        reply, results = self._exchange_timed({"do": "results"})
        with self._decoding():
            return messages.decode_results(reply, results)

    def overhead(self) -> tuple[float, int | None]:
        reply, _ = self._exchange_timed({"do": "overhead"})
        with self._decoding():
            extra = reply["extra_bytes"]
            return float(reply["host_us"]), None if extra is None else int(extra)

    def end(self) -> None:
        """Free the memory that `begin` allocated."""
        if self._process is not None:
            self._exchange_timed({"do": "end"})

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
            self._exchange({"do": "init", "environment": self._process.environment}, [])
        reply, _ = self._exchange({"do": "load", **self._loaded}, [])
        self.isolation = reply["isolation"]

    def _exchange_timed(self, message: dict[str, Any]) -> tuple[Any, list[Tensor]]:
        if self._process is None:
            raise KernelFailed("crashed", "it ended the process in which it was timed")
        return self._exchange(message, [], self._max_result_bytes)

    def _exchange(
        self, message: dict[str, Any], tensors: list[Tensor], max_bytes: int = REPLY_SLACK
    ) -> tuple[Any, list[Tensor]]:
        assert self._process is not None
        deadline = time.monotonic() + self.seconds
        token = secrets.token_bytes(framing.TOKEN_BYTES)
        try:
            framing.send(self._process.stdin, token, message, tensors, deadline)
            _, reply, outputs = framing.receive(self._process.stdout, deadline, token, max_bytes)
        except TimeoutError:
            self.close()
            raise KernelFailed("timeout", f"no reply within {self.seconds:.0f} s") from None
        except EOFError:
            reason = self._process.exit_reason()
            self.close()
            raise KernelFailed("crashed", reason) from None
        except framing.InvalidReply:
            raise self._tampered() from None
        if not isinstance(reply, dict) or ("error" in reply and reply.get("kind") not in FAILURE_KINDS):
            raise self._tampered()
        if "error" in reply:
            if reply["kind"] == "crashed" and self.device == "cuda":
                self.close()  # some errors leave the CUDA context unusable; the next call starts another process
            raise KernelFailed(reply["kind"], str(reply["error"]))
        return reply, outputs

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except MALFORMED_REPLY:
            raise self._tampered() from None

    def _tampered(self) -> KernelFailed:
        self.close()
        return KernelFailed("tampered", "the bytes on the reply pipe were not written by Tilewright")


def _output_bytes(request: Request) -> int:
    return sum(prod(spec.shape) * spec.dtype.itemsize for spec in request.output_specs)

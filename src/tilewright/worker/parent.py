"""The parent's side of a worker: send requests to a child process and validate its replies."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.timer import MAX_WARM_UP
from tilewright.worker import framing, messages, process
from tilewright.worker.execute import KernelFailed, Reply, Request
from tilewright.worker.shared_memory import SharedMemory
from tilewright.worker.timed_run import TimedSample

SECONDS = {"cpu": 60.0, "cuda": 180.0}  # per reply; on a GPU the first one may wait for compilers
FAILURE_KINDS = ("wrong", "crashed", "timeout", "tampered", "unsupported", "memory", "declined", "usage")
REPLY_SLACK = 2**20  # bytes of a reply beyond the requested tensors
MAX_BLOCK_BYTES = 2**32
LARGE_BYTES = 2**30  # that a call's arguments take
# What decoding a malformed reply raises.
MALFORMED_REPLY = (KeyError, TypeError, ValueError, OverflowError, StopIteration)


class Worker:
    """A child process that runs kernels on inputs sent to it.

    If it crashes, hangs or exceeds its memory, the next call starts another one.
    """

    def __init__(
        self, *, device: str, seconds: float | None = None, memory: int = process.MEMORY_LIMIT, shared: int = 0
    ):
        """Prepare a worker. On a GPU, calls whose tensors take at most `shared` bytes pass them in shared memory."""
        self.device = device
        self._shared_bytes = shared if device == "cuda" else 0
        self._shared: SharedMemory | None = None
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
        function: str | None = None,
        is_own: bool = False,
        solution: dict[str, Any] | None = None,
    ) -> None:
        """Select what `call` runs: a registered kernel, a user's file, or a file's solution of a problem.

        Of a user's file, it is the kernel of the operation or the named function. `is_own` says that the operation is
        the user's, even if it has the name of a built-in one.
        """
        path = str(file.resolve()) if file else None
        selected = {"op": op, "kernel": kernel, "file": path, "function": function, "is_own": is_own}
        selected["solution"] = solution
        if self._loaded != selected or self._process is None:
            self._loaded = selected
            self._load()

    def call(self, request: Request) -> Reply:
        if self._process is None:  # the previous one died
            self._load()
        encoded, tensors = messages.encode_request(request)
        if self.device == "cuda" and sum(t.nbytes for t in tensors) > LARGE_BYTES:
            torch.cuda.empty_cache()  # memory that this process keeps is none that the child can use
        max_bytes = _output_bytes(request) + 2 * sum(len(t) for t in tensors) + REPLY_SLACK
        reply, results = self._exchange({"do": "call", "request": encoded}, tensors, max_bytes, self._shared)
        with self._decoding():
            return messages.decode_reply(reply, results)

    def run(self, function: str, file: Path, arguments: dict[str, Any], readable: Sequence[Path] = ()) -> Any:
        """Return what a function of ours, "module:name", returns as JSON. It may load the user's file.

        Use a new worker: its process can run nothing else afterwards. `readable` lists further folders for it to read.
        """
        self._start()
        message = {"do": "run", "function": function, "file": str(file.resolve()), "arguments": arguments}
        reply, _ = self._exchange(message | {"readable": [str(path) for path in readable]}, [])
        with self._decoding():
            self.isolation = [str(layer) for layer in reply["isolation"]]
            return reply["result"]

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
        self._exchange(message, [t for group in tensors for t in group], shared=self._shared)

    def warm_up(self, calls: int = 1, *, limit: float = MAX_WARM_UP) -> float:
        reply, _ = self._exchange_timed({"do": "warm up", "calls": calls, "limit": limit})
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
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def _start(self) -> None:
        if self._process is None:
            if self._shared_bytes:
                with contextlib.suppress(OSError):  # without it, tensors are sent through the pipes
                    self._shared = SharedMemory(self._shared_bytes)
            try:
                file = self._shared.file if self._shared else None
                self._process = process.Process(self.device, self._memory, file)
            except EOFError as ended:
                raise KernelFailed("crashed", str(ended)) from None
            self._exchange({"do": "init", "environment": self._process.environment}, [])

    def _load(self) -> None:
        self._start()
        size = self._shared.size if self._shared else 0
        reply, _ = self._exchange({"do": "load", "shared": size, **self._loaded}, [])
        self.isolation = reply["isolation"]
        if self._shared and not reply.get("shares"):
            self._shared.close()
            self._shared = None

    def _exchange_timed(self, message: dict[str, Any]) -> tuple[Any, list[Tensor]]:
        if self._process is None:
            raise KernelFailed("crashed", "it ended the process in which it was timed")
        return self._exchange(message, [], self._max_result_bytes)

    def _exchange(
        self,
        message: dict[str, Any],
        tensors: list[Tensor],
        max_bytes: int = REPLY_SLACK,
        shared: SharedMemory | None = None,
    ) -> tuple[Any, list[Tensor]]:
        assert self._process is not None
        deadline = time.monotonic() + self.seconds
        token = secrets.token_bytes(framing.TOKEN_BYTES)
        try:
            framing.send(self._process.stdin, token, message, tensors, deadline, shared)
            _, reply, received = framing.receive(self._process.stdout, deadline, token, max_bytes, shared)
            # A copy: the child can write to shared memory at any time, and it ends with the child.
            outputs = [tensor.clone() for tensor in received] if shared else received
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
    return sum(spec.max_bytes for spec in request.output_specs)

"""The child process: load a kernel and serve the parent's requests until the parent closes the pipe."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import registry, sandbox, settings
from tilewright.errors import TilewrightError, first_line
from tilewright.timer import Clock, timer_for
from tilewright.worker import framing, messages, solutions
from tilewright.worker.execute import Executor, KernelFailed, kernel_failures
from tilewright.worker.tampering import FunctionSnapshot
from tilewright.worker.timed_run import InputPool, TimedRun

COMPILER_PROCESSES = 256  # and threads
MAX_FILE_BYTES = 2**30  # also bounds the log of a kernel that prints in an endless loop


def serve(device: str, memory: int, folder: str) -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a kernel that prints must not write to the pipe
    child = Child(device, memory, Path(folder))
    while True:
        try:
            token, message, tensors = framing.receive(requests, None)
        except EOFError:
            return
        reply, results = child.handle(message, tensors)
        framing.send(replies, token, reply, results, None)


class Child:
    def __init__(self, device: str, memory: int, folder: Path):
        self._device, self._memory, self._folder = device, memory, folder
        self._executor = Executor(device)
        self._fn: Any = None
        self._layers: list[str] = []
        self._snapshot: FunctionSnapshot | None = None
        self._replaced = FunctionSnapshot.replaced  # bound before a user's file can replace it
        self._clock: Clock | None = None
        self._timed: TimedRun | None = None

    def handle(self, message: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        reply: dict[str, Any]
        try:
            reply, results = self._dispatch(message, tensors)
        except KernelFailed as failure:
            reply, results = {"error": str(failure), "kind": failure.kind}, []
        except TilewrightError as error:
            reply, results = {"error": str(error), "kind": "usage"}, []
        except Exception as error:
            reply, results = {"error": first_line(error), "kind": "crashed"}, []
        if self._snapshot and (replaced := self._replaced(self._snapshot)):
            reply, results = {"error": f"it replaced {', '.join(replaced[:4])}", "kind": "tampered"}, []
        return reply, results

    def _dispatch(self, message: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        command = message["do"]
        if command == "init":
            settings.replace_environment(message["environment"])
            tempfile.tempdir = None  # read it from the new environment
        elif command == "load":
            if message["file"] and self._snapshot is None:
                self._enter_sandbox(message)
            self._fn = _load(message, self._device)
            return {"isolation": self._layers}, []
        if command == "call":
            reply = self._executor.execute(self._fn, messages.decode_request(message["request"], iter(tensors)))
            return messages.encode_reply(reply, with_tensors=message["request"]["repeat"] == 1)
        if command == "blocks":
            return {}, [t for block in self._executor.blocks(message["numbers"], message["size"]) for t in block]
        if command == "begin":
            self._begin(message, tensors)
        elif command == "end":
            self._timed = None
            self._free()
        elif self._timed and command == "warm up":
            return {"us": self._timed.warm_up(message["calls"])}, []
        elif self._timed and command == "sample":
            sample = self._timed.sample(message["values"])
            return {"us": sample.us, "is_queued": sample.is_queued}, []
        elif self._timed and command == "results":
            return messages.encode_results(self._timed.results())
        elif self._timed and command == "overhead":
            host_us, extra_bytes = self._timed.overhead()
            return {"host_us": host_us, "extra_bytes": extra_bytes}, []
        return {}, []

    def _begin(self, message: dict[str, Any], tensors: list[Tensor]) -> None:
        self._timed = None
        self._executor = Executor(self._device)  # drops the inputs and outputs of the last call
        self._free()
        self._clock = self._clock or timer_for(self._device)
        supplied = iter(tensors)
        requests = [messages.decode_request(encoded, supplied) for encoded in message["requests"]]
        with kernel_failures():
            inputs = InputPool(requests, self._device)
        self._timed = TimedRun(self._fn, inputs, message["direction"], self._clock)

    def _free(self) -> None:
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _enter_sandbox(self, message: dict[str, Any]) -> None:
        if message["op"]:
            registry.load(message["op"])
        others = [Path(name) for name in (message["solution"] or {}).get("folders", [])]
        self._layers = _confine(Path(message["file"]), others, self._folder, self._device, self._memory)
        self._snapshot = FunctionSnapshot()


def _load(message: dict[str, Any], device: str) -> Any:
    """Return the function to call: a registered kernel, the kernel in a user's file, or a solution of a problem."""
    if message["solution"]:
        return solutions.load(Path(message["file"]), message["solution"], device)
    op = registry.load(message["op"])
    if message["file"]:
        return registry.load_file(Path(message["file"]), op).fn
    return registry.pick(op, [message["kernel"]])[0].fn


def _confine(file: Path, others: list[Path], folder: Path, device: str, memory: int) -> list[str]:
    """Sandbox this process before a user's file runs, and return the layers that hold.

    It may read Python, libraries and the file's neighbours, and write to a folder of its own. With a GPU it may also
    start compilers, and memory has no limit, since CUDA maps far more than it uses.
    """
    neighbours = [path for path in file.parent.iterdir() if not path.name.startswith(".")]
    read = [*sandbox.runtime(), *neighbours, *others]
    memory, processes = (memory, 0) if device == "cpu" else (0, COMPILER_PROCESSES)
    return sandbox.confine(read=read, write=[folder], memory=memory, processes=processes, file_bytes=MAX_FILE_BYTES)

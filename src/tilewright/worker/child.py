"""The child process: load a kernel and serve the parent's requests until the parent closes the pipe."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import registry, sandbox, settings, source
from tilewright.errors import TilewrightError, first_line
from tilewright.timer import Clock, timer_for
from tilewright.worker import framing, messages, solutions
from tilewright.worker.compiling import compile_eagerly
from tilewright.worker.execute import Executor, KernelFailed, kernel_failures
from tilewright.worker.shared_memory import SharedMemory
from tilewright.worker.tampering import FunctionSnapshot
from tilewright.worker.timed_run import InputPool, TimedRun

COMPILER_PROCESSES = 256  # and threads
MAX_FILE_BYTES = 2**30  # also bounds the log of a kernel that prints in an endless loop


def serve(device: str, memory: int, folder: str, shared: int | None = None) -> None:
    """Serve requests; `shared` is the descriptor of memory on the GPU that the parent shares."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a kernel that prints must not write to the pipe
    child = Child(device, memory, Path(folder), shared)
    while True:
        try:
            token, message, tensors = framing.receive(requests, None, shared=child.shared)
        except EOFError:
            return
        reply, results = child.handle(message, tensors)
        uses_shared = message["do"] == "call"
        framing.send(replies, token, reply, results, None, child.shared if uses_shared else None)


class Child:
    def __init__(self, device: str, memory: int, folder: Path, shared: int | None = None):
        self._device, self._memory, self._folder, self._shared_file = device, memory, folder, shared
        self.shared: SharedMemory | None = None
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
            # Not earlier: the driver starts threads, which a sandbox entered later would not confine.
            if self._shared_file is not None and self.shared is None and message["shared"]:
                with contextlib.suppress(OSError):  # then tensors are sent through the pipes
                    self.shared = SharedMemory(message["shared"], self._shared_file)
            self._fn = _load(message, self._device)
            return {"isolation": self._layers, "shares": self.shared is not None}, []
        if command == "run":
            return self._run(message), []
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
            return {"us": self._timed.warm_up(message["calls"], limit=message["limit"])}, []
        elif self._timed and command == "sample":
            sample = self._timed.sample(message["values"])
            return {"us": sample.us, "is_queued": sample.is_queued}, []
        elif self._timed and command == "results":
            return messages.encode_results(self._timed.results())
        elif self._timed and command == "overhead":
            host_us, extra_bytes = self._timed.overhead()
            return {"host_us": host_us, "extra_bytes": extra_bytes}, []
        return {}, []

    def _run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call a function of ours that loads a user's file itself, in a sandbox in which compilers may run."""
        module, _, name = message["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        if not self._layers:
            readable = [Path(path) for path in message["readable"]]
            self._layers = _confine(
                Path(message["file"]), readable, self._folder, self._device, self._memory, compiles=True
            )
        return {"result": function(**message["arguments"]), "isolation": self._layers}

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
        if message["op"] in source.op_files() and not message["is_own"]:
            registry.load(message["op"])
        others = [Path(name) for name in (message["solution"] or {}).get("folders", [])]
        self._layers = _confine(Path(message["file"]), others, self._folder, self._device, self._memory)
        if self._device == "cpu":
            compile_eagerly()
        self._snapshot = FunctionSnapshot()


def _load(message: dict[str, Any], device: str) -> Any:
    """Return the function to call: a registered kernel, the kernel in a user's file, or a solution of a problem."""
    if message["solution"]:
        return solutions.load(Path(message["file"]), message["solution"], device)
    if message["file"]:
        return registry.load_kernel(Path(message["file"]), message["op"], message["function"], is_own=message["is_own"])
    return registry.pick(registry.load(message["op"]), [message["kernel"]])[0].fn


def _confine(
    file: Path, others: list[Path], folder: Path, device: str, memory: int, *, compiles: bool = False
) -> list[str]:
    """Sandbox this process before a user's file runs, and return the layers that hold.

    It may read Python, libraries and the file's neighbours, and write to a folder of its own. With a GPU, if it
    `compiles`, or if the file calls `kernel.warmup()`, which does, it may also start compilers. With a GPU memory has
    no limit, since CUDA maps far more than it uses.
    """
    compiles |= b".warmup(" in file.read_bytes()
    neighbours = [path for path in file.parent.iterdir() if not path.name.startswith(".")]
    read = [*sandbox.runtime(), *neighbours, *others]
    processes = COMPILER_PROCESSES if compiles or device != "cpu" else 0
    memory = memory if device == "cpu" else 0
    return sandbox.confine(read=read, write=[folder], memory=memory, processes=processes, file_bytes=MAX_FILE_BYTES)

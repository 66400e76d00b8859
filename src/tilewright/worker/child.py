"""The child's side: loads a kernel and performs what the parent asks, until the parent closes the pipe."""

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
from tilewright.worker.execute import KernelFailed, Stage, failures
from tilewright.worker.tampering import Fingerprint
from tilewright.worker.timed_run import Inputs, Track

COMPILERS = 256  # processes and threads
LARGEST_FILE = 2**30  # bytes: what a kernel that prints without end may write


def serve(device: str, memory: int, folder: str) -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a kernel that prints must not speak on the pipe
    child = Child(device, memory, Path(folder))
    while True:
        try:
            token, message, tensors = framing.receive(requests, None)
        except EOFError:
            return
        reply, results = child.answer(message, tensors)
        framing.send(replies, token, reply, results, None)


class Child:
    def __init__(self, device: str, memory: int, folder: Path):
        self._device, self._memory, self._folder = device, memory, folder
        self._stage = Stage(device)
        self._fn: Any = None
        self._layers: list[str] = []
        self._fingerprint: Fingerprint | None = None
        self._replaced = Fingerprint.replaced  # as it is before a file is loaded
        self._clock: Clock | None = None
        self._track: Track | None = None

    def answer(self, message: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        reply: dict[str, Any]
        try:
            reply, results = self._do(message, tensors)
        except KernelFailed as failure:
            reply, results = {"error": str(failure), "kind": failure.kind}, []
        except TilewrightError as error:
            reply, results = {"error": str(error), "kind": "usage"}, []
        except Exception as error:
            reply, results = {"error": first_line(error), "kind": "crashed"}, []
        if self._fingerprint and (replaced := self._replaced(self._fingerprint)):
            reply, results = {"error": f"it replaced {', '.join(replaced[:4])}", "kind": "tampered"}, []
        return reply, results

    def _do(self, message: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        what = message["do"]
        if what == "wake":
            settings.replace_environment(message["environment"])
            tempfile.tempdir = None  # read from the environment again
        elif what == "load":
            if message["file"] and self._fingerprint is None:
                self._confine(message)
            self._fn = _load(message, self._device)
            return {"isolation": self._layers}, []
        if what == "call":
            answer = self._stage.perform(self._fn, messages.request(message["request"], iter(tensors)))
            return messages.of_reply(answer, whole=message["request"]["repeat"] == 1)
        if what == "blocks":
            return {}, [t for block in self._stage.blocks(message["numbers"], message["size"]) for t in block]
        if what == "begin":
            self._begin(message, tensors)
        elif what == "end":
            self._track = None
            self._free()
        elif self._track and what == "warm up":
            return {"us": self._track.warm_up(message["calls"])}, []
        elif self._track and what == "sample":
            lap = self._track.sample(message["values"])
            return {"us": lap.us, "is_queued": lap.is_queued}, []
        elif self._track and what == "results":
            return messages.of_results(self._track.results())
        elif self._track and what == "aside":
            host_us, extra_bytes = self._track.aside()
            return {"host_us": host_us, "extra_bytes": extra_bytes}, []
        return {}, []

    def _begin(self, message: dict[str, Any], tensors: list[Tensor]) -> None:
        self._track = None
        self._stage = Stage(self._device)  # without the inputs and results of the last call
        self._free()
        self._clock = self._clock or timer_for(self._device)
        given = iter(tensors)
        asked = [messages.request(plain, given) for plain in message["requests"]]
        with failures():
            inputs = Inputs(asked, self._device)
        self._track = Track(self._fn, inputs, message["direction"], self._clock)

    def _free(self) -> None:
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _confine(self, message: dict[str, Any]) -> None:
        if message["op"]:
            registry.load(message["op"])
        others = [Path(name) for name in (message["solution"] or {}).get("folders", [])]
        self._layers = _confine(Path(message["file"]), others, self._folder, self._device, self._memory)
        self._fingerprint = Fingerprint()


def _load(message: dict[str, Any], device: str) -> Any:
    """The function to call: a kernel of the project, that of a user's file, or the solution of a foreign problem."""
    if message["solution"]:
        return solutions.load(Path(message["file"]), message["solution"], device)
    op = registry.load(message["op"])
    if message["file"]:
        return registry.load_file(Path(message["file"]), op).fn
    return registry.pick(op, [message["kernel"]])[0].fn


def _confine(file: Path, others: list[Path], folder: Path, device: str, memory: int) -> list[str]:
    """Before a user's file runs: it may read Python, libraries and its neighbours, and write to a folder of its own. On
    a GPU compilers are processes too, and what CUDA maps is beyond any limit of memory."""
    beside = [path for path in file.parent.iterdir() if not path.name.startswith(".")]
    read = [*sandbox.runtime(), *beside, *others]
    memory, processes = (memory, 0) if device == "cpu" else (0, COMPILERS)
    return sandbox.confine(read=read, write=[folder], memory=memory, processes=processes, file_bytes=LARGEST_FILE)

"""The child's side: loads a kernel and performs what the parent asks, until the parent closes the pipe."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tilewright import registry, sandbox
from tilewright.errors import TilewrightError, first_line
from tilewright.worker import messages, solutions, wire
from tilewright.worker.stage import KernelFailed, Stage
from tilewright.worker.tampering import Fingerprint

COMPILERS = 256  # processes and threads
LARGEST_FILE = 2**30  # bytes: what a kernel that prints without end may write


def serve() -> None:
    device, memory, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    _die_with_parent()
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a kernel that prints must not speak on the pipe
    stage = Stage(device)
    fn: Any = None
    layers: list[str] = []
    fingerprint = None
    while True:
        try:
            token, message, tensors = wire.receive(requests, None)
        except EOFError:
            return
        reply, results = {}, []
        try:
            if message["do"] == "load":
                if message["file"] and fingerprint is None:
                    if message["op"]:
                        registry.load(message["op"])
                    beside = [Path(name) for name in (message["solution"] or {}).get("folders", [])]
                    layers = _confine(Path(message["file"]), beside, folder, device, memory)
                    fingerprint = Fingerprint()
                fn = _load(message, device)
                reply = {"isolation": layers}
            elif message["do"] == "call":
                answer = stage.perform(fn, messages.request(message["request"], tensors))
                reply, results = messages.of_reply(answer, whole=message["request"]["repeat"] == 1)
            elif message["do"] == "blocks":
                results = [t for block in stage.blocks(message["numbers"], message["size"]) for t in block]
        except KernelFailed as failure:
            reply = {"error": str(failure), "kind": failure.kind}
        except TilewrightError as error:
            reply = {"error": str(error), "kind": "usage"}
        except Exception as error:
            reply = {"error": first_line(error), "kind": "crashed"}
        if fingerprint and (replaced := fingerprint.replaced()):
            reply, results = {"error": f"it replaced {', '.join(replaced[:4])}", "kind": "tampered"}, []
        wire.send(replies, token, reply, results, None)


def _load(message: dict[str, Any], device: str) -> Any:
    """The function to call: a kernel of the project, that of a user's file, or the solution of a foreign problem."""
    if message["solution"]:
        return solutions.load(Path(message["file"]), message["solution"], device)
    op = registry.load(message["op"])
    return registry.load_file(Path(message["file"]), op).fn if message["file"] else op.kernels[message["kernel"]].fn


def _confine(file: Path, others: list[Path], folder: Path, device: str, memory: int) -> list[str]:
    """Before a user's file runs: it may read Python, libraries and its neighbours, and write to a folder of its own. On
    a GPU compilers are processes too, and what CUDA maps is beyond any limit of memory."""
    beside = [path for path in file.parent.iterdir() if not path.name.startswith(".")]
    read = [*sandbox.runtime(), *beside, *others]
    memory, processes = (memory, 0) if device == "cpu" else (0, COMPILERS)
    return sandbox.confine(read=read, write=[folder], memory=memory, processes=processes, file_bytes=LARGEST_FILE)


def _die_with_parent() -> None:
    """Linux ends this process when the parent ends, however that ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

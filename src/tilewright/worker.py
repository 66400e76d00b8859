"""A kernel in a process of its own: for Numba's simulator, whose switch is read at import, and for users' files.

The parent sends inputs and receives outputs as JSON and raw bytes over pipes; nothing is unpickled, so nothing the
child sends can run here. The child's own stdout is turned away from the pipe, and a child that crashes, hangs or
outgrows its memory costs only itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from tilewright import registry, sandbox, settings
from tilewright.errors import KernelStopped, MissingPackage, TilewrightError, first_line
from tilewright.interpreter import interpret
from tilewright.interpreter import poison as fill_with_poison

HEADER = struct.Struct("<QQ")  # bytes of JSON, bytes of tensors
LARGEST_FILE = 2**30  # bytes: what a kernel that prints without end may write
# Without the working folder in sys.path: a user's triton.py there must not hide the real one.
BOOTSTRAP = "import sys; sys.path[:] = [p for p in sys.path if p]; from tilewright.worker import serve; serve()"
START_SECONDS = 120.0  # importing torch on a cold, loaded machine


class KernelFailed(Exception):
    """The kernel gave no result to compare. `kind` is a verdict (crashed, timeout, wrong, unsupported) or, for a file
    that cannot be loaded, usage."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class Worker:
    """A child process that runs kernels of one Op on inputs sent to it."""

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

    def load(self, op: str, *, kernel: str | None = None, file: Path | None = None) -> None:
        """Choose what `call` runs: a kernel of the project or the one in a user's file."""
        wanted = {"op": op, "kernel": kernel, "file": str(file.resolve()) if file else None}
        if self._loaded != wanted or self._process is None:
            self._loaded = wanted
            self._load()

    def call(
        self, args: tuple[Any, ...], grad: Tensor | None = None, layout: str = "contiguous", same_memory: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The kernel's outputs and, if `grad` is given, the gradients of its floating-point tensor inputs.

        `layout` is how the inputs lie in memory; `same_memory` puts them where those of the last call were.
        """
        if self._process is None:  # the one before died: start again
            self._load()
        plain, tensors = _split([*args, grad])
        message = {"do": "call", "args": plain, "layout": layout, "same_memory": same_memory}
        reply, outputs = self._exchange(message, tensors, self.seconds)
        return outputs[: reply["outputs"]], outputs[reply["outputs"] :]

    def _load(self) -> None:
        if self._process is None:
            self._process = self._start()
            self._exchange({"do": "wake"}, [], START_SECONDS)  # so that the limit below is the file's own
        reply, _ = self._exchange({"do": "load", **(self._loaded or {})}, [], self.seconds)
        self.isolation = reply["isolation"]

    def close(self) -> None:
        self._kill()
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._folder = tempfile.mkdtemp(prefix="tilewright-")
        return subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, self.device, str(self._memory), self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=settings.worker_environment(simulate=self.device == "cpu", folder=self._folder),
            start_new_session=True,
        )

    def _exchange(self, message: dict[str, Any], tensors: list[Tensor], seconds: float) -> tuple[Any, list[Tensor]]:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        try:
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            with contextlib.suppress(BrokenPipeError):  # a dead child is told by its silence below
                _send(stdin, message, tensors)
            reply, outputs = _receive(stdout, deadline)
        except TimeoutError:
            self._kill()
            raise KernelFailed("timeout", f"no answer within {seconds:.0f} s") from None
        except (EOFError, ValueError, KeyError, TypeError, RuntimeError):
            raise KernelFailed("crashed", self._obituary()) from None
        if "error" in reply:
            raise KernelFailed(reply["kind"], reply["error"])
        return reply, outputs

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


def _split(values: list[Any]) -> tuple[list[Any], list[Tensor]]:
    """Tensors apart from what JSON can carry."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [{"tensor": None} if isinstance(value, Tensor) else value for value in values], tensors


def _send(pipe: IO[bytes], message: dict[str, Any], tensors: list[Tensor]) -> None:
    blobs, described = [], []
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        blobs.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        described.append({"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)})
    header = json.dumps({"message": message, "tensors": described}).encode()
    pipe.write(HEADER.pack(len(header), sum(map(len, blobs))) + header)
    for blob in blobs:
        pipe.write(blob)
    pipe.flush()


def _receive(pipe: IO[bytes], deadline: float | None) -> tuple[Any, list[Tensor]]:
    header_bytes, tensor_bytes = HEADER.unpack(_read(pipe, HEADER.size, deadline))
    header = json.loads(_read(pipe, header_bytes, deadline))
    body = memoryview(_read(pipe, tensor_bytes, deadline))
    tensors, offset = [], 0
    for described in header["tensors"]:
        dtype = getattr(torch, described["dtype"])
        size = math.prod(described["shape"]) * dtype.itemsize
        raw = torch.frombuffer(body[offset : offset + size], dtype=torch.uint8) if size else torch.empty(0, dtype=dtype)
        tensors.append(raw.view(dtype).reshape(described["shape"]))
        offset += size
    return header["message"], tensors


def _read(pipe: IO[bytes], size: int, deadline: float | None) -> bytearray:
    data = bytearray()
    while len(data) < size:
        if deadline is not None and not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        chunk = os.read(pipe.fileno(), min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def serve() -> None:
    """The child's life: load and call until the parent closes the pipe."""
    device, memory, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    _die_with_parent()
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a kernel that prints must not speak on the pipe
    kernel, place, layers = None, Inputs(), []
    while True:
        try:
            message, tensors = _receive(requests, None)
        except EOFError:
            return
        try:
            if message["do"] == "wake":
                _send(replies, {}, [])
            elif message["do"] == "load":
                op = registry.load(message["op"])
                if message["file"]:
                    file = Path(message["file"])
                    layers = layers or _confine(file, folder, device, memory)
                    kernel = registry.load_file(file, op)
                else:
                    kernel = op.kernels[message["kernel"]]
                _send(replies, {"isolation": layers}, [])
            else:
                assert kernel is not None
                supplied = iter(tensors)
                values = [next(supplied).to(device) if isinstance(v, dict) else v for v in message["args"]]
                run = run_interpreted if device == "cpu" else run_kernel
                given = place.lay_out(values[:-1], message["layout"], message["same_memory"])
                outputs, gradients = run(kernel.fn, given, values[-1])
                _send(replies, {"outputs": len(outputs)}, [*outputs, *gradients])
        except KernelFailed as failure:
            _send(replies, {"error": str(failure), "kind": failure.kind}, [])
        except TilewrightError as error:
            _send(replies, {"error": str(error), "kind": "usage"}, [])
        except Exception as error:
            _send(replies, {"error": first_line(error), "kind": "crashed"}, [])


def _confine(file: Path, folder: Path, device: str, memory: int) -> list[str]:
    """Before a user's file runs: it may read Python, libraries and its neighbours, and write to a folder of its own.
    Not on a GPU, where Triton calls compilers that do not run so; the verdict then names no layers."""
    if device != "cpu":
        return []
    beside = [path for path in file.parent.iterdir() if not path.name.startswith(".")]
    read = [*sandbox.runtime(), *beside]
    return sandbox.confine(read=read, write=[folder], memory=memory, processes=0, file_bytes=LARGEST_FILE)


def _die_with_parent() -> None:
    """Linux ends this process when the parent ends, however that ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run_interpreted(fn: Any, args: Any, grad: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """`run_kernel` with Triton launches on the CPU: a kernel that touches memory as it must not is wrong."""
    with interpret(faults="collect") as interpreted:
        outputs, gradients = run_kernel(fn, args, grad)
    for finding in [*interpreted.findings, *interpreted.unwritten([*outputs, *gradients])]:
        raise KernelFailed("wrong", str(finding))
    return outputs, gradients


class Inputs:
    """The memory of a kernel's inputs: laid out as asked, kept for the next call."""

    def __init__(self) -> None:
        self._last: list[Any] = []

    def lay_out(self, args: Any, layout: str, same_memory: bool) -> list[Any]:
        if same_memory:
            for mine, new in zip(self._last, args, strict=True):
                if isinstance(new, Tensor):
                    mine.copy_(new)
        else:
            self._last = [laid_out(a, layout) if isinstance(a, Tensor) else a for a in args]
        return self._last


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A copy of these values that lies in memory as named; shapes that cannot lie so lie plainly."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().clone().transpose(0, -1)
    if layout == "sliced" and tensor.dim():
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
        return wide[..., : 2 * tensor.shape[-1] : 2].copy_(tensor)
    if layout == "offset":
        return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    if (
        layout == "expanded"
        and tensor.dim()
        and tensor.shape[0] > 1
        and torch.equal(tensor, tensor[:1].expand_as(tensor))
    ):
        return tensor[:1].clone().expand_as(tensor)
    return tensor.clone()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory of torch.empty holds what no kernel would write, so that one that leaves it shows."""

    def poison(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta:
                fill_with_poison(tensor)
            return tensor

        return made

    with contextlib.ExitStack() as undo:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, poison(getattr(owner, name)))
        yield


def run_kernel(fn: Any, args: Any, grad: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """`run_with_gradients` where fresh memory is poisoned; inputs must be as they were afterwards."""
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    try:
        with poisoned():
            results = run_with_gradients(fn, args, grad)
    except MissingPackage as missing:
        raise KernelFailed("unsupported", str(missing)) from None
    except KernelStopped as stopped:
        raise KernelFailed(stopped.kind, str(stopped)) from None
    except Exception as error:
        raise KernelFailed("crashed", first_line(error)) from error
    for number, (was, now) in enumerate(zip(before, args, strict=True), start=1):
        if isinstance(was, Tensor) and not torch.equal(_bits(was), _bits(now)):
            raise KernelFailed("wrong", f"it changed its argument {number}")
    return results


def _bits(tensor: Tensor) -> Tensor:
    """Bits, for NaN is not equal to itself."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def run_with_gradients(fn: Any, args: Any, grad: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of `fn(*args)` and, if `grad` is given, gradients of the floating-point tensor arguments.

    A function that torch cannot differentiate gives no gradients.
    """
    was_on, *_ = torch.backends.mkldnn.set_flags(_enabled=False)
    try:  # on a virtual machine that names AMX without granting it, oneDNN's bfloat16 products kill the process
        return _run_with_gradients(fn, args, grad)
    finally:
        torch.backends.mkldnn.set_flags(_enabled=was_on)


def _run_with_gradients(fn: Any, args: Any, grad: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    if grad is None:
        with torch.no_grad():
            return _as_list(fn(*args)), []
    args = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    outputs = _as_list(fn(*args))
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    if not outputs[0].requires_grad:
        return outputs, []
    gradients = torch.autograd.grad(outputs[0], leaves, grad)
    return [output.detach() for output in outputs], list(gradients)


def _as_list(outputs: Any) -> list[Any]:
    found = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    if not found:
        raise TypeError("returned nothing")
    for output in found:
        if type(output) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"returned {type(output).__name__}, not a tensor")
    return found

"""Compile the kernels of drawn cases ahead of their turn, in processes on the other cores.

A case takes seconds to compile, and a fraction of a second to check and time. Compilers keep their results on disk, so
the process that times finds them there: torch.compile is run on tensors without memory, and the launches of Triton
kernels are recorded on a fake GPU and then compiled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as Timeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import forkserver
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import triton
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tilewright import hardware, registry, settings
from tilewright.errors import first_line
from tilewright.hardware import GPU
from tilewright.runtime.trace import trace
from tilewright.spec import Case, Kernel, bound_to
from tilewright.workbench.bench.drawn import DrawnCase
from tilewright.workbench.check.cases import differentiable_arguments
from tilewright.workbench.inspect.code import TritonCode
from tilewright.workbench.inspect.fake_gpu import fake_gpu
from tilewright.workbench.inspect.launches import recording
from tilewright.worker.execute import backward, flatten, forward

# Imported once for all processes, which takes seconds.
PRELOADED = [__name__, "torch._dynamo", "torch._inductor.compile_fx"]
SPARED_CORES = 2  # for the process that times
MAX_PROCESSES = 14
PATIENCE = 120.0  # seconds to wait for a case; then the process that times compiles it itself


@dataclass(frozen=True)
class Job:
    """A case to compile: the position of its Op among the named one and its variants, and kernels of it by name."""

    op: str
    variant: int | None
    case: Case
    layout: str
    kernels: tuple[str, ...]
    directions: tuple[str, ...]
    gpu: str  # its short name
    captured: bool = False  # calls are captured in a CUDA graph
    device: str = "cuda"

    @staticmethod
    def of(one: DrawnCase, kernels: Sequence[str], directions: Sequence[str], gpu: str, captured: bool) -> Job:
        variants = registry.load(one.op.name).variants
        number = next((n for n, variant in enumerate(variants) if variant is one.op), None)
        return Job(one.op.name, number, one.case, one.layout, tuple(kernels), tuple(directions), gpu, captured)

    @property
    def drawn(self) -> DrawnCase:
        op = registry.load(self.op)
        return DrawnCase(op if self.variant is None else op.variants[self.variant], self.case, self.layout)


@dataclass
class Compiled:
    """The result of a job."""

    seconds: float = 0.0
    path: str = ""  # the kernels that the public function launches, or why it calls torch
    failures: dict[str, str] = field(default_factory=dict)  # by kernel: the process that times will meet them too


class CompilerPool:
    """Compiles jobs in order on the other cores."""

    def __init__(self) -> None:
        self._pool = _processes(max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) - SPARED_CORES)))
        self._futures: list[Future[Compiled]] = []

    def __enter__(self) -> CompilerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, job: Job) -> None:
        self._futures.append(self._pool.submit(compile_job, job))

    def wait(self, number: int) -> Compiled:
        """Return the result of a job as soon as it is done."""
        try:
            return self._futures[number].result(PATIENCE)
        except Timeout:
            return Compiled(PATIENCE, failures={"all": f"took more than {PATIENCE:.0f} s"})
        except BrokenProcessPool:
            return Compiled(failures={"all": "a compiler crashed"})


def _processes(count: int) -> ProcessPoolExecutor:
    """Return processes that can use the GPU: forks of one that has imported everything, or else started singly."""
    forks = multiprocessing.get_context("forkserver")  # a fork of this process could not use CUDA
    forks.set_forkserver_preload(PRELOADED)
    with settings.fork_safe_cuda():
        forkserver.ensure_running()
    pool = ProcessPoolExecutor(count, mp_context=forks)
    if pool.submit(can_use_gpu).result():
        return pool
    pool.shutdown(wait=False)
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def can_use_gpu() -> bool:
    """Return whether this process can use the GPU, if any: not if an import has called CUDA before the fork."""
    try:
        if hardware.has_gpu():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def compile_job(job: Job) -> Compiled:
    """Compile the kernels of a case, without launching any."""
    warnings.simplefilter("ignore")  # the process that times shows them
    inductor_config.compile_threads = 1  # this process is one of many
    begin, drawn, done = time.monotonic(), job.drawn, Compiled()
    known = registry.named(drawn.op)
    for name in job.kernels:
        kernel = known[name]
        try:
            for with_gradients in sorted({direction != "forward" for direction in job.directions}):
                if kernel.builds_per_case:
                    _compile_reference(drawn, with_gradients, job.device)
                elif kernel.origin == "peer" and (compiling := registry.compiling_peer(kernel)):
                    _compile_peer(drawn, kernel, with_gradients, job.device, compiling)
                elif gpu := hardware.DATASHEETS.get(job.gpu):
                    path = _compile_launches(drawn, kernel, with_gradients, gpu, job.captured)
                    done.path = path if kernel is drawn.op.shipped else done.path
        except Exception as error:  # third-party compilers and libraries may raise anything
            done.failures[name] = first_line(error)
    done.seconds = time.monotonic() - begin
    return done


class _Stop(Exception):
    """Raised instead of running a compiled function."""


def _compile_reference(drawn: DrawnCase, with_gradients: bool, device: str) -> None:
    """Run torch.compile on the reference up to the point where it would run the result."""
    torch._dynamo.reset()
    inductor = torch._TorchCompileInductorWrapper(None, {}, False)

    def compile_and_stop(graph: Any, inputs: Any) -> Any:
        inductor(graph, inputs)
        raise _Stop

    # The gradient would otherwise be compiled when it is called.
    gradients_too = functorch_config.patch(force_non_lazy_backward_lowering=True)
    with _without_memory(drawn, with_gradients, device) as args, gradients_too:
        try:
            fn = bound_to(drawn.op.reference, args)
            torch.compile(fn, fullgraph=True, dynamic=False, backend=compile_and_stop)(*args)
        except BackendCompilerFailed as failure:
            if not isinstance(failure.inner_exception, _Stop):
                raise failure.inner_exception from None


def _compile_peer(
    drawn: DrawnCase,
    kernel: Kernel,
    with_gradients: bool,
    device: str,
    compiling: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    """Call a peer whose library can compile for tensors without memory."""
    if kernel.fits(*drawn.arguments()):
        with compiling(), _without_memory(drawn, with_gradients, device) as args:
            kernel.fn(*args)


@contextlib.contextmanager
def _without_memory(drawn: DrawnCase, with_gradients: bool, device: str) -> Iterator[list[Any]]:
    """Yield the arguments of a case as tensors on the device without memory, with the strides of those to be timed."""
    placed = drawn.arguments()
    needs_grad = differentiable_arguments(drawn.op, drawn.case)[0] if with_gradients else []
    with FakeTensorMode(), torch.set_grad_enabled(with_gradients):
        args = [_fake(a, device) if isinstance(a, Tensor) else a for a in placed]
        yield [a.requires_grad_() if n in needs_grad else a for n, a in enumerate(args)]


def _fake(like: Tensor, device: str) -> Tensor:
    last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    length = like.storage_offset() + 1 + last if like.numel() else 0
    storage = torch.empty(length, dtype=like.dtype, device=device).untyped_storage()
    empty = torch.empty(0, dtype=like.dtype, device=device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _compile_launches(drawn: DrawnCase, kernel: Kernel, with_gradients: bool, gpu: GPU, captured: bool) -> str:
    """Compile the Triton kernels that a call launches; return what it launches, or why it calls torch."""
    has_cuda = patch("tilewright.runtime.crossovers.HAS_CUDA", True)
    is_capturing = patch.object(torch.cuda, "is_current_stream_capturing", lambda: captured)
    ones = lambda func, args: func(torch.ones(args[0].shape, dtype=args[0].dtype))  # kernels hardly depend on values
    with fake_gpu(gpu, ones), recording(gpu) as launches, has_cuda, is_capturing:
        args = drawn.arguments()
        if not kernel.fits(*args):
            return ""
        with trace() as calls:
            kernel.fn(*args)
        path = ", ".join(launch.name for launch in launches) or "; ".join(f"torch: {call.reason}" for call in calls)
        if with_gradients and kernel.differentiable:
            needs_grad = differentiable_arguments(drawn.op, drawn.case)[0]
            leaves, returned = forward(kernel.fn, args, needs_grad)
            outputs = flatten(returned)
            grads = [torch.empty_like(o) for o in outputs if o.is_floating_point()]
            backward(outputs, [leaves[n] for n in needs_grad], grads)
    for code in [launch.code for launch in launches if isinstance(launch.code, TritonCode)]:
        source = GluonASTSource if code.function.is_gluon() else ASTSource
        made: Any = source(code.function, code.signature, code.constants, code.attributes)
        triton.compile(made, target=code.target, options=dict(code.options))
    return path

"""One variant of a training step, in a process of its own: libraries patch classes, and memory is counted alone."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from tilewright.errors import TilewrightError, first_line
from tilewright.workbench.train.job import Job as Measured
from tilewright.workbench.train.variants import VARIANTS, Running
from tilewright.workbench.train.workloads import Workload, build, to_device


@dataclass(frozen=True)
class Memory:
    """Bytes by category. The peak, and so the rest, is None on a CPU."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  # what the forward pass keeps for the backward pass
    peak: int | None

    @property
    def rest(self) -> int | None:
        """Everything else at the peak: temporary tensors, and activations of backward beside their gradients."""
        known = self.parameters + self.gradients + self.optimizer + self.activations
        return None if self.peak is None else max(0, self.peak - known)


class Trainer:
    """A model on its device, which takes steps."""

    def __init__(self, work: Workload, variant: str, device: str):
        self.job = build(work, device)
        self.device = device
        self.running: Running = VARIANTS[variant](self.job.model, device)

    def steps(self, count: int) -> list[float]:
        """Take steps, and return the microseconds of each."""
        return self._on_gpu(count) if self.device == "cuda" else self._on_cpu(count)

    def _on_gpu(self, count: int) -> list[float]:
        # The step before is part of the queue, so that the first one starts as all others do.
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        self._step()
        marks[0].record()
        for mark in marks[1:]:
            self._step()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(marks)]

    def _on_cpu(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self._step()
            times.append((time.perf_counter() - start) * 1e6)
        return times

    def _step(self) -> Tensor:
        return self.running.step(to_device(next(self.job), self.device))

    def profile(self, count: int) -> dict[str, Any]:
        """Return where the time of a step goes, by torch.profiler."""
        ranges = _leaf_ranges(self.running.model) if self.running.takes_hooks else contextlib.nullcontext()
        with ranges, _without_stderr(), _Quiet(0, count) as measured:
            for batch in measured.batches(_first(self.job, count)):
                self.running.step(to_device(batch, self.device))
                measured.step()
        assert measured.times is not None
        return asdict(measured.times)

    def memory(self) -> dict[str, Any]:
        """Take a step, and return the bytes by category."""
        model, optimizer = self.running.model, self.running.optimizer
        activations = self._activations() if not self.running.captures else 0
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._step()
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        state = [v for one in optimizer.state.values() for v in one.values() if isinstance(v, Tensor)]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found = Memory(
            _bytes([*model.parameters(), *model.buffers()]), _bytes(gradients), _bytes(state), activations, peak
        )
        return asdict(found)

    def _activations(self) -> int:
        """Return the bytes that a forward pass saves for its backward pass, beside parameters and the batch."""
        batch = to_device(next(self.job), self.device)
        known = {
            t.untyped_storage().data_ptr() for t in [*self.running.model.parameters(), *self.running.model.buffers()]
        }
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        self.running.optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.running.forward_backward(batch)
        return sum(saved.values())


@contextlib.contextmanager
def _leaf_ranges(model: nn.Module) -> Iterator[None]:
    """Name the calls of modules without children after their class, so that a norm's operators count as its own."""
    open_ranges: list[Any] = []

    def enter(module: nn.Module, _: Any) -> None:
        open_ranges.append(record_function(type(module).__name__))
        open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    leaves = [module for module in model.modules() if not module._modules]
    hooks = [leaf.register_forward_pre_hook(enter) for leaf in leaves]
    hooks += [leaf.register_forward_hook(leave) for leaf in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Hide what the profiler's library prints when it starts and stops; Python's errors are not printed but sent."""
    sys.stderr.flush()
    kept, hidden = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(hidden, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(hidden)


class _Quiet(Measured):
    """A measured loop whose parent process shows the result."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish()


def _first(batches: Iterator[Any], count: int) -> Iterable[Any]:
    for _ in range(count):
        yield next(batches)


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def serve(connection: Connection, work: Workload, variant: str, device: str, warmup: int) -> None:
    """Build the variant and answer the parent's requests, (method, arguments), until it closes the connection."""
    os.dup2(2, 1)  # what a model prints is no result
    if device == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other would hide what the operators cost
    try:
        trainer = Trainer(work, variant, device)
        trainer.steps(warmup)
        about = {"dtype": _dtype(trainer.running.model), "units": trainer.job.units, "unit": trainer.job.unit}
        connection.send(("done", about))
        while True:
            method, args = connection.recv()
            connection.send(("done", getattr(trainer, method)(*args)))
    except EOFError:
        return
    except torch.OutOfMemoryError:
        connection.send(("failed", "out of GPU memory beside the other variants: measure it alone with --variant"))
    except TilewrightError as error:
        connection.send(("failed", str(error)))
    except Exception as error:  # a user's model, or a library that does not support it
        connection.send(("failed", first_line(error)))


def _dtype(model: nn.Module) -> str:
    """Return the dtype of most parameters."""
    counts: dict[torch.dtype, int] = {}
    for p in model.parameters():
        counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
    return str(max(counts, key=counts.__getitem__)).removeprefix("torch.")

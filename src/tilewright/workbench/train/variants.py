"""The ways to run the same training step: torch's, another library's, and ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilewright.errors import WorkloadFailed
from tilewright.models import apply
from tilewright.workbench.train.workloads import loss_of

LEARNING_RATE = 1e-4
GRAPH_WARMUP = 3  # steps before the capture, as torch's documentation of CUDA graphs recommends


@dataclass
class Running:
    """A model that is trained in one way: `forward_backward` leaves the gradients of a batch and returns the loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward_backward: Callable[[Any], Tensor]
    captures: bool = False  # gradients are overwritten in place, so they must not be freed
    takes_hooks: bool = False  # hooks on its modules change nothing that is fused or compiled

    def step(self, batch: Any) -> Tensor:
        """Take a training step."""
        if not self.captures:
            self.optimizer.zero_grad()
        loss = self.forward_backward(batch)
        self.optimizer.step()
        return loss


Variant = Callable[[nn.Module, str], Running]


def eager(model: nn.Module, device: str) -> Running:
    return Running(model, _adamw(model), _plain(model), takes_hooks=True)


def compiled(model: nn.Module, device: str) -> Running:
    return Running(model, _adamw(model), _plain(torch.compile(model)))  # type: ignore[arg-type]


def liger(model: Any, device: str) -> Running:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:  # it would leave the model as it is
        raise WorkloadFailed(f"Liger does not support {kind or type(model).__name__}")
    _apply_liger_kernel_to_instance(model=model)
    return Running(model, _adamw(model), _plain(model))


def ours(model: nn.Module, device: str) -> Running:
    optimizer = _adamw(model)
    apply(model, optimizer=optimizer)
    return Running(model, optimizer, _plain(model))


def ours_8bit(model: nn.Module, device: str) -> Running:
    """Run ours with moments of one byte per element."""
    optimizer = _adamw(model)
    apply(model, optimizer=optimizer, state_bits=8)
    return Running(model, optimizer, _plain(model))


def ours_graphs(model: nn.Module, device: str) -> Running:
    """Run ours with forward and backward in a CUDA graph, which the first step captures."""
    if device != "cuda":
        raise WorkloadFailed("CUDA graphs need a GPU")
    running = ours(model, device)
    running.forward_backward = _Captured(running.forward_backward, running.optimizer)
    running.captures = True
    return running


VARIANTS: dict[str, Variant] = {
    "eager": eager,
    "compile": compiled,
    "liger": liger,
    "ours": ours,
    "ours-8bit": ours_8bit,
    "ours-graphs": ours_graphs,
}
DEFAULT = ("eager", "compile", "liger", "ours")
GRAPHS = "ours-graphs"


def default() -> tuple[str, ...]:
    """Return the variants to measure by default: Liger only if it is installed."""
    return tuple(name for name in DEFAULT if name != "liger" or importlib.util.find_spec("liger_kernel"))


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise WorkloadFailed("no parameter of the model requires a gradient")
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)


def _plain(model: nn.Module) -> Callable[[Any], Tensor]:
    def forward_backward(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    return forward_backward


class _Captured:
    """Forward and backward in a CUDA graph. The optimizer's step stays outside."""

    def __init__(self, forward_backward: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer):
        self._run = forward_backward
        self._optimizer = optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Any = None
        self._loss: Any = None

    def __call__(self, batch: Any) -> Tensor:
        if self._graph is None:
            self._batch, self._graph = batch, self._capture(batch)
        else:
            _copy(batch, self._batch)
        self._graph.replay()
        return self._loss

    def _capture(self, batch: Any) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(GRAPH_WARMUP):
                self._optimizer.zero_grad()
                self._run(batch)
        torch.cuda.current_stream().wait_stream(side)
        self._optimizer.zero_grad()  # so that the graph writes the gradients instead of adding to them
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._run(batch)
        return graph


def _copy(batch: Any, to: Any) -> None:
    for new, old in zip(pytree.tree_leaves(batch), pytree.tree_leaves(to), strict=True):
        if isinstance(new, Tensor):
            old.copy_(new, non_blocking=True)

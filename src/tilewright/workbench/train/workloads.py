"""The training jobs that can be measured: architectures of public models with random weights, or a user's own.

The architectures are data (`workloads.json`); transformers builds them, and is imported only then.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.errors import UnknownWorkload, WorkloadFailed, first_line

SEED = 0
POOL = 4  # batches that a job cycles through, so that no two successive steps see the same tokens
DATA = Path(__file__).with_name("workloads.json")
OWN = ":"  # separates MODULE and FACTORY


@dataclass(frozen=True)
class Workload:
    """One training job: a model, the size of its batches, and the dtype of its weights.

    It holds names and sizes only, so that a child process can build the model from it.
    """

    name: str
    batch: int
    length: int
    dtype: str = "bfloat16"  # for a model by name; a user's factory decides its own
    checkpointing: bool = False
    folder: str | None = None  # where a user's module is imported from

    @property
    def is_own(self) -> bool:
        return OWN in self.name

    @property
    def case(self) -> dict[str, Any]:
        """The sizes of the job, as in a record."""
        return {"batch": self.batch, "length": self.length, "checkpointing": self.checkpointing}

    def __str__(self) -> str:
        sizes = "" if self.is_own else f" {self.batch}x{self.length} tokens"
        return f"{self.name}{sizes} {self.dtype}{' with checkpointing' if self.checkpointing else ''}"


@dataclass
class Job:
    """A model and its batches, and how many tokens (or samples) a step takes."""

    model: nn.Module
    batches: list[Any]
    units: int
    unit: str = "tokens"
    cursor: int = field(default=0)

    def __iter__(self) -> Job:
        return self

    def __next__(self) -> Any:
        self.cursor += 1
        return self.batches[(self.cursor - 1) % len(self.batches)]


@functools.lru_cache(1)
def architectures() -> dict[str, dict[str, Any]]:
    return json.loads(DATA.read_text())["models"]


def workload(name: str, **options: Any) -> Workload:
    """Return the job of a model by its name or MODULE:FACTORY; sizes that are None have their defaults."""
    given = {key: value for key, value in options.items() if value is not None}
    if OWN in name:
        return Workload(name, **({"batch": 0, "length": 0, "folder": str(Path.cwd())} | given))
    known = architectures()
    if name not in known:
        raise UnknownWorkload(name, known)
    return Workload(name, **({"batch": known[name]["batch"], "length": known[name]["length"]} | given))


def build(work: Workload, device: str) -> Job:
    """Build the model on a device, in training mode, with batches in host memory. Raises WorkloadFailed."""
    torch.manual_seed(SEED)
    job = _own(work, device) if work.is_own else _public(work, device)
    if work.checkpointing:
        enable: Any = getattr(job.model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise WorkloadFailed(f"{work.name} has no gradient_checkpointing_enable(): leave out --checkpointing")
        # The meta device has no random state to preserve.
        enable({"use_reentrant": False, "preserve_rng_state": device != "meta"})
    return job


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Run the model on a batch and return its loss."""
    output = call(model, batch)
    loss = getattr(output, "loss", output)
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    if not isinstance(loss, Tensor) or loss.dim():
        raise WorkloadFailed("the model must return its loss: a scalar, or an output with the attribute `loss`")
    return loss


def call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _public(work: Workload, device: str) -> Job:
    about = architectures()[work.name]
    try:
        import transformers
    except ImportError:
        raise WorkloadFailed(f"{work.name} is built by transformers: pip install transformers") from None
    transformers.utils.logging.set_verbosity_error()
    architecture = getattr(transformers, about["architecture"])
    # Nothing is dropped: dropout would make two variants train on different numbers.
    config = architecture.config_class(**about["config"], use_cache=False, **_without_dropout(architecture))
    _require_length(work, config)
    with torch.device(device):
        model = architecture(config)
    model = model.to(getattr(torch, work.dtype)).train()
    generator = torch.Generator().manual_seed(SEED)
    where = device if device == "meta" else "cpu"
    shape = (work.batch, work.length)
    pool = [torch.randint(config.vocab_size, shape, generator=generator).to(where) for _ in range(POOL)]
    return Job(model, [{"input_ids": tokens, "labels": tokens} for tokens in pool], work.batch * work.length)


def _without_dropout(architecture: Any) -> dict[str, float]:
    defaults = vars(architecture.config_class())
    return {name: 0.0 for name, value in defaults.items() if ("drop" in name or "pdrop" in name) and value}


def _require_length(work: Workload, config: Any) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest and work.length > longest:
        raise WorkloadFailed(f"{work.name} takes at most {longest} tokens per sequence, not {work.length}")


def _own(work: Workload, device: str) -> Job:
    """Call a user's factory, which returns (model, batch): the batch is a dict, a tuple or a tensor."""
    factory = _factory(work)
    try:
        with torch.device(device):
            found = factory()
    except Exception as error:
        raise WorkloadFailed(f"{work.name} failed: {first_line(error)}") from None
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], nn.Module):
        raise WorkloadFailed(f"{work.name} must return (model, batch), not {type(found).__name__}")
    model, batch = found
    units, unit = _units(batch)
    return Job(model.to(device).train(), [batch], units, unit)


def _factory(work: Workload) -> Callable[[], Any]:
    module_name, _, name = work.name.partition(OWN)
    if work.folder and work.folder not in sys.path:
        sys.path.insert(0, work.folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise WorkloadFailed(f"cannot import {module_name}: {first_line(error)}") from None
    factory = getattr(module, name, None)
    if not callable(factory):
        raise WorkloadFailed(f"{module_name} defines no function named '{name}'")
    return factory


def _units(batch: Any) -> tuple[int, str]:
    """Return how many tokens a batch has, or else samples."""
    tensors = list(batch.values()) if isinstance(batch, Mapping) else batch
    tensors = [t for t in (tensors if isinstance(tensors, tuple | list) else [tensors]) if isinstance(t, Tensor)]
    tokens = [t for t in tensors if not t.is_floating_point() and t.dim() == 2]
    if tokens:
        return tokens[0].numel(), "tokens"
    sized = [t for t in tensors if t.dim()]
    return (sized[0].shape[0], "samples") if sized else (1, "samples")


def to_device(batch: Any, device: str) -> Any:
    """Copy a batch to the device, without waiting for the copy."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    return tuple(to_device(one, device) for one in batch) if isinstance(batch, tuple | list) else batch

"""Configurations that `tilewright tune` found best, by GPU; a default where none was sought."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import hardware

FOLDER = Path(__file__).parent / "tuned"
Config = dict[str, Any]
Key = tuple[Any, ...]  # numbers and names


TABLES: list[Tuned] = []  # those of the ops that are loaded


class Tuned:
    """What an op leaves open: `default` and `choices` take a key and give one configuration, or all that are worth a
    try. `file` holds the winners, in `ops/tuned/`: {gpu: {key: configuration}}."""

    def __init__(self, file: str, default: Callable[..., Config], choices: Callable[..., list[Config]]):
        self.file = file
        self.default = default
        self.choices = choices
        self._asked: list[Key] | None = None
        self._trying: dict[Key, Config] = {}
        TABLES.append(self)

    def __call__(self, like: Tensor | int, *key: Any) -> Config:
        """The configuration for this key on the GPU of this number, or that holds this tensor."""
        if self._asked is not None:
            self._asked.append(key)
        return self._trying.get(key) or self._best(like if isinstance(like, int) else like.get_device(), key)

    @functools.cache  # noqa: B019  tables are module-level constants
    def _best(self, device: int, key: Key) -> Config:
        winners = self.winners().get(_gpu(device) or "", {})
        return winners.get(spelled(key)) or self.default(*key)

    def winners(self) -> dict[str, dict[str, Config]]:
        path = FOLDER / self.file
        return json.loads(path.read_text()) if path.exists() else {}

    def keep(self, gpu: str, winners: dict[Key, Config | None]) -> None:
        """Write these winners down, beside those that are there; None is a default that needs no writing down."""
        found = self.winners()
        of_gpu = found.get(gpu, {}) | {spelled(key): config for key, config in winners.items()}
        found[gpu] = {key: config for key, config in of_gpu.items() if config is not None}
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / self.file).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        Tuned._best.cache_clear()
        forget_plans()

    @contextmanager
    def listening(self) -> Iterator[list[Key]]:
        """The keys that are asked for while the context is open."""
        self._asked = []
        forget_plans()
        try:
            yield self._asked
        finally:
            self._asked = None

    @contextmanager
    def trying(self, key: Key, config: Config) -> Iterator[None]:
        """Give this configuration for this key while the context is open."""
        self._trying[key] = config
        forget_plans()
        try:
            yield
        finally:
            del self._trying[key]
            forget_plans()


_PLANS: list[Any] = []


def planned(plan: Callable[..., Any]) -> Callable[..., Any]:
    """Remember what a function of shapes settles about a call, until a search tries something else."""
    remembering = functools.lru_cache(4096)(plan)
    _PLANS.append(remembering)
    return remembering


def forget_plans() -> None:
    for plan in _PLANS:
        plan.cache_clear()


def spelled(key: Key) -> str:
    return " ".join(map(str, key))


def _gpu(device: int) -> str | None:
    """Our name of a GPU; an interpreted tensor is on none."""
    return None if device < 0 else hardware.short_name(torch.cuda.get_device_name(device))

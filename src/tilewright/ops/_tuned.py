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


class Tuned:
    """What an op leaves open: `default` and `choices` take a key (numbers and names) and give one or all configurations
    worth a try. `file` holds the winners, in `ops/tuned/`: {gpu: {key: configuration}}."""

    def __init__(self, file: str, default: Callable[..., Config], choices: Callable[..., list[Config]]):
        self.file = file
        self.default = default
        self.choices = choices
        self._asked: dict[tuple[Any, ...], None] | None = None
        self._trying: dict[tuple[Any, ...], Config] = {}

    def __call__(self, like: Tensor, *key: Any) -> Config:
        """The configuration for this key on the GPU that holds `like`."""
        if self._asked is not None:
            self._asked[key] = None
        return self._trying.get(key) or self._best(like.get_device(), key)

    @functools.cache  # noqa: B019  tables are module-level constants
    def _best(self, device: int, key: tuple[Any, ...]) -> Config:
        winners = self.winners().get(_gpu(device) or "", {})
        return winners.get(spelled(key)) or self.default(*key)

    def winners(self) -> dict[str, dict[str, Config]]:
        path = FOLDER / self.file
        return json.loads(path.read_text()) if path.exists() else {}

    @contextmanager
    def listening(self) -> Iterator[dict[tuple[Any, ...], None]]:
        """The keys that are asked for while the context is open."""
        self._asked = {}
        try:
            yield self._asked
        finally:
            self._asked = None

    @contextmanager
    def trying(self, key: tuple[Any, ...], config: Config) -> Iterator[None]:
        """Give this configuration for this key while the context is open."""
        self._trying[key] = config
        try:
            yield
        finally:
            del self._trying[key]


def spelled(key: tuple[Any, ...]) -> str:
    return " ".join(map(str, key))


def _gpu(device: int) -> str | None:
    """Our name of a GPU; an interpreted tensor is on none."""
    return None if device < 0 else hardware.short_name(torch.cuda.get_device_name(device))

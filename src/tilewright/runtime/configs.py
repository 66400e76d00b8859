"""Launch configurations: tables of what `tilewright tune` found best per GPU, and cached launch plans."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewright.runtime.gpus import GPUFacts, gpu_facts

FOLDER = Path(__file__).parent / "tuned"
Config = dict[str, Any]
Key = tuple[Any, ...]  # numbers and names

TABLES: list[ConfigTable] = []  # those of all operations imported so far


class ConfigTable:
    """The configurations of one kernel by key: sizes, dtype and modes, as the operation buckets them.

    `default(*key)` returns the configuration where nothing was tuned, `choices(*key)` all that are worth trying. `file`
    in `runtime/tuned/` holds the tuned ones: {gpu: {key: config}}. With `takes_gpu`, both take the facts of the GPU
    before the key.
    """

    def __init__(
        self,
        file: str,
        default: Callable[..., Config],
        choices: Callable[..., list[Config]],
        *,
        takes_gpu: bool = False,
    ):
        self.file = file
        self.default = default
        self.choices = choices
        self._takes_gpu = takes_gpu
        self._requested: list[Key] | None = None
        self._overrides: dict[Key, Config] = {}
        TABLES.append(self)

    def __call__(self, device: Tensor | int, *key: Any) -> Config:
        """Return the configuration for a key on a GPU, given by its number or by a tensor on it."""
        if self._requested is not None:
            self._requested.append(key)
        return self._overrides.get(key) or self._best(device if isinstance(device, int) else device.get_device(), key)

    @functools.cache  # noqa: B019  tables are module-level constants
    def _best(self, device: int, key: Key) -> Config:
        tuned = self.tuned().get(_gpu_name(device) or "", {})
        return tuned.get(key_text(key)) or self.default_on(device, key)

    def default_on(self, device: int, key: Key) -> Config:
        """Return the configuration of a key where nothing was tuned, on the GPU of this number."""
        return self.default(*self._facts(device), *key)

    def choices_on(self, device: int, key: Key) -> list[Config]:
        """Return the configurations that are worth trying, on the GPU of this number."""
        return self.choices(*self._facts(device), *key)

    def _facts(self, device: int) -> tuple[GPUFacts, ...]:
        return (gpu_facts(device),) if self._takes_gpu else ()

    def tuned(self) -> dict[str, dict[str, Config]]:
        path = FOLDER / self.file
        return json.loads(path.read_text()) if path.exists() else {}

    def save(self, gpu: str, configs: dict[Key, Config | None]) -> None:
        """Write tuned configurations to the file, beside those already there; None removes one, for the default."""
        found = self.tuned()
        merged = found.get(gpu, {}) | {key_text(key): config for key, config in configs.items()}
        found[gpu] = {key: config for key, config in merged.items() if config is not None}
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / self.file).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        ConfigTable._best.cache_clear()
        clear_plans()

    @contextmanager
    def recording(self) -> Iterator[list[Key]]:
        """Collect the keys that calls look up while the context is open."""
        self._requested = []
        clear_plans()
        try:
            yield self._requested
        finally:
            self._requested = None

    @contextmanager
    def override(self, key: Key, config: Config) -> Iterator[None]:
        """Use this configuration for this key while the context is open."""
        self._overrides[key] = config
        clear_plans()
        try:
            yield
        finally:
            del self._overrides[key]
            clear_plans()


_PLANS: list[Any] = []


def cached_plan(plan: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function from shapes, dtypes and a GPU to a launch plan, until a table's configurations change."""
    cached = functools.lru_cache(4096)(plan)
    _PLANS.append(cached)
    return cached


def clear_plans() -> None:
    for plan in _PLANS:
        plan.cache_clear()


def key_text(key: Key) -> str:
    return " ".join(map(str, key))


def _gpu_name(device: int) -> str | None:
    """Return our name of a GPU; None for an interpreted tensor, which is on none."""
    return None if device < 0 else gpu_facts(device).name

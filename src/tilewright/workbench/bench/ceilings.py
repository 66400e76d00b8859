"""The ceilings of this GPU, measured or reused from a measurement of the last hour."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from tilewright import files, hardware, settings
from tilewright.timer import Timer
from tilewright.workbench.bench import gpu_state, microbenchmarks

MAX_AGE_S = 3600.0


@dataclass(frozen=True)
class Ceilings:
    rates: dict[str, float]  # per second, by unit
    state: dict[str, Any]  # GPU state during the measurement; empty if reused
    age_s: float | None = None  # None if measured now


def current(timer: Timer, *, fresh: bool = False) -> Ceilings:
    """Return the ceilings of this GPU. Those of the last hour are reused unless `fresh`.

    A measurement during which the GPU was throttled is not stored.
    """
    path = _cache_file()
    if not fresh and (stored := _read(path)):
        return stored
    with gpu_state.record_gpu_state() as state:
        rates = microbenchmarks.measure(timer)
    if not state.get("throttled"):
        with contextlib.suppress(OSError):  # without a writable cache they are measured every time
            files.replace(path, json.dumps({"time": time.time(), "rates": rates}).encode())
    return Ceilings(rates, state)


def _read(path: Path) -> Ceilings | None:
    try:
        stored = json.loads(path.read_text())
        age = time.time() - stored["time"]
        return Ceilings(stored["rates"], {}, age) if 0 <= age < MAX_AGE_S else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _cache_file() -> Path:
    """Return the cache file of this GPU, its driver and these versions of torch and Triton."""
    device, versions = hardware.current_gpu(), hardware.versions()
    identity = [device["name"], device.get("driver"), versions["torch"], versions["triton"], _uuid()]
    return settings.cache_dir() / f"ceilings-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}.json"


def _uuid() -> str | None:
    with contextlib.suppress(pynvml.NVMLError):
        return str(pynvml.nvmlDeviceGetUUID(hardware.nvml_handle()))
    return None

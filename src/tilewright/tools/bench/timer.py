"""Device time of one call, by events: L2 flushed before it, and the GPU kept busy while the host catches up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLUSH_BYTES = 256 * 2**20  # several times any L2
WARM_UP = 5
SLEEP_HZ = 2.0e9  # cycles that torch.cuda._sleep spends in a second, at least


class Timer:
    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def interleave(self, calls: Mapping[str, Callable[[], Any]], samples: int, seed: int = 0) -> dict[str, list[float]]:
        """Microseconds of every sample of every call; each round takes all calls in a new random order.

        One drifting clock or busy neighbour then falls on all alike.
        """
        ahead = {name: int(2.0 * _host_seconds(call) * SLEEP_HZ) for name, call in calls.items()}
        order, shuffle = list(calls), random.Random(seed).shuffle
        taken: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
        for _ in range(samples):
            shuffle(order)
            for name in order:
                taken[name].append(self._sample(calls[name], ahead[name]))
            torch.cuda.synchronize()
        return {
            name: [start.elapsed_time(end) * 1e3 for start, end in events]  # ms to us
            for name, events in taken.items()
        }

    def _sample(self, call: Callable[[], Any], cycles_ahead: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles_ahead)  # the launch below is queued before the GPU gets to it
        self._flush.zero_()
        start.record()
        call()
        end.record()
        return start, end


def _host_seconds(call: Callable[[], Any]) -> float:
    """Host time of one warm call, from asking to returning."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent

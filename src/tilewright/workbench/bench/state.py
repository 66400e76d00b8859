"""What state the GPU was in while something was measured, and whether it was ours alone."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pynvml

from tilewright import hardware

EVERY = 0.02  # seconds
# Why a GPU runs slower than it could. Idling, and clocks that someone chose, are no throttling.
REASONS = {
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat (hardware)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}


@contextlib.contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Clocks, power, temperature and throttle reasons of the GPU in the context, there when it ends. Empty where the
    driver does not tell."""
    found: dict[str, Any] = {}
    seen: list[dict[str, Any]] = []
    reasons = 0
    over = threading.Event()

    def look() -> None:
        nonlocal reasons
        seen.append(hardware.present_state(handle))
        reasons |= pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    try:
        handle = hardware.nvml_handle()
        look()
    except pynvml.NVMLError:
        yield found
        return

    def watch() -> None:
        with contextlib.suppress(pynvml.NVMLError):  # what was seen until then is kept
            while not over.wait(EVERY):
                look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        clocks = [state["sm_clock_mhz"] for state in seen]
        found |= {
            "sm_clock_mhz": [min(clocks), max(clocks)],
            "power_w": max(state["power_w"] for state in seen),
            "temperature_c": max(state["temperature_c"] for state in seen),
            "throttled": [name for bit, name in REASONS.items() if reasons & bit],
        }


def others() -> str | None:
    """Who else uses this GPU, before we do."""
    with contextlib.suppress(pynvml.NVMLError):
        handle = hardware.nvml_handle()
        pids = [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid != os.getpid()]
        if pids:
            return f"process {', '.join(map(str, sorted(pids)))} uses it"
        busy = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        if busy > 5:
            return f"it is {busy} % busy already"
    return None

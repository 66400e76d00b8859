"""The state of the GPU during a measurement, and other processes that use it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pynvml

from tilewright import hardware

INTERVAL = 0.02  # seconds
# Idling and clocks set by the user do not count as throttling.
REASONS = {
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat (hardware)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}


@contextlib.contextmanager
def record_gpu_state() -> Iterator[dict[str, Any]]:
    """Yield a dict that receives clocks, power, temperature and throttle reasons when the context exits.

    It stays empty if the driver does not report them.
    """
    found: dict[str, Any] = {}
    states: list[dict[str, Any]] = []
    reasons = 0
    done = threading.Event()

    def poll() -> None:
        nonlocal reasons
        states.append(hardware.current_state(handle))
        reasons |= pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    try:
        handle = hardware.nvml_handle()
        poll()
    except pynvml.NVMLError:
        yield found
        return

    def poll_until_done() -> None:
        with contextlib.suppress(pynvml.NVMLError):
            while not done.wait(INTERVAL):
                poll()

    thread = threading.Thread(target=poll_until_done, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        clocks = [state["sm_clock_mhz"] for state in states]
        found |= {
            "sm_clock_mhz": [min(clocks), max(clocks)],
            "power_w": max(state["power_w"] for state in states),
            "temperature_c": max(state["temperature_c"] for state in states),
            "throttled": [name for bit, name in REASONS.items() if reasons & bit],
        }


def other_users() -> str | None:
    """Describe other processes that use this GPU; None if there are none."""
    with contextlib.suppress(pynvml.NVMLError):
        handle = hardware.nvml_handle()
        pids = [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid != os.getpid()]
        if pids:
            return f"used by process {', '.join(map(str, sorted(pids)))}"
        busy = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        if busy > 5:
            return f"{busy} % busy"
    return None

"""The recorded state of a GPU, and other processes that use it, with a fake driver."""

import os
import threading
import time
from types import SimpleNamespace

import pynvml
import pytest

from tilewright import hardware
from tilewright.workbench.bench import gpu_state
from tilewright.workbench.bench.gpu_state import REASONS, other_users, record_gpu_state


@pytest.fixture
def driver(monkeypatch):
    """Install a fake driver that returns the values of these lists in turn, and repeats the last one."""
    fake = SimpleNamespace(clocks=[1980], watts=[300], degrees=[40], reasons=[0], pids=[], busy=0, polls=0)

    def next_value(name):
        def get(*_):
            values = getattr(fake, name)
            return values[min(fake.polls, len(values) - 1)]

        return get

    def reasons(_):
        found = next_value("reasons")()
        fake.polls += 1  # the last query of a poll
        return found

    monkeypatch.setattr(hardware, "nvml_handle", lambda: "the GPU")
    monkeypatch.setattr(gpu_state, "INTERVAL", 0.001)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", next_value("clocks"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", next_value("degrees"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda _: 1000 * next_value("watts")())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", reasons)
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetComputeRunningProcesses",
        lambda _: [SimpleNamespace(pid=pid) for pid in fake.pids],
    )
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda _: SimpleNamespace(gpu=fake.busy))
    return fake


def wait_for(fake, polls: int) -> None:
    deadline = time.monotonic() + 10
    while fake.polls < polls and time.monotonic() < deadline:
        time.sleep(0.001)
    assert fake.polls >= polls


def test_the_range_of_clocks_and_the_maximum_of_the_rest(driver):
    driver.clocks, driver.watts, driver.degrees = [1500, 1980, 1200, 1700], [300, 690, 400], [40, 41, 61, 50]
    with record_gpu_state() as found:
        assert found == {}
        wait_for(driver, 4)
    assert found == {"sm_clock_mhz": [1200, 1980], "power_w": 690, "temperature_c": 61, "throttled": []}


def test_one_poll_is_enough(driver, monkeypatch):
    monkeypatch.setattr(gpu_state, "INTERVAL", 60)
    with record_gpu_state() as found:
        pass
    assert found == {"sm_clock_mhz": [1980, 1980], "power_w": 300, "temperature_c": 40, "throttled": []}


def test_throttle_reasons_of_any_poll_are_named(driver):
    heat = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    driver.reasons = [0, pynvml.nvmlClocksThrottleReasonSwPowerCap, 0, heat, 0]
    with record_gpu_state() as found:
        wait_for(driver, 5)
    assert found["throttled"] == ["power cap", "heat (hardware)"]


def test_idling_and_user_clocks_are_not_throttling(driver):
    driver.reasons = [
        pynvml.nvmlClocksThrottleReasonGpuIdle
        | pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting
        | pynvml.nvmlClocksThrottleReasonUserDefinedClocks
    ]
    with record_gpu_state() as found:
        pass
    assert found["throttled"] == []
    assert len(REASONS) == len(set(REASONS.values())) == 5
    assert all(bit & (bit - 1) == 0 for bit in REASONS)


def test_polling_stops_when_the_context_exits(driver):
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), record_gpu_state() as found:
        raise KeyboardInterrupt
    assert threading.active_count() == before
    assert found["sm_clock_mhz"] == [1980, 1980]


REAL_HANDLE = hardware.nvml_handle


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
        AssertionError("Torch not compiled with CUDA enabled"),
        RuntimeError("Found no NVIDIA driver"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_state_if_the_driver_fails(driver, monkeypatch, error):
    def silent():
        raise error

    monkeypatch.setattr(hardware, "nvml_handle", REAL_HANDLE)
    monkeypatch.setattr(hardware, "_physical_index", silent)
    with record_gpu_state() as found:
        pass
    assert found == {}
    with pytest.raises(ValueError, match="of the work"), record_gpu_state():
        raise ValueError("of the work")


def test_no_state_without_throttle_reasons(driver, monkeypatch):
    def unsupported(_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", unsupported)
    with record_gpu_state() as found:
        pass
    assert found == {}


def test_a_driver_that_fails_later_keeps_earlier_polls(driver, monkeypatch):
    silent = threading.Event()

    def lost(*_):
        if driver.polls >= 2:
            silent.set()
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return 700 + driver.polls

    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lost)
    with record_gpu_state() as found:
        assert silent.wait(10)
    assert found["sm_clock_mhz"] == [700, 701]


def test_no_other_users(driver):
    assert other_users() is None
    driver.pids, driver.busy = [os.getpid()], 5
    assert other_users() is None


def test_other_processes_are_named(driver):
    driver.pids = [os.getpid(), 4321, 77]
    assert other_users() == "used by process 77, 4321"
    driver.pids = [4321]
    assert other_users() == "used by process 4321"


def test_a_busy_gpu_without_visible_processes_is_reported(driver):
    driver.busy = 6
    assert other_users() == "6 % busy"


def test_no_other_users_if_the_driver_fails(monkeypatch):
    def silent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(hardware, "nvml_handle", silent)
    assert other_users() is None


@pytest.mark.gpu
def test_the_state_of_a_real_gpu():
    with record_gpu_state() as found:
        pass
    if not found:
        pytest.skip("the driver does not tell")
    low, high = found["sm_clock_mhz"]
    assert 0 < low <= high
    assert found["temperature_c"] > 0

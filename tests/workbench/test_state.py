"""What the driver says of a GPU while something is measured, and of who else uses it. The driver is pretended."""

import os
import threading
import time
from types import SimpleNamespace

import pynvml
import pytest

from tilewright import hardware
from tilewright.workbench.bench import state
from tilewright.workbench.bench.state import REASONS, others, watched


@pytest.fixture
def driver(monkeypatch):
    """One that says what stands in these lists, one look after the other, and then the last thing over again."""
    said = SimpleNamespace(clocks=[1980], watts=[300], degrees=[40], reasons=[0], pids=[], busy=0, looks=0)

    def answer(name):
        def get(*_):
            values = getattr(said, name)
            return values[min(said.looks, len(values) - 1)]

        return get

    def reasons(_):
        found = answer("reasons")()
        said.looks += 1  # the last question of a look
        return found

    monkeypatch.setattr(hardware, "nvml_handle", lambda: "the GPU")
    monkeypatch.setattr(state, "EVERY", 0.001)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", answer("clocks"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", answer("degrees"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda _: 1000 * answer("watts")())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", reasons)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: [SimpleNamespace(pid=pid) for pid in said.pids]
    )
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda _: SimpleNamespace(gpu=said.busy))
    return said


def wait_for(said, looks: int) -> None:
    deadline = time.monotonic() + 10
    while said.looks < looks and time.monotonic() < deadline:
        time.sleep(0.001)
    assert said.looks >= looks


def test_the_slowest_and_fastest_clock_and_the_most_of_the_rest(driver):
    driver.clocks, driver.watts, driver.degrees = [1500, 1980, 1200, 1700], [300, 690, 400], [40, 41, 61, 50]
    with watched() as found:
        assert found == {}
        wait_for(driver, 4)
    assert found == {"sm_clock_mhz": [1200, 1980], "power_w": 690, "temperature_c": 61, "throttled": []}


def test_one_look_is_enough(driver, monkeypatch):
    monkeypatch.setattr(state, "EVERY", 60)
    with watched() as found:
        pass
    assert found == {"sm_clock_mhz": [1980, 1980], "power_w": 300, "temperature_c": 40, "throttled": []}


def test_reasons_are_named_whenever_they_were_seen(driver):
    heat = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    driver.reasons = [0, pynvml.nvmlClocksThrottleReasonSwPowerCap, 0, heat, 0]
    with watched() as found:
        wait_for(driver, 5)
    assert found["throttled"] == ["power cap", "heat (hardware)"]


def test_idling_and_clocks_that_someone_chose_are_no_throttling(driver):
    driver.reasons = [
        pynvml.nvmlClocksThrottleReasonGpuIdle
        | pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting
        | pynvml.nvmlClocksThrottleReasonUserDefinedClocks
    ]
    with watched() as found:
        pass
    assert found["throttled"] == []
    assert len(REASONS) == len(set(REASONS.values())) == 5
    assert all(bit & (bit - 1) == 0 for bit in REASONS)


def test_looking_ends_with_the_context_however_that_ends(driver):
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), watched() as found:
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
def test_nothing_where_the_driver_is_silent(driver, monkeypatch, error):
    def silent():
        raise error

    monkeypatch.setattr(hardware, "nvml_handle", REAL_HANDLE)
    monkeypatch.setattr(hardware, "_physical_index", silent)
    with watched() as found:
        pass
    assert found == {}
    with pytest.raises(ValueError, match="of the work"), watched():
        raise ValueError("of the work")


def test_nothing_where_it_knows_no_reasons(driver, monkeypatch):
    def unsupported(_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", unsupported)
    with watched() as found:
        pass
    assert found == {}


def test_a_driver_that_falls_silent_on_the_way_leaves_what_was_seen(driver, monkeypatch):
    silent = threading.Event()

    def lost(*_):
        if driver.looks >= 2:
            silent.set()
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return 700 + driver.looks

    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lost)
    with watched() as found:
        assert silent.wait(10)
    assert found["sm_clock_mhz"] == [700, 701]


def test_a_gpu_of_our_own(driver):
    assert others() is None
    driver.pids, driver.busy = [os.getpid()], 5
    assert others() is None


def test_other_processes_are_named(driver):
    driver.pids = [os.getpid(), 4321, 77]
    assert others() == "process 77, 4321 uses it"
    driver.pids = [4321]
    assert others() == "process 4321 uses it"


def test_a_busy_gpu_is_told_though_nobody_is_seen(driver):
    driver.busy = 6
    assert others() == "it is 6 % busy already"


def test_no_one_else_where_the_driver_is_silent(monkeypatch):
    def silent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(hardware, "nvml_handle", silent)
    assert others() is None


@pytest.mark.gpu
def test_a_gpu_tells_its_state():
    with watched() as found:
        pass
    if not found:
        pytest.skip("the driver does not tell")
    low, high = found["sm_clock_mhz"]
    assert 0 < low <= high
    assert found["temperature_c"] > 0

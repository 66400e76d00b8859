"""Datasheets, short names and ceilings of GPUs."""

import pytest

from tilewright import hardware
from tilewright.errors import UnknownGPU


@pytest.mark.parametrize("gpu", hardware.DATASHEETS.values(), ids=lambda gpu: gpu.name)
def test_datasheets_are_complete_and_plausible(gpu):
    assert gpu.source
    assert gpu.arch.startswith(("sm_", "gfx"))
    assert {"tensor.bfloat16", "tensor.float16", "tensor.tf32", "fp32"} <= set(gpu.tflops)
    # An fma per lane and clock is two operations: 128 lanes per SM, 64 on A100, 256 on the dual-issue units of MI300X.
    lanes = gpu.tflops["fp32"] * 1e12 / (2 * gpu.sms * gpu.clock_mhz * 1e6)
    assert min(abs(lanes / n - 1) for n in (64, 128, 256)) < 0.06
    assert gpu.shared_per_block <= gpu.shared_per_sm
    assert gpu.bandwidth < gpu.tflops["fp32"] * 1e12


def test_common_gpus_have_a_datasheet():
    common = "a100-40gb a100-80gb h100-sxm h100-pcie h200 b200 rtx-3090 rtx-4090 l4 mi300x"
    assert set(common.split()) <= set(hardware.DATASHEETS)


@pytest.mark.parametrize(
    ("driver", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090 Ti", "geforce-rtx-3090-ti"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Odd/Name (rev 2)", "odd-name-rev-2-"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA Weird 9000", "weird-9000"),
    ],
)
def test_short_names(driver, short):
    assert hardware.short_name(driver) == short


def test_an_unknown_gpu_has_measured_ceilings_only():
    assert hardware.rates({"copy": 7.0}, "weird-9000") == {"copy": 7.0}
    assert hardware.rates({"copy": 7.0}, "h200")["copy"] == 7.0
    assert hardware.rates({}, "h200")["tensor.bfloat16"] == pytest.approx(989.4e12)
    with pytest.raises(UnknownGPU, match="did you mean 'h200'"):
        hardware.datasheet("h20")


@pytest.mark.gpu
def test_the_current_gpu():
    found = hardware.current_gpu()
    assert found["sms"] > 0
    assert found["memory"] > 2**30

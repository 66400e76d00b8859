"""Datasheets, short names and ceilings of GPUs."""

import pytest

from tilewright import hardware
from tilewright.errors import IncompleteDatasheet, UnknownGPU


@pytest.mark.parametrize("gpu", hardware.DATASHEETS.values(), ids=lambda gpu: gpu.name)
def test_datasheets_are_complete_and_plausible(gpu):
    assert gpu.source
    assert gpu.arch.startswith(("sm_", "gfx"))
    absent = {"sm_70": {"tensor.bfloat16", "tensor.tf32"}, "sm_75": {"tensor.bfloat16", "tensor.tf32"}}
    absent["gfx90a"] = {"tensor.tf32"}  # units that the architecture does not have
    units = {"tensor.bfloat16", "tensor.float16", "tensor.tf32", "fp32"} - absent.get(gpu.arch, set())
    assert units <= set(gpu.tflops)
    assert not absent.get(gpu.arch, set()) & set(gpu.tflops)
    # An fma per lane and clock is two operations: 128 lanes per SM, 64 on A100, 256 on the dual-issue units of MI300X.
    if not gpu.unpublished:
        lanes = gpu.tflops["fp32"] * 1e12 / (2 * gpu.sms * gpu.clock_mhz * 1e6)
        assert min(abs(lanes / n - 1) for n in (64, 128, 256)) < 0.06
        # So it is with tensor cores, which do 2^n operations per SM and clock. H100's rates hold at 1830 MHz.
        products = gpu.tflops["tensor.float16"] * 1e12 / (2 * gpu.sms * gpu.clock_mhz * 1e6)
        assert min(abs(products / 2**n - 1) for n in range(8, 13)) < 0.08
    assert gpu.shared_per_block <= gpu.shared_per_sm
    assert gpu.bandwidth < gpu.tflops["fp32"] * 1e12


def test_datasheets_that_are_not_measured_here_name_the_pages_they_were_compared_with():
    own = {"a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h200", "b200", "rtx-3090", "rtx-4090", "l4", "mi300x"}
    for gpu in hardware.DATASHEETS.values():
        assert gpu.pages or gpu.name in own, gpu.name
        assert all(page.startswith("http") for page in gpu.pages)


def test_common_gpus_have_a_datasheet():
    common = "a100-40gb a100-80gb h100-sxm h100-pcie h200 b200 rtx-3090 rtx-4090 l4 mi300x t4 v100 a10 a40 l40s"
    common += " rtx-3080 rtx-4080 rtx-5090 gh200 gb200 mi210 mi250x mi325x mi355x"
    for name in common.split():
        assert hardware.datasheet(name).bandwidth > 0


def test_what_a_datasheet_lacks_is_not_guessed():
    gb200 = hardware.datasheet("gb200")
    assert gb200.unpublished
    assert "special" not in gb200.rates()
    with pytest.raises(IncompleteDatasheet, match="the datasheet of gb200 lacks the number of SMs, the boost clock"):
        hardware.complete_datasheet("gb200")
    assert hardware.complete_datasheet("h200").name == "h200"


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
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 4080 SUPER", "geforce-rtx-4080-super"),
        ("AMD Instinct MI250X", "mi250x-gcd"),
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

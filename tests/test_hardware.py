import pytest

from tilewright import hardware
from tilewright.errors import UnknownGPU


@pytest.mark.parametrize("gpu", hardware.DATASHEETS.values(), ids=lambda gpu: gpu.name)
def test_datasheets_are_whole_and_plausible(gpu):
    assert gpu.source
    assert gpu.arch.startswith(("sm_", "gfx"))
    assert {"tensor.bfloat16", "tensor.float16", "tensor.tf32", "fp32"} <= set(gpu.tera)
    # fp32 is two operations per lane per clock: 128 lanes an SM, 64 on A100 and 256 on MI300X's dual-issue units
    lanes = gpu.tera["fp32"] * 1e12 / (2 * gpu.sms * gpu.clock_mhz * 1e6)
    assert min(abs(lanes / n - 1) for n in (64, 128, 256)) < 0.06
    assert gpu.shared_per_block <= gpu.shared_per_sm
    assert gpu.bandwidth < gpu.tera["fp32"] * 1e12


def test_the_table_has_the_gpus_people_have():
    wanted = "a100-40gb a100-80gb h100-sxm h100-pcie h200 b200 rtx-3090 rtx-4090 l4 mi300x"
    assert set(wanted.split()) <= set(hardware.DATASHEETS)


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


def test_an_unknown_gpu_works_from_measured_ceilings_alone():
    assert hardware.rates({"copy": 7.0}, "weird-9000") == {"copy": 7.0}
    assert hardware.rates({"copy": 7.0}, "h200")["copy"] == 7.0
    assert hardware.rates({}, "h200")["tensor.bfloat16"] == pytest.approx(989.4e12)
    with pytest.raises(UnknownGPU, match="did you mean 'h200'"):
        hardware.datasheet("h20")


@pytest.mark.gpu
def test_the_gpu_in_hand_describes_itself():
    found = hardware.in_hand()
    assert found["sms"] > 0
    assert found["memory"] > 2**30

"""GPUs: what the datasheets say, and what the one in hand says of itself."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml

from tilewright.errors import UnknownGPU

KIB, MIB, GB = 1024, 1024**2, 10**9
TERA = 1e12
# Of a grid: CUDA C++ Programming Guide, table of compute capabilities.
MOST_BLOCKS = {"x": 2**31 - 1, "y": 65535, "z": 65535}


@dataclass(frozen=True)
class GPU:
    """A GPU by datasheet. Rates are per second, dense, with fp32 accumulation; sizes are bytes."""

    name: str
    arch: str  # the compiler's target
    matches: tuple[str, ...]  # how the driver names it
    sms: int
    clock_mhz: int  # boost
    memory: int
    bandwidth: float
    l2: int
    shared_per_sm: int
    shared_per_block: int
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536
    warp: int = 32
    special_per_clock: int = 16  # special-function results an SM gives each clock
    tera: Mapping[str, float] = field(default_factory=dict)  # TFLOP/s by unit
    source: str = ""

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    def rates(self) -> dict[str, float]:
        """The most of each unit per second, keyed as in Cost."""
        memory = dict.fromkeys(("copy", "read", "write"), self.bandwidth)
        special = {"special": self.sms * self.special_per_clock * self.clock_mhz * 1e6}
        return memory | special | {unit: value * TERA for unit, value in self.tera.items()}


def _tensor(half: float, tf32: float, fp8: float | None, int8: float, fp32: float, fp64: float) -> dict[str, float]:
    units = {
        "tensor.float16": half,
        "tensor.bfloat16": half,
        "tensor.tf32": tf32,
        "tensor.int8": int8,
        "fp32": fp32,
        "fp64": fp64,
    }
    return units | ({"tensor.float8_e4m3fn": fp8} if fp8 else {})


_AMPERE: Any = dict(
    arch="sm_80", shared_per_sm=164 * KIB, shared_per_block=163 * KIB, warps_per_sm=64, blocks_per_sm=32
)
_HOPPER: Any = dict(
    arch="sm_90", shared_per_sm=228 * KIB, shared_per_block=227 * KIB, warps_per_sm=64, blocks_per_sm=32
)
_OCCUPANCY = "limits per SM: CUDA C++ Programming Guide, table of compute capabilities"

DATASHEETS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU(
            name="a100-40gb", matches=("A100-SXM4-40GB", "A100-PCIE-40GB"), sms=108, clock_mhz=1410,
            memory=40 * GB, bandwidth=1555e9, l2=40 * MIB, tera=_tensor(312, 156, None, 624, 19.5, 9.7),
            source=f"NVIDIA A100 datasheet, June 2021; A100 architecture whitepaper; {_OCCUPANCY}", **_AMPERE,
        ),
        GPU(
            name="a100-80gb", matches=("A100-SXM4-80GB", "A100 80GB"), sms=108, clock_mhz=1410,
            memory=80 * GB, bandwidth=2039e9, l2=40 * MIB, tera=_tensor(312, 156, None, 624, 19.5, 9.7),
            source=f"NVIDIA A100 datasheet, June 2021 (SXM); A100 architecture whitepaper; {_OCCUPANCY}", **_AMPERE,
        ),
        GPU(
            name="h100-sxm", matches=("H100 80GB HBM3",), sms=132, clock_mhz=1980,
            memory=80 * GB, bandwidth=3350e9, l2=50 * MIB, tera=_tensor(989.4, 494.7, 1978.9, 1978.9, 66.9, 33.5),
            source=f"NVIDIA H100 datasheet (sparse rates halved); H100 architecture whitepaper; {_OCCUPANCY}",
            **_HOPPER,
        ),
        GPU(
            name="h100-pcie", matches=("H100 PCIe",), sms=114, clock_mhz=1755,
            memory=80 * GB, bandwidth=2000e9, l2=50 * MIB, tera=_tensor(756, 378, 1513, 1513, 51, 26),
            source=f"NVIDIA H100 datasheet (sparse rates halved); H100 architecture whitepaper; {_OCCUPANCY}",
            **_HOPPER,
        ),
        GPU(
            name="h200", matches=("H200",), sms=132, clock_mhz=1980,
            memory=141 * GB, bandwidth=4800e9, l2=60 * MIB, tera=_tensor(989.4, 494.7, 1978.9, 1978.9, 66.9, 33.5),
            source=f"NVIDIA H200 datasheet (sparse rates halved); L2 as the driver reports it; {_OCCUPANCY}",
            **_HOPPER,
        ),
        GPU(
            name="b200", arch="sm_100", matches=("B200",), sms=148, clock_mhz=1965,
            memory=180 * GB, bandwidth=8000e9, l2=126 * MIB, shared_per_sm=228 * KIB, shared_per_block=227 * KIB,
            warps_per_sm=64, blocks_per_sm=32, tera=_tensor(2250, 1125, 4500, 4500, 75, 37),
            source=f"NVIDIA HGX B200 datasheet (per GPU, sparse rates halved); Blackwell tuning guide; {_OCCUPANCY}",
        ),
        GPU(
            name="rtx-3090", arch="sm_86", matches=("RTX 3090",), sms=82, clock_mhz=1695,
            memory=24 * GB, bandwidth=936e9, l2=6 * MIB, shared_per_sm=100 * KIB, shared_per_block=99 * KIB,
            warps_per_sm=48, blocks_per_sm=16, tera=_tensor(71, 35.6, None, 284, 35.6, 0.56),
            source=f"NVIDIA GA102 architecture whitepaper, appendix A; {_OCCUPANCY}",
        ),
        GPU(
            name="rtx-4090", arch="sm_89", matches=("RTX 4090",), sms=128, clock_mhz=2520,
            memory=24 * GB, bandwidth=1008e9, l2=72 * MIB, shared_per_sm=100 * KIB, shared_per_block=99 * KIB,
            warps_per_sm=48, blocks_per_sm=24, tera=_tensor(165.2, 82.6, 330.3, 660.6, 82.6, 1.29),
            source=f"NVIDIA Ada architecture whitepaper, appendix A; {_OCCUPANCY}",
        ),
        GPU(
            name="l4", arch="sm_89", matches=("NVIDIA L4",), sms=58, clock_mhz=2040,
            memory=24 * GB, bandwidth=300e9, l2=48 * MIB, shared_per_sm=100 * KIB, shared_per_block=99 * KIB,
            warps_per_sm=48, blocks_per_sm=24, tera=_tensor(121, 60, 242.5, 242.5, 30.3, 0.49),
            source=f"NVIDIA L4 datasheet (sparse rates halved); Ada architecture whitepaper; {_OCCUPANCY}",
        ),
        GPU(
            name="mi300x", arch="gfx942", matches=("MI300X", "MI300X OAM"), sms=304, clock_mhz=2100, warp=64,
            memory=192 * GB, bandwidth=5300e9, l2=4 * MIB, shared_per_sm=64 * KIB, shared_per_block=64 * KIB,
            warps_per_sm=32, blocks_per_sm=32, registers_per_sm=131072,
            tera=_tensor(1307.4, 653.7, 2614.9, 2614.9, 163.4, 81.7),
            source="AMD Instinct MI300X datasheet; CDNA 3 whitepaper and instruction set guide "
            "(L2 per die, beside 256 MB of Infinity Cache; a wave is a warp, a compute unit is an SM)",
        ),
        GPU(
            name="rtx-5090", arch="sm_120", matches=("RTX 5090",), sms=170, clock_mhz=2407,
            memory=32 * GB, bandwidth=1792e9, l2=96 * MIB, shared_per_sm=100 * KIB, shared_per_block=99 * KIB,
            warps_per_sm=48, blocks_per_sm=24, tera=_tensor(209.5, 104.8, 419, 838, 104.8, 1.64),
            source=f"NVIDIA RTX Blackwell architecture whitepaper, appendix A; {_OCCUPANCY}",
        ),
        GPU(
            name="mi355x", arch="gfx950", matches=("MI355X", "MI355X OAM"), sms=256, clock_mhz=2400, warp=64,
            memory=288 * GB, bandwidth=8000e9, l2=4 * MIB, shared_per_sm=160 * KIB, shared_per_block=160 * KIB,
            warps_per_sm=32, blocks_per_sm=32, registers_per_sm=131072,
            tera=_tensor(2516.6, 157.3, 5033.2, 5033.2, 157.3, 78.6),
            source="AMD Instinct MI355X datasheet; CDNA 4 whitepaper and instruction set guide "
            "(no TF32 unit: its rate is that of fp32; L2 per die, beside 256 MB of Infinity Cache)",
        ),
    )
}  # fmt: skip


MEANT = {"a100": "a100-80gb", "h100": "h100-sxm"}  # by a name that several have


def datasheet(name: str) -> GPU:
    """The datasheet of a GPU by our short name."""
    full = MEANT.get(name.lower(), name.lower())
    if full not in DATASHEETS:
        same = [gpu.name for gpu in DATASHEETS.values() if gpu.arch == full.removesuffix("a")]  # as in sm_90a
        raise UnknownGPU(name, [*DATASHEETS, *MEANT], same)
    return DATASHEETS[full]


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def short_name(device_name: str) -> str:
    """Our short name for what the driver calls a GPU; an unknown one keeps its own, made fit for a folder."""
    for gpu in DATASHEETS.values():
        if any(re.search(rf"\b{match}$", device_name) for match in gpu.matches):  # the end: a Ti is another card
            return gpu.name
    return re.sub(r"[^a-z0-9.]+", "-", device_name.lower().removeprefix("nvidia "))


def in_hand() -> dict[str, Any]:
    """The GPU in hand, as torch and NVML see it. Needs one."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": short_name(properties.name),
        "name": properties.name,
        "sms": properties.multi_processor_count,
        "memory": properties.total_memory,
        "l2": properties.L2_cache_size,
        "registers_per_sm": properties.regs_per_multiprocessor,
        "shared_per_sm": properties.shared_memory_per_multiprocessor,
        "shared_per_block": properties.shared_memory_per_block_optin,
        "capability": f"{properties.major}.{properties.minor}",
        **_driver_state(),
    }


def _driver_state() -> dict[str, Any]:
    """What only the driver knows; nothing where it does not tell."""
    with contextlib.suppress(pynvml.NVMLError):
        handle = nvml_handle()
        return {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_limit_w": round(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            **present_state(handle),
        }
    return {}


def nvml_handle() -> Any:
    """The GPU in hand, for the driver's own questions. Raises pynvml.NVMLError where the driver does not answer."""
    pynvml.nvmlInit()
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(_physical_index())
    except (RuntimeError, AssertionError):  # no CUDA, or a part of a GPU
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND) from None


def present_state(handle: Any) -> dict[str, Any]:
    return {
        "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "power_w": round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    }


def _physical_index() -> int:
    """NVML counts all GPUs, torch only the visible ones."""
    import torch

    return torch.cuda._get_nvml_device_index(torch.cuda.current_device())


def rates(measured: Mapping[str, float], gpu: str) -> dict[str, float]:
    """The ceilings to hold a kernel against: measured where they were, by datasheet elsewhere."""
    sheet = DATASHEETS.get(gpu)
    return (sheet.rates() if sheet else {}) | dict(measured)


def versions() -> dict[str, str]:
    """The software a measurement depends on."""
    import torch
    import triton

    from tilewright import __version__

    return {
        "tilewright": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "none",
    }

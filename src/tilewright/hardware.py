"""GPU datasheets, and the properties and state of this machine's GPU."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.errors import IncompleteDatasheet, UnknownGPU

KIB, MIB, GB = 1024, 1024**2, 10**9
TERA = 1e12
MAX_GRID = {"x": 2**31 - 1, "y": 65535, "z": 65535}  # CUDA C++ Programming Guide, table of compute capabilities


@dataclass(frozen=True)
class GPU:
    """The datasheet of a GPU. A size or rate that its vendor does not publish is 0 or absent."""

    name: str
    arch: str  # compiler target
    matches: tuple[str, ...]  # device names reported by the driver
    sms: int
    clock_mhz: int  # boost clock
    memory: int  # bytes
    bandwidth: float  # bytes/s of device memory
    l2: int  # bytes
    shared_per_sm: int  # bytes
    shared_per_block: int  # bytes, the largest opt-in size
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536  # 32-bit registers
    warp: int = 32  # threads
    special_per_clock: int = 16  # special-function results per SM and clock
    tflops: Mapping[str, float] = field(default_factory=dict)  # dense TFLOP/s by unit, with fp32 accumulation
    source: str = ""
    pages: tuple[str, ...] = ()  # public pages on which figures of the source were compared

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def unpublished(self) -> list[str]:
        """The fields that the datasheet lacks, without which a compiled kernel cannot be judged."""
        needed = {"the number of SMs": self.sms, "the boost clock": self.clock_mhz, "the L2 size": self.l2}
        return [name for name, value in needed.items() if not value]

    def rates(self) -> dict[str, float]:
        """Return the peak rate of each unit per second, keyed as in Cost."""
        memory = dict.fromkeys(("copy", "read", "write"), self.bandwidth)
        special = {} if self.unpublished else {"special": self.sms * self.special_per_clock * self.clock_mhz * 1e6}
        return memory | special | {unit: value * TERA for unit, value in self.tflops.items()}


def _tflops(*, half: float, fp32: float, bf16: bool = True, **others: float) -> dict[str, float]:
    """Return the rates of a datasheet by unit; what it does not name is absent."""
    names = {"tf32": "tensor.tf32", "int8": "tensor.int8", "fp8": "tensor.float8_e4m3fn", "fp64": "fp64"}
    units = {"tensor.float16": half} | ({"tensor.bfloat16": half} if bf16 else {})
    return units | {"fp32": fp32} | {names[name]: rate for name, rate in others.items()}


def _limits(shared_kib: int, block_kib: int, warps: int, blocks: int, **more: int) -> dict[str, int]:
    shared = {"shared_per_sm": shared_kib * KIB, "shared_per_block": block_kib * KIB}
    return shared | {"warps_per_sm": warps, "blocks_per_sm": blocks, **more}


# Limits per SM: CUDA C++ Programming Guide, table of compute capabilities. On AMD, an SM is a compute unit.
LIMITS: dict[str, Any] = {
    "sm_70": _limits(96, 96, 64, 32),
    "sm_75": _limits(64, 64, 32, 16),
    "sm_80": _limits(164, 163, 64, 32),
    "sm_86": _limits(100, 99, 48, 16),
    "sm_89": _limits(100, 99, 48, 24),
    "sm_90": _limits(228, 227, 64, 32),
    "sm_100": _limits(228, 227, 64, 32),
    "sm_120": _limits(100, 99, 48, 24),
    "gfx90a": _limits(64, 64, 32, 32, registers_per_sm=131072, warp=64),
    "gfx942": _limits(64, 64, 32, 32, registers_per_sm=131072, warp=64),
    "gfx950": _limits(160, 160, 32, 32, registers_per_sm=131072, warp=64),
}
_ROCM = "https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html"
_GUIDE = "limits per SM: CUDA C++ Programming Guide, table of compute capabilities"
_A100: Any = dict(
    arch="sm_80", sms=108, clock_mhz=1410, l2=40 * MIB,
    tflops=_tflops(half=312, tf32=156, int8=624, fp32=19.5, fp64=9.7), **LIMITS["sm_80"],
)  # fmt: skip
_HOPPER_SXM: Any = dict(
    arch="sm_90", sms=132, clock_mhz=1980,
    tflops=_tflops(half=989.4, tf32=494.7, fp8=1978.9, int8=1978.9, fp32=66.9, fp64=33.5), **LIMITS["sm_90"],
)  # fmt: skip
_V100: Any = dict(
    arch="sm_70", sms=80, clock_mhz=1530, bandwidth=900e9, l2=6 * MIB, **LIMITS["sm_70"],
    tflops=_tflops(half=125, bf16=False, fp32=15.7, fp64=7.8),
    source=f"NVIDIA V100 datasheet, January 2020 (SXM2); V100 architecture whitepaper; {_GUIDE}",
    pages=(
        "http://www.xenon.com.au/nvidia-tesla-volta-worlds-advanced-data-center-gpu/",
        "https://huggingface.co/RajBhope/gpu-runtime-predictor/blob/main/gpu_catalog.json",
    ),
)  # fmt: skip
_CDNA3: Any = dict(
    arch="gfx942", sms=304, clock_mhz=2100, l2=4 * MIB, **LIMITS["gfx942"],
    tflops=_tflops(half=1307.4, tf32=653.7, fp8=2614.9, int8=2614.9, fp32=163.4, fp64=81.7),
)  # fmt: skip
_CDNA2: Any = dict(arch="gfx90a", clock_mhz=1700, bandwidth=1638e9, l2=8 * MIB, memory=64 * GB, **LIMITS["gfx90a"])

DATASHEETS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU(
            name="a100-40gb", matches=("A100-SXM4-40GB", "A100-PCIE-40GB"), memory=40 * GB, bandwidth=1555e9, **_A100,
            source=f"NVIDIA A100 datasheet, June 2021; A100 architecture whitepaper; {_GUIDE}",
        ),
        GPU(
            name="a100-80gb", matches=("A100-SXM4-80GB", "A100 80GB"), memory=80 * GB, bandwidth=2039e9, **_A100,
            source=f"NVIDIA A100 datasheet, June 2021 (SXM); A100 architecture whitepaper; {_GUIDE}",
        ),
        GPU(
            name="h100-sxm", matches=("H100 80GB HBM3",), memory=80 * GB, bandwidth=3350e9, l2=50 * MIB, **_HOPPER_SXM,
            source=f"NVIDIA H100 datasheet (sparse rates halved); H100 architecture whitepaper; {_GUIDE}",
        ),
        GPU(
            name="h100-pcie", matches=("H100 PCIe",), arch="sm_90", sms=114, clock_mhz=1755,
            memory=80 * GB, bandwidth=2000e9, l2=50 * MIB, **LIMITS["sm_90"],
            tflops=_tflops(half=756, tf32=378, fp8=1513, int8=1513, fp32=51, fp64=26),
            source=f"NVIDIA H100 datasheet (sparse rates halved); H100 architecture whitepaper; {_GUIDE}",
        ),
        GPU(
            name="h200", matches=("H200",), memory=141 * GB, bandwidth=4800e9, l2=60 * MIB, **_HOPPER_SXM,
            source=f"NVIDIA H200 datasheet (sparse rates halved); L2 as the driver reports it; {_GUIDE}",
        ),
        GPU(
            name="b200", matches=("B200",), arch="sm_100", sms=148, clock_mhz=1965,
            memory=180 * GB, bandwidth=8000e9, l2=126 * MIB, **LIMITS["sm_100"],
            tflops=_tflops(half=2250, tf32=1125, fp8=4500, int8=4500, fp32=75, fp64=37),
            source=f"NVIDIA HGX B200 datasheet (per GPU, sparse rates halved); Blackwell tuning guide; {_GUIDE}",
        ),
        GPU(
            name="rtx-3090", matches=("RTX 3090",), arch="sm_86", sms=82, clock_mhz=1695,
            memory=24 * GB, bandwidth=936e9, l2=6 * MIB, **LIMITS["sm_86"],
            tflops=_tflops(half=71, tf32=35.6, int8=284, fp32=35.6, fp64=0.56),
            source=f"NVIDIA GA102 architecture whitepaper, appendix A; {_GUIDE}",
        ),
        GPU(
            name="rtx-4090", matches=("RTX 4090",), arch="sm_89", sms=128, clock_mhz=2520,
            memory=24 * GB, bandwidth=1008e9, l2=72 * MIB, **LIMITS["sm_89"],
            tflops=_tflops(half=165.2, tf32=82.6, fp8=330.3, int8=660.6, fp32=82.6, fp64=1.29),
            source=f"NVIDIA Ada architecture whitepaper, appendix A; {_GUIDE}",
        ),
        GPU(
            name="l4", matches=("NVIDIA L4",), arch="sm_89", sms=58, clock_mhz=2040,
            memory=24 * GB, bandwidth=300e9, l2=48 * MIB, **LIMITS["sm_89"],
            tflops=_tflops(half=121, tf32=60, fp8=242.5, int8=242.5, fp32=30.3, fp64=0.49),
            source=f"NVIDIA L4 datasheet (sparse rates halved); Ada architecture whitepaper; {_GUIDE}",
        ),
        GPU(
            name="mi300x", matches=("MI300X", "MI300X OAM"), memory=192 * GB, bandwidth=5300e9, **_CDNA3,
            source="AMD Instinct MI300X datasheet; CDNA 3 whitepaper and instruction set guide "
            "(L2 per die, beside 256 MB of Infinity Cache; a wave is a warp, a compute unit is an SM)",
        ),
        GPU(
            name="rtx-5090", matches=("RTX 5090",), arch="sm_120", sms=170, clock_mhz=2407,
            memory=32 * GB, bandwidth=1792e9, l2=96 * MIB, **LIMITS["sm_120"],
            tflops=_tflops(half=209.5, tf32=104.8, fp8=419, int8=838, fp32=104.8, fp64=1.64),
            source=f"NVIDIA RTX Blackwell architecture whitepaper, appendix A; {_GUIDE}",
            pages=(
                "https://pocketmags.com/linux-format-magazine/may-2025/articles/nvidia-geforce-rtx-5090",
            ),
        ),
        GPU(
            name="mi355x", matches=("MI355X", "MI355X OAM"), arch="gfx950", sms=256, clock_mhz=2400,
            memory=288 * GB, bandwidth=8000e9, l2=4 * MIB, **LIMITS["gfx950"],
            tflops=_tflops(half=2516.6, tf32=157.3, fp8=5033.2, int8=5033.2, fp32=157.3, fp64=78.6),
            source="AMD Instinct MI355X datasheet; CDNA 4 whitepaper and instruction set guide "
            "(no TF32 unit: its rate is that of fp32; L2 per die, beside 256 MB of Infinity Cache)",
            pages=(_ROCM,),
        ),
        GPU(
            name="t4", matches=("T4",), arch="sm_75", sms=40, clock_mhz=1590,
            memory=16 * GB, bandwidth=320e9, l2=4 * MIB, **LIMITS["sm_75"],
            tflops=_tflops(half=65, bf16=False, int8=130, fp32=8.1),
            source=f"NVIDIA T4 datasheet, March 2019; Turing architecture whitepaper; {_GUIDE}",
            pages=(
                "https://sysrqmts.com/en/gpus/nvidia/tesla/t4",
                "https://heise.de/news/Nvidia-Tesla-P4-K-I-Beschleuniger-mit-8-TFlops-bei-75-Watt-Leistungsaufnahme-4164684.html",
            ),
        ),
        GPU(name="v100-16gb", matches=("V100-SXM2-16GB",), memory=16 * GB, **_V100),
        GPU(name="v100-32gb", matches=("V100-SXM2-32GB",), memory=32 * GB, **_V100),
        GPU(
            name="a10", matches=("A10",), arch="sm_86", sms=72, clock_mhz=1695,
            memory=24 * GB, bandwidth=600e9, l2=6 * MIB, **LIMITS["sm_86"],
            tflops=_tflops(half=125, tf32=62.5, int8=250, fp32=31.2),
            source=f"NVIDIA A10 datasheet (dense rates); GA102 architecture whitepaper; {_GUIDE}",
            pages=(
                "https://sysrqmts.com/ru/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000",
                "https://gist.github.com/kimbochen",
            ),
        ),
        GPU(
            name="a40", matches=("A40",), arch="sm_86", sms=84, clock_mhz=1740,
            memory=48 * GB, bandwidth=696e9, l2=6 * MIB, **LIMITS["sm_86"],
            tflops=_tflops(half=149.7, tf32=74.8, int8=299.3, fp32=37.4),
            source=f"NVIDIA A40 datasheet (dense rates); GA102 architecture whitepaper; {_GUIDE}",
            pages=(
                "https://hmc-tech.com/gpu/nvidia-a100-vs-nvidia-a40",
                "https://gpu.spicedreamphone.com/en/gpu/nvidia/a40-pcie",
            ),
        ),
        GPU(
            name="l40s", matches=("L40S",), arch="sm_89", sms=142, clock_mhz=2520,
            memory=48 * GB, bandwidth=864e9, l2=96 * MIB, **LIMITS["sm_89"],
            tflops=_tflops(half=362.05, tf32=183, fp8=733, int8=733, fp32=91.6),
            source=f"NVIDIA L40S datasheet (dense rates); Ada architecture whitepaper (L2 of a full AD102); {_GUIDE}",
            pages=(
                "https://www.mullet.se/product.html?product_id=355414",
                "https://hmc-tech.com/gpu/nvidia-l40s-vs-nvidia-t40",
            ),
        ),
        GPU(
            name="rtx-3080", matches=("RTX 3080",), arch="sm_86", sms=68, clock_mhz=1710,
            memory=10 * GB, bandwidth=760e9, l2=5 * MIB, **LIMITS["sm_86"],
            tflops=_tflops(half=59.5, tf32=29.8, int8=238, fp32=29.8, fp64=0.47),
            source=f"NVIDIA GA102 architecture whitepaper, appendix A (10 GB); {_GUIDE}",
            pages=("https://www.itcreations.com/nvidia-gpu/nvidia-geforce-rtx-3080-gpu",),
        ),
        GPU(
            name="rtx-4080", matches=("RTX 4080",), arch="sm_89", sms=76, clock_mhz=2505,
            memory=16 * GB, bandwidth=716.8e9, l2=64 * MIB, **LIMITS["sm_89"],
            tflops=_tflops(half=97.5, tf32=48.7, fp8=194.9, int8=389.9, fp32=48.7, fp64=0.76),
            source=f"NVIDIA Ada architecture whitepaper, appendix B (16 GB); {_GUIDE}",
            pages=("https://www.holynerdvana.com/2022/10/nvidia-geforce-rtx-4080-specifications.html",),
        ),
        GPU(
            name="gh200-96gb", matches=("GH200 480GB",), memory=96 * GB, bandwidth=4000e9, l2=60 * MIB, **_HOPPER_SXM,
            source="NVIDIA GH200 datasheet (HBM3; its rates are those of the H100 SXM, and so are SMs and clock here); "
            f"H100 architecture whitepaper (L2 with six memory stacks); {_GUIDE}",
            pages=("https://nishikiout.net/entry/2023/08/09/143040",),
        ),
        GPU(
            name="gb200", matches=("GB200",), arch="sm_100", sms=0, clock_mhz=0,
            memory=186 * GB, bandwidth=8000e9, l2=0, **LIMITS["sm_100"],
            tflops=_tflops(half=2500, tf32=1250, fp8=5000, int8=5000, fp32=90, fp64=45),
            source="NVIDIA Blackwell architecture brief (a GPU of GB200 at 1200 W, dense rates; no SMs, clock or L2); "
            f"{_GUIDE}",
            pages=(
                "https://glennklockwood.com/garden/processors/B200",
                "https://raw.githubusercontent.com/mlcommons/inference_results_v6.1/main/closed/Crusoe/systems/GB200-NVL72_GB200-186GB_aarch64x16_Dynamo.json",
            ),
        ),
        GPU(
            name="mi210", matches=("MI210",), sms=104, **_CDNA2,
            tflops=_tflops(half=181, int8=181, fp32=22.6, fp64=22.6),
            source="AMD Instinct MI210 datasheet (vector rates of fp32 and fp64; no TF32 unit); ROCm GPU hardware "
            "specifications",
            pages=(_ROCM,),
        ),
        GPU(
            name="mi250x-gcd", matches=("MI250X", "MI250X / MI250"), sms=110, **_CDNA2,
            tflops=_tflops(half=191.5, int8=191.5, fp32=23.95, fp64=23.95),
            source="AMD Instinct MI250X datasheet, halved: a GPU of the driver is one of its two dies (vector rates "
            "of fp32 and fp64; no TF32 unit); ROCm GPU hardware specifications",
            pages=(
                _ROCM,
                "https://zexron.com/amd-mi250-x-aldebaran-as-mcm-with-up-to-479-teraflop-s-and-560-watt-tdp",
            ),
        ),
        GPU(
            name="mi325x", matches=("MI325X", "MI325X OAM"), memory=256 * GB, bandwidth=6000e9, **_CDNA3,
            source="AMD Instinct MI325X datasheet; CDNA 3 whitepaper and instruction set guide (L2 per die)",
            pages=(
                _ROCM,
                "https://docs.vultr.com/inference-cookbook/rocm/getting-started/hardware-requirements",
            ),
        ),
    )
}  # fmt: skip
ALIASES = {
    "a100": "a100-80gb",
    "h100": "h100-sxm",
    "v100": "v100-32gb",
    "gh200": "gh200-96gb",
    "mi250x": "mi250x-gcd",
}


def datasheet(name: str) -> GPU:
    """Return the datasheet of a GPU by its short name or alias."""
    full = ALIASES.get(name.lower(), name.lower())
    if full not in DATASHEETS:
        same = [gpu.name for gpu in DATASHEETS.values() if gpu.arch == full.removesuffix("a")]  # as in sm_90a
        raise UnknownGPU(name, [*DATASHEETS, *ALIASES], same)
    return DATASHEETS[full]


def complete_datasheet(name: str) -> GPU:
    """Return a datasheet that has everything a compiled kernel is judged by."""
    gpu = datasheet(name)
    if gpu.unpublished:
        raise IncompleteDatasheet(gpu.name, gpu.unpublished)
    return gpu


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def short_name(device_name: str) -> str:
    """Return our short name for a device name, or the device name as a folder name if the GPU is unknown."""
    for gpu in DATASHEETS.values():
        if any(re.search(rf"\b{match}$", device_name) for match in gpu.matches):  # at the end: a Ti is another GPU
            return gpu.name
    return re.sub(r"[^a-z0-9.]+", "-", device_name.lower().removeprefix("nvidia "))


def current_gpu() -> dict[str, Any]:
    """Return the properties and the state of the current GPU, from torch and NVML."""
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
    """Return the driver version, clocks and power limit, or nothing if NVML fails."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        handle = nvml_handle()
        return {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_limit_w": round(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            **current_state(handle),
        }
    return {}


def nvml_handle() -> Any:
    """Return the NVML handle of the current GPU, or raise pynvml.NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(_physical_index())
    except (RuntimeError, AssertionError):  # no CUDA, or a MIG slice
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND) from None


def current_state(handle: Any) -> dict[str, Any]:
    import pynvml

    return {
        "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "power_w": round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    }


def _physical_index() -> int:
    """Return the NVML index of the current GPU; NVML counts all GPUs, torch only the visible ones."""
    import torch

    return torch.cuda._get_nvml_device_index(torch.cuda.current_device())


def rates(measured: Mapping[str, float], gpu: str) -> dict[str, float]:
    """Return the ceilings of a GPU: measured rates, and the datasheet's for units that were not measured."""
    sheet = DATASHEETS.get(gpu)
    return (sheet.rates() if sheet else {}) | dict(measured)


def versions() -> dict[str, str]:
    """Return the versions of the software that a measurement depends on."""
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

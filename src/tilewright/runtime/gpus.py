"""The properties of a GPU that launch plans depend on, by its number."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tilewright import hardware
from tilewright.runtime.operator import constant_when_compiled

INTERPRETED_AS = "h200"  # the GPU that interpreted kernels are planned for


class GPUFacts(NamedTuple):
    name: str
    sms: int
    bandwidth: float  # bytes/s of device memory
    l2: int  # bytes
    shared_per_block: int  # bytes


def datasheet_facts(name: str) -> GPUFacts:
    """Return the facts of a GPU by its short name, from its datasheet."""
    sheet = hardware.datasheet(name)
    return GPUFacts(sheet.name, sheet.sms, sheet.bandwidth, sheet.l2, sheet.shared_per_block)


@functools.cache
def gpu_facts(device: int) -> GPUFacts:
    """Return the facts of a GPU by its number, negative for an interpreted tensor."""
    if device < 0 or not torch.cuda.is_available():
        return datasheet_facts(INTERPRETED_AS)
    found = torch.cuda.get_device_properties(device)
    name = hardware.short_name(found.name)
    sheet = hardware.DATASHEETS.get(name)
    # Without a datasheet: two transfers per clock of the memory bus.
    bandwidth = sheet.bandwidth if sheet else 2 * found.memory_clock_rate * 1000 * found.memory_bus_width / 8
    return GPUFacts(
        name, found.multi_processor_count, bandwidth, found.L2_cache_size, found.shared_memory_per_block_optin
    )


@constant_when_compiled  # it cannot trace the cache, and need not
def has_fp8(device: int) -> bool:
    """Return whether the GPU of this number converts and multiplies e4m3 and e5m2; interpreted kernels do."""
    return device < 0 or _compute_capability(device) >= (8, 9)


@functools.cache
def _compute_capability(device: int) -> tuple[int, int]:
    """Return the compute capability of a GPU, (0, 0) unless it is NVIDIA's."""
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)

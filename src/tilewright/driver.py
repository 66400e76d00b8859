"""A Triton driver for machines without a GPU, so that host code which asks `triton.runtime.driver.active` runs there.

Device properties come from a datasheet, and tensors live on the CPU. `kernel.warmup()` compiles for that GPU, so the
registers and the shared memory it reports are real; only a launch needs the interpreter.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.driver import ty_to_cpp
from triton.runtime import driver

from tilewright.errors import NoGPU
from tilewright.hardware import DATASHEETS, GPU

MODEL = DATASHEETS["h200"]  # the GPU whose arithmetic the interpreter reproduces
_THREADS = 1024  # per block, on every GPU
_REGISTERS, _FRAME = 0x2F, 0x11  # attributes in a cubin: registers per thread, and stack bytes, which are spills


def target(gpu: GPU) -> GPUTarget:
    """Return the Triton compile target of a GPU."""
    if gpu.is_amd:
        return GPUTarget("hip", gpu.arch, gpu.warp)
    return GPUTarget("cuda", int(gpu.arch.removeprefix("sm_")), gpu.warp)


def device_properties(gpu: GPU) -> dict[str, int]:
    """Return the device properties that Triton's driver reports for a GPU."""
    return {
        "multiprocessor_count": gpu.sms,
        "max_shared_mem": gpu.shared_per_block,
        "max_num_regs": gpu.registers_per_sm,
        "warpSize": gpu.warp,
        "sm_clock_rate": gpu.clock_mhz * 1000,
    }


def cuda_queries(gpu: GPU, index: int = 0) -> dict[str, Any]:
    """Return functions of torch.cuda, by name, that describe a GPU, the only one, with this index.

    With them, `with torch.cuda.device(x.device)` and `torch.cuda.set_device` take tensors of every device.
    """
    digits = gpu.arch.removeprefix("sm_").removeprefix("gfx")
    major, minor = (digits[0], digits[1]) if gpu.is_amd else (digits[:-1], digits[-1])
    properties = SimpleNamespace(
        name=gpu.matches[0],
        major=int(major),
        minor=int(minor),
        gcnArchName=gpu.arch,
        multi_processor_count=gpu.sms,
        total_memory=gpu.memory,
        L2_cache_size=gpu.l2,
        regs_per_multiprocessor=gpu.registers_per_sm,
        shared_memory_per_multiprocessor=gpu.shared_per_sm,
        shared_memory_per_block_optin=gpu.shared_per_block,
        max_threads_per_multi_processor=gpu.warps_per_sm * gpu.warp,
        warp_size=gpu.warp,
    )
    return {
        "get_device_name": lambda *_, **__: properties.name,
        "get_device_capability": lambda *_, **__: (properties.major, properties.minor),
        "get_device_properties": lambda *_, **__: properties,
        "current_device": lambda: index,
        "set_device": lambda *_: None,
        "synchronize": lambda *_, **__: None,
        "is_current_stream_capturing": lambda: False,
        "_get_device_index": lambda *_, **__: index,
        "_exchange_device": lambda *_: index,
        "_maybe_exchange_device": lambda *_: index,
    }


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Make a driver active for the duration of the context, unless there is one; torch.cuda describes its GPU too.

    `torch.cuda.is_available()` still says no, so programs that ask keep their tensors on the CPU.
    """
    if driver._active is not None or any(backend.driver.is_active() for backend in backends.values()):
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(driver, "_active", StandIn()))
        for name, query in cuda_queries(MODEL).items():
            stack.enter_context(patch.object(torch.cuda, name, query))
        yield


class StandIn(DriverBase):
    """The driver of a GPU that is not there; its tensors are CPU tensors."""

    launcher_cls: Any = staticmethod(lambda *_: None)

    def __init__(self) -> None:
        self.utils = self

    @classmethod
    def is_active(cls) -> Any:
        return False

    def get_current_target(self) -> Any:
        return target(MODEL)

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return divmod(int(target(MODEL).arch), 10)

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty_to_cpp(ty)

    def get_benchmarker(self) -> Any:
        raise NoGPU("a benchmark")

    get_empty_cache_for_benchmark = get_benchmarker  # triton.testing.do_bench asks for it before it times anything

    def get_device_properties(self, *_: Any) -> dict[str, int]:
        return device_properties(MODEL)

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Return a module, a function, registers per thread, 4-byte spills and threads per block, as a driver does."""
        found = dict(_attributes(cubin))
        return 1, 1, found[_REGISTERS], found[_FRAME] // 4, _THREADS


def _attributes(cubin: bytes) -> Iterator[tuple[int, int]]:
    """Yield the attributes in the section `.nv.info` of a cubin with one kernel that have one value per function."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + n * size) for n in range(count)]
    for name, _, _, _, offset, length, *_ in sections:
        start = sections[names][4] + name
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        at = offset
        while at < offset + length:
            form, attribute, payload = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == 4:  # the value has a size; in the other forms the size field is the value
                if payload == 8:
                    yield attribute, struct.unpack_from("<II", cubin, at)[1]
                at += payload

"""Registers, shared memory and stack of compiled kernels, read from the binary."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from triton import knobs

from tilewright.workbench.inspect.compiler import CompiledKernel
from tilewright.workbench.inspect.disk_cache import cached

RESERVED = 1024  # bytes of shared memory per block that CUDA reserves; binaries include them from sm_90 on
FRAME_ALIGNMENT = 8  # bytes; ptxas rounds a stack frame up to it
_FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)\s*\([^)]*\)[^;{]*\{(.*?)^\}", re.M | re.S)
_LOCAL_ARRAY = re.compile(r"\.local .*__local_depot\d+\[(\d+)\]")
_LOCAL_LOAD = re.compile(r"\bLDL\b")
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True)
class Resources:
    """Registers and stack bytes per thread, shared memory bytes per block."""

    registers: int
    stack: int  # local memory: spilled registers, and dynamically indexed arrays
    spills: int  # bytes of the stack that hold spilled registers
    shared: int
    scalar_registers: int = 0  # per wave; AMD only

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.shared} B shared, {self.spills} B spilled"


def resources(compiled: CompiledKernel) -> Resources:
    return _amd_resources(compiled) if compiled.arch.startswith("gfx") else _nvidia_resources(compiled)


def _nvidia_resources(compiled: CompiledKernel) -> Resources:
    usage = {name: [*map(int, numbers)] for name, *numbers in _USAGE.findall(_resource_usage(compiled.binary))}
    registers, stack, shared = usage[compiled.symbol]
    includes_reserved = int(compiled.arch.removeprefix("sm_")) >= 90 and shared >= RESERVED
    arrays = _array_bytes(dict(_FUNCTION.findall(compiled.texts["ptx"])), compiled.symbol) if stack else 0
    spills = max(0, stack - arrays)
    if spills and not _LOCAL_LOAD.search(disassembly(compiled)):
        spills = 0  # for sm_120, ptxas writes a word of the frame around mbarriers that nothing reads
    return Resources(registers, stack, spills, compiled.shared + shared - (RESERVED if includes_reserved else 0))


def _array_bytes(bodies: Mapping[str, str], name: str) -> int:
    """Return the stack bytes of local arrays in a PTX function and its callees, before register allocation."""
    others = {other: body for other, body in bodies.items() if other != name}
    called = (
        _array_bytes(others, other)
        for other in others
        if re.search(rf"\bcall\b[^;]*\b{re.escape(other)}\b", bodies[name])
    )
    own = sum(int(size) for size in _LOCAL_ARRAY.findall(bodies[name]))
    return math.ceil(own / FRAME_ALIGNMENT) * FRAME_ALIGNMENT + max(called, default=0)


def _amd_resources(compiled: CompiledKernel) -> Resources:
    text = compiled.texts["amdgcn"].rpartition("amdhsa.kernels:")[2]
    found = {name: int(number) for name, number in re.findall(r"\.(\w+):\s+(\d+)$", text, re.M)}
    return Resources(
        registers=found["vgpr_count"],  # includes accumulation registers, which share the register file
        stack=found["private_segment_fixed_size"],
        spills=4 * found["vgpr_spill_count"],
        shared=max(compiled.shared, found["group_segment_fixed_size"]),
        scalar_registers=found["sgpr_count"],
    )


def _resource_usage(binary: bytes) -> str:
    return _run_tool([knobs.nvidia.cuobjdump.path, "--dump-resource-usage"], binary).decode()


def disassembly(compiled: CompiledKernel) -> str:
    """Return SASS or AMD assembly, with line info."""
    if compiled.arch.startswith("gfx"):
        return compiled.texts["amdgcn"]
    command = [knobs.nvidia.nvdisasm.path, "--print-code", "--print-line-info", "--no-dataflow"]
    key = knobs.nvidia.nvdisasm.version.encode() + compiled.binary
    return cached(key, "sass", lambda: _run_tool(command, compiled.binary)).decode()


def _run_tool(command: list[str], binary: bytes) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, check=True).stdout

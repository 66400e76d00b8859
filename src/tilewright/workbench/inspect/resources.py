"""What machine code takes of an SM: registers, shared memory, stack. Read from the binary itself."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from triton import knobs

from tilewright.workbench.inspect.compiling import Compiled
from tilewright.workbench.inspect.disk_cache import kept

RESERVED = 1024  # bytes of shared memory that the system takes of each block; from sm_90 on binaries count them
FRAME_AT_ONCE = 8  # bytes of stack, by which ptxas grows it
_FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)\s*\([^)]*\)[^;{]*\{(.*?)^\}", re.M | re.S)
_ARRAYS = re.compile(r"\.local .*__local_depot\d+\[(\d+)\]")
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True)
class Resources:
    """Of a thread: registers and bytes of stack. Of a block: bytes of shared memory."""

    registers: int
    stack: int  # local memory: spilled registers, and arrays that no register can hold
    spills: int  # of these bytes those that hold registers
    shared: int
    scalar_registers: int = 0  # of a wave; AMD's

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.shared} B shared, {self.spills} B spilled"


def resources(made: Compiled) -> Resources:
    return _of_amd(made) if made.arch.startswith("gfx") else _of_nvidia(made)


def _of_nvidia(made: Compiled) -> Resources:
    usage = {name: [*map(int, numbers)] for name, *numbers in _USAGE.findall(_resource_usage(made.binary))}
    registers, stack, shared = usage[made.symbol]
    is_counted = int(made.arch.removeprefix("sm_")) >= 90 and shared >= RESERVED
    arrays = _arrays(dict(_FUNCTION.findall(made.texts["ptx"])), made.symbol) if stack else 0
    spills = max(0, stack - arrays)
    return Resources(registers, stack, spills, made.shared + shared - (RESERVED if is_counted else 0))


def _arrays(bodies: Mapping[str, str], name: str) -> int:
    """Bytes of stack that PTX asks for itself, before registers are given out: in a function and those it calls."""
    others = {other: body for other, body in bodies.items() if other != name}
    called = (
        _arrays(others, other) for other in others if re.search(rf"\bcall\b[^;]*\b{re.escape(other)}\b", bodies[name])
    )
    own = sum(int(size) for size in _ARRAYS.findall(bodies[name]))
    return math.ceil(own / FRAME_AT_ONCE) * FRAME_AT_ONCE + max(called, default=0)


def _of_amd(made: Compiled) -> Resources:
    text = made.texts["amdgcn"].rpartition("amdhsa.kernels:")[2]
    found = {name: int(number) for name, number in re.findall(r"\.(\w+):\s+(\d+)$", text, re.M)}
    return Resources(
        registers=found["vgpr_count"],  # with the accumulation registers, which share the file
        stack=found["private_segment_fixed_size"],
        spills=4 * found["vgpr_spill_count"],
        shared=max(made.shared, found["group_segment_fixed_size"]),
        scalar_registers=found["sgpr_count"],
    )


def _resource_usage(binary: bytes) -> str:
    return run_tool([knobs.nvidia.cuobjdump.path, "--dump-resource-usage"], binary).decode()


def disassembly(made: Compiled) -> str:
    """SASS with the source line before each stretch of it, or AMD's assembly, which has the same in its own way."""
    if made.arch.startswith("gfx"):
        return made.texts["amdgcn"]
    command = [knobs.nvidia.nvdisasm.path, "--print-code", "--print-line-info", "--no-dataflow"]
    question = knobs.nvidia.nvdisasm.version.encode() + made.binary
    return kept(question, "sass", lambda: run_tool(command, made.binary)).decode()


def run_tool(command: list[str], binary: bytes) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, check=True).stdout

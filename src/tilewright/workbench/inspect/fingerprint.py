"""Fingerprints: what a call launches, written so that a rename, a move or a new comment does not change it.

A fingerprint is computed offline, on any machine. Each launch counts with its grid, block, cluster, dynamic shared
memory, integer arguments and a hash of its machine code. Symbol names, file names, line tables and debug sections of
the binary do not count. Torch functions count with their names and arguments.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import torch
import triton

from tilewright.errors import IncompleteTrace, LauncherFailed
from tilewright.hardware import GPU
from tilewright.runtime.cuda import compiler_version
from tilewright.spec import Case, Kernel, Op
from tilewright.workbench.inspect.code import TritonCode
from tilewright.workbench.inspect.compiler import CompiledKernel, compile_kernel
from tilewright.workbench.inspect.launches import Launch, kernel_launches

DIRECTIONS = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}
# name, type, flags, address, offset, size, link, info, alignment, entry size
ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
NO_BITS = 8  # the type of a section that occupies no bytes of the file
NOTHING = "no launches"  # the kernel does not support the case, or it is empty
COUNTED = (".text.", ".nv.constant", ".nv.shared.", ".nv.global")  # code, constants, static shared and global memory


def toolchain() -> dict[str, str]:
    """Return the versions that a fingerprint depends on: only fingerprints of the same toolchain can be compared."""
    nvrtc = ".".join(map(str, compiler_version()))
    return {"triton": triton.__version__, "nvrtc": nvrtc, "torch": torch.__version__.partition("+")[0]}


def fingerprint(op: Op, kernel: Kernel, case: Case, gpu: GPU, direction: str = "forward") -> list[str]:
    """Return the launches of one call in order, then a hash of the torch functions it calls, one string each."""
    traced = op.kernels["eager"] if kernel.name.startswith("compile") else kernel
    computed: list[str] = []
    try:
        launches = kernel_launches(op, traced, case, gpu, DIRECTIONS[direction], reads=0, computed=computed)
    except LauncherFailed:  # a torch function that needs values ends the trace; our kernels must launch
        if not computed or (kernel.origin == "ours" and kernel is not op.shipped):
            raise
        launches = []
    if incomplete := next((one for one in launches if not one.is_complete), None):
        raise IncompleteTrace(kernel.name, incomplete.note)  # equal beginnings prove nothing
    by_torch = [f"torch {len(computed)} functions {_digest(repr(computed).encode())}"] if computed else []
    return [*map(_launch, launches), *by_torch] or [NOTHING]


def _launch(launch: Launch) -> str:
    compiled, code = compile_kernel(launch.code), launch.code
    grid = "x".join(map(str, launch.grid))
    pdl = " pdl" if isinstance(code, TritonCode) and code.options.get("launch_pdl") else ""
    times = f" times {launch.times}" if launch.times > 1 else ""
    arguments = _digest(repr(launch.arguments).encode())[:4]
    settings = f"grid {grid} block {compiled.threads} cluster {compiled.cluster} shared {compiled.shared}{pdl}{times}"
    return f"{settings} arguments {arguments} code {_code(compiled)}"


def _code(compiled: CompiledKernel) -> str:
    """Return a hash of the machine code of one kernel."""
    is_amd = compiled.arch.startswith("gfx")
    parts = [compiled.texts["amdgcn"].encode()] if is_amd else [*_sections(compiled.binary, compiled.symbol)]
    return _digest(b"\0".join(parts))


def _sections(binary: bytes, symbol: str) -> Iterator[bytes]:
    """Yield the sections of a cubin that a launch depends on, without the kernel's name."""
    start, (size, count, names_at) = struct.unpack_from("<Q", binary, 0x28)[0], struct.unpack_from("<HHH", binary, 0x3A)
    headers = [ELF_SECTION.unpack_from(binary, start + n * size) for n in range(count)]
    names = headers[names_at][4]
    found = []
    for name_at, kind, _, _, offset, length, _, info, *_ in headers:
        name = binary[names + name_at : binary.index(b"\0", names + name_at)].decode()
        if name.startswith(COUNTED):
            content = length.to_bytes(8, "little") if kind == NO_BITS else binary[offset : offset + length]
            registers = info >> 24 if name.startswith(".text.") else 0
            found.append(name.replace(symbol, "").encode() + bytes([registers]) + content)
    yield from sorted(found)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]

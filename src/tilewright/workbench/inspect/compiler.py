"""Compile kernels to machine code without a driver. Results are cached on disk, by Triton or by `disk_cache`."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.experimental.gluon._runtime import GluonASTSource

import tilewright
from tilewright.errors import CompilationFailed, FileBroken, MissingTool, TilewrightError, first_line
from tilewright.runtime.cuda import INCLUDE, compiler_version
from tilewright.workbench.inspect.code import CudaCode, TritonCode
from tilewright.workbench.inspect.disk_cache import cached

# The second line of a message continues it, unless it quotes the source.
DIAGNOSTIC = re.compile(
    r"^(?P<file>[^\s:(][^:(\n]*)[:(](?P<line>\d+)(?::\d+|\))?: (?:fatal )?error\s*: (?P<what>.+(?:\n\S.*\.$)?)", re.M
)
PTXAS_DIAGNOSTIC = re.compile(r"^ptxas (?P<file>\S+), line (?P<line>\d+); error\s*: (?P<what>.+)$", re.M)
# LLVM gives no source line. Its assembler quotes an unknown instruction on the next line.
LLVM_DIAGNOSTIC = re.compile(r"^(?:LLVM ERROR|error): (?P<what>.+)(?:\n\s+(?P<code>\S.*)\n\s*\^)?", re.M)

CUDA_IS_NVIDIA_ONLY = "CUDA C++ compiles for NVIDIA GPUs only"


@dataclass(frozen=True)
class CompiledKernel:
    """The machine code of one kernel, with its launch settings."""

    symbol: str  # mangled name in the binary
    binary: bytes = field(repr=False)
    arch: str
    threads: int  # per block
    shared: int = 0  # bytes of dynamic shared memory; static bytes are in the binary
    cluster: int = 1  # blocks per cluster
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)  # ttir, ttgir, llir, ptx or amdgcn


def compile_kernel(code: TritonCode | CudaCode) -> CompiledKernel:
    """Compile a kernel. Raises CompilationFailed."""
    try:
        return _compile_triton(code) if isinstance(code, TritonCode) else _compile_nvrtc(code)
    except TilewrightError:
        raise
    except Exception as error:
        raise _as_failure(code, error) from error


def _compile_triton(code: TritonCode) -> CompiledKernel:
    is_gluon = code.function.is_gluon()
    source = (GluonASTSource if is_gluon else ASTSource)(code.function, code.signature, code.constants, code.attributes)
    _add_path_to_cache_key(source, code.file)
    with _captured_stderr() as stderr:
        try:
            kernel = _compile_in_child(
                source, lambda: triton.compile(source, target=code.target, options=dict(code.options))
            )
        except Exception as error:
            raise _CompilerError(stderr(), error) from error
    binary = kernel.asm.get("cubin") or kernel.asm["hsaco"]
    texts = {name: text for name, text in kernel.asm.items() if isinstance(text, str)}
    meta = kernel.metadata
    threads = meta.num_warps * code.target.warp_size
    return CompiledKernel(meta.name, binary, code.arch, threads, meta.shared, code.cluster, texts)


def _compile_in_child(source: Any, compile: Callable[[], Any]) -> Any:
    """Return the kernel from Triton's cache, or compile it, in a child process first as LLVM aborts on some errors.

    A child that succeeds fills the cache. After one that fails, compiling here again raises the error.
    """
    source.make_ir = _raise_not_cached
    try:
        return compile()
    except _NotCached:
        del source.make_ir
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: the child uses none
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()  # the parent reports the crash
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            compile()
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        raise RuntimeError(f"the compiler was killed by {signal.Signals(-code).name}")
    return compile()


class _NotCached(Exception): ...


def _raise_not_cached(*_: Any, **__: Any) -> None:
    raise _NotCached


def _add_path_to_cache_key(source: Any, file: str) -> None:
    """Triton's cache key has no path, so the line info of a copied file would name the original file."""
    paths = (source.hash(), file, tilewright.__file__, triton.__file__)
    source.hash = lambda: hashlib.sha256(repr(paths).encode()).hexdigest()


def _compile_nvrtc(code: CudaCode) -> CompiledKernel:
    if code.arch.startswith("gfx"):
        raise CompilationFailed(code.file, None, CUDA_IS_NVIDIA_ONLY, code.arch)
    binary, symbols = code.source.cubin(code.arch, (code.instance,))
    identity = [*_with_includes(Path(code.file))], code.file, code.instance, code.arch, compiler_version()
    texts = {"ptx": cached(repr(identity).encode(), "ptx", lambda: _nvrtc_ptx(code)).decode()}
    return CompiledKernel(symbols[code.instance], binary, code.arch, code.threads, code.shared, code.cluster, texts)


def _nvrtc_ptx(code: CudaCode) -> bytes:
    """Return PTX with line info. Uses NVRTC directly, because cuda.core needs a driver."""
    from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]

    def check(status: Any, *result: Any) -> Any:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompilationFailed(code.file, None, status.name, code.arch)
        return result[0] if result else None

    path = Path(code.file)
    options = [f"-arch={code.arch}", "-std=c++17", "-lineinfo", f"-I{INCLUDE}"]
    program = check(*nvrtc.nvrtcCreateProgram(path.read_bytes(), str(path).encode(), 0, [], []))
    check(*nvrtc.nvrtcAddNameExpression(program, code.instance.encode()))
    check(*nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
    text = b" " * check(*nvrtc.nvrtcGetPTXSize(program))
    check(*nvrtc.nvrtcGetPTX(program, text))
    check(*nvrtc.nvrtcDestroyProgram(program))
    return text.rstrip(b"\0")


def compile_cuda_file(path: Path, arch: str, threads: int, shared: int) -> list[CompiledKernel]:
    """Compile every kernel of a `.cu` file with nvcc, for blocks of `threads` with `shared` bytes of shared memory."""
    if arch.startswith("gfx"):
        raise CompilationFailed(path, None, CUDA_IS_NVIDIA_ONLY, arch)
    if b"\0" in path.read_bytes():
        raise FileBroken(path, None, "it is not text: it contains null bytes")
    key = repr(([*_with_includes(path)], str(path.resolve()), arch, _nvcc_version())).encode()
    ptx = cached(key, "ptx", lambda: _run_nvcc(path, arch, "ptx"))
    binary = cached(key, "cubin", lambda: _run_nvcc(path, arch, "cubin", ptx))
    text = ptx.decode()
    return [CompiledKernel(name, binary, arch, threads, shared, texts={"ptx": text}) for name in _entry_names(text)]


def _entry_names(ptx: str) -> list[str]:
    """Return the kernels in the order of the source, by the first line of each."""
    _, *parts = re.split(r"^(?:\.visible |\.weak )?\.entry ", ptx, flags=re.M)

    def first_line_of(part: str) -> tuple[int, ...]:
        found = re.search(r"^\s*\.loc\s+(\d+)\s+(\d+)", part, re.M)
        return tuple(map(int, found.groups())) if found else ()

    return [part.partition("(")[0].strip() for part in sorted(parts, key=first_line_of)]


def _with_includes(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file and of the headers it includes by name."""
    text = path.read_bytes()
    yield text
    for name in re.findall(rb'^\s*#\s*include\s+"([^"]+)"', text, re.M):
        for folder in (path.parent, INCLUDE):
            included = folder / os.fsdecode(name)
            if included.is_file() and included.resolve() != path.resolve():
                yield from _with_includes(included)
                break


def demangle(symbol: str) -> str:
    """Return a C++ name demangled, or as it is if no tool is installed."""
    if not symbol.startswith("_Z") or not (tool := shutil.which("cu++filt") or shutil.which("c++filt")):
        return symbol
    return subprocess.run([tool, "-p", symbol], capture_output=True, text=True, check=False).stdout.strip()


def _run_nvcc(path: Path, arch: str, form: str, ptx: bytes | None = None) -> bytes:
    """Compile a file, or the PTX compiled from it, to PTX or a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        given, output = path, Path(folder) / f"code.{form}"
        if ptx is not None:
            given = Path(folder) / "given.ptx"
            given.write_bytes(ptx)
        command = ["nvcc", f"-{form}", "-lineinfo", "-std=c++17", f"-arch={arch}", "-o", str(output), str(given)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            found = DIAGNOSTIC.search(done.stderr)
            what = found["what"] if found else done.stderr.strip().partition("\n")[0]
            raise CompilationFailed(path, int(found["line"]) if found else None, what, arch)
        return output.read_bytes()


def _nvcc_version() -> str:
    try:
        return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise MissingTool("a .cu file", "nvcc", "the CUDA toolkit") from None


class _CompilerError(Exception):
    """An exception of a compiler, with its stderr."""

    def __init__(self, text: str, error: Exception):
        super().__init__(text)
        self.text, self.error = text, error


@contextlib.contextmanager
def _captured_stderr() -> Iterator[Any]:
    """Capture file descriptor 2, where compiler passes print past Python. Their output is shown only with an error."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:

        def read() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        os.dup2(file.fileno(), 2)
        try:
            yield read
        finally:
            os.dup2(before, 2)
            os.close(before)


def _as_failure(code: TritonCode | CudaCode, error: Exception) -> CompilationFailed:
    """Convert a compiler error to one line, with the source line if there is one."""
    text = ""
    if isinstance(error, _CompilerError):
        text, error = error.text, error.error
    if isinstance(error, CompilationError):
        return CompilationFailed(code.file, *_root_cause(error, Path(code.file).read_text()), code.arch)
    if found := DIAGNOSTIC.search(text) or DIAGNOSTIC.search(str(error)):
        return CompilationFailed(found["file"], int(found["line"]), found["what"].replace("\n", " "), code.arch)
    if found := PTXAS_DIAGNOSTIC.search(str(error)):
        file, line = _ptx_source_line(Path(found["file"]), int(found["line"])) or (code.file, None)
        return CompilationFailed(file, line, found["what"], code.arch)
    if found := LLVM_DIAGNOSTIC.search(text):
        what = f"{found['what']}: {found['code']}" if found["code"] else found["what"]
        return CompilationFailed(code.file, None, what, code.arch)
    return CompilationFailed(code.file, None, first_line(error), code.arch)


def _ptx_source_line(path: Path, number: int) -> tuple[str, int] | None:
    """Return the source file and line of a line of PTX."""
    text = path.read_text()
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]+)"', text, re.M))
    before = "\n".join(text.splitlines()[:number])
    locations = re.findall(r"^\s*\.loc\s+(\d+)\s+(\d+)", before, re.M)
    return (files[locations[-1][0]], int(locations[-1][1])) if locations else None


def _root_cause(error: Any, text: str) -> tuple[int | None, str]:
    """Return the line and message of the root cause; a helper function is located by its source in the file's text."""
    line, what = None, ""
    step: Any = error
    while step is not None:
        if isinstance(step, CompilationError):
            at = getattr(step.node, "lineno", None)
            if step.src and step.src in text and at:
                line = text[: text.index(step.src)].count("\n") + at
            what = step.error_message or what
        else:
            what = first_line(step)
        step = step.__cause__
    return line, (what or str(error).strip().splitlines()[-1]).strip().partition("\n")[0]

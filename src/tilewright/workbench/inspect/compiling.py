"""Machine code for a launch, without a driver. Triton keeps what it has compiled on disk, and so do we."""

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
from tilewright.errors import CompilerRefused, FileBroken, MissingTool, TilewrightError, first_line
from tilewright.runtime.cuda import INCLUDE, _compiler_version
from tilewright.workbench.inspect.code import CudaCode, TritonCode
from tilewright.workbench.inspect.disk_cache import kept

# The second line of a message goes on with it, unless it shows the source.
DIAGNOSTIC = re.compile(
    r"^(?P<file>[^\s:(][^:(\n]*)[:(](?P<line>\d+)(?::\d+|\))?: (?:fatal )?error\s*: (?P<what>.+(?:\n\S.*\.$)?)", re.M
)
PTXAS_DIAGNOSTIC = re.compile(r"^ptxas (?P<file>\S+), line (?P<line>\d+); error\s*: (?P<what>.+)$", re.M)
# LLVM's has no place. An instruction that its assembler does not know is on the next line.
LLVM_DIAGNOSTIC = re.compile(r"^(?:LLVM ERROR|error): (?P<what>.+)(?:\n\s+(?P<code>\S.*)\n\s*\^)?", re.M)

NVIDIAS = "CUDA C++ is NVIDIA's"


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel, and what it needs of a launch."""

    symbol: str  # its name in the binary
    binary: bytes = field(repr=False)
    arch: str
    threads: int  # of a block
    shared: int = 0  # bytes that a launch asks for, beside those the binary declares
    cluster: int = 1  # blocks
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)  # ttir, ttgir, llir, ptx or amdgcn


def compiled(code: TritonCode | CudaCode) -> Compiled:
    """The machine code. Raises CompilerRefused."""
    try:
        return _by_triton(code) if isinstance(code, TritonCode) else _by_nvrtc(code)
    except TilewrightError:
        raise
    except Exception as error:
        raise _refused(code, error) from error


def _by_triton(code: TritonCode) -> Compiled:
    is_gluon = code.function.is_gluon()
    source = (GluonASTSource if is_gluon else ASTSource)(code.function, code.signature, code.constants, code.attributes)
    _key_by_place(source, code.file)
    with _stderr_of_the_compiler() as said:
        try:
            made = _kept_or_compiled(
                source, lambda: triton.compile(source, target=code.target, options=dict(code.options))
            )
        except Exception as error:
            raise _Said(said(), error) from error
    binary = made.asm.get("cubin") or made.asm["hsaco"]
    texts = {name: text for name, text in made.asm.items() if isinstance(text, str)}
    threads = made.metadata.num_warps * code.target.warp_size
    return Compiled(made.metadata.name, binary, code.arch, threads, made.metadata.shared, code.cluster, texts)


def _kept_or_compiled(source: Any, compile: Callable[[], Any]) -> Any:
    """What Triton has kept, or what it makes now: in a child first, as LLVM ends its process where it is at a loss.
    What the child has made is kept; what it could not make fails once more, to be told."""
    source.make_ir = _nothing_is_kept
    try:
        return compile()
    except _NotKept:
        del source.make_ir
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, of which the child needs none
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()  # we tell of its end
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            compile()
        finally:
            os._exit(0)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if end < 0:
        raise RuntimeError(f"the compiler was ended by {signal.Signals(-end).name}")
    return compile()


class _NotKept(Exception): ...


def _nothing_is_kept(*_: Any, **__: Any) -> None:
    raise _NotKept


def _key_by_place(source: Any, file: str) -> None:
    """Triton keeps code by what was written, not where: a copy of a file would be shown the paths of the first."""
    places = (source.hash(), file, tilewright.__file__, triton.__file__)
    source.hash = lambda: hashlib.sha256(repr(places).encode()).hexdigest()


def _by_nvrtc(code: CudaCode) -> Compiled:
    if code.arch.startswith("gfx"):
        raise CompilerRefused(code.file, None, NVIDIAS, code.arch)
    binary, symbols = code.source.cubin(code.arch, (code.instance,))
    identity = [*_with_includes(Path(code.file))], code.file, code.instance, code.arch, _compiler_version()
    texts = {"ptx": kept(repr(identity).encode(), "ptx", lambda: _ptx_by_nvrtc(code)).decode()}
    return Compiled(symbols[code.instance], binary, code.arch, code.threads, code.shared, code.cluster, texts)


def _ptx_by_nvrtc(code: CudaCode) -> bytes:
    """With source lines. By NVRTC's own functions: cuda.core asks a driver whether it could load it."""
    from cuda.bindings import nvrtc  # pyright: ignore[reportAttributeAccessIssue]

    def ask(status: Any, *answer: Any) -> Any:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompilerRefused(code.file, None, status.name, code.arch)
        return answer[0] if answer else None

    path = Path(code.file)
    options = [f"-arch={code.arch}", "-std=c++17", "-lineinfo", f"-I{INCLUDE}"]
    program = ask(*nvrtc.nvrtcCreateProgram(path.read_bytes(), str(path).encode(), 0, [], []))
    ask(*nvrtc.nvrtcAddNameExpression(program, code.instance.encode()))
    ask(*nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
    text = b" " * ask(*nvrtc.nvrtcGetPTXSize(program))
    ask(*nvrtc.nvrtcGetPTX(program, text))
    ask(*nvrtc.nvrtcDestroyProgram(program))
    return text.rstrip(b"\0")


def cuda_file(path: Path, arch: str, threads: int, shared: int) -> list[Compiled]:
    """Every kernel of a `.cu` file, compiled by nvcc as if launched with so many threads and bytes."""
    if b"\0" in path.read_bytes():
        raise FileBroken(path, None, "it is not text, as it holds null bytes")
    question = repr(([*_with_includes(path)], str(path.resolve()), arch, _nvcc_version())).encode()
    ptx = kept(question, "ptx", lambda: _by_nvcc(path, arch, "ptx"))
    binary = kept(question, "cubin", lambda: _by_nvcc(path, arch, "cubin", ptx))
    text = ptx.decode()
    return [Compiled(name, binary, arch, threads, shared, texts={"ptx": text}) for name in _kernels_of(text)]


def _kernels_of(ptx: str) -> list[str]:
    """As they follow each other in the source: each begins with its first line there."""
    _, *parts = re.split(r"^(?:\.visible |\.weak )?\.entry ", ptx, flags=re.M)

    def place(part: str) -> tuple[int, ...]:
        found = re.search(r"^\s*\.loc\s+(\d+)\s+(\d+)", part, re.M)
        return tuple(map(int, found.groups())) if found else ()

    return [part.partition("(")[0].strip() for part in sorted(parts, key=place)]


def _with_includes(path: Path) -> Iterator[bytes]:
    text = path.read_bytes()
    yield text
    for name in re.findall(rb'^\s*#\s*include\s+"([^"]+)"', text, re.M):
        for folder in (path.parent, INCLUDE):
            included = folder / os.fsdecode(name)
            if included.is_file() and included.resolve() != path.resolve():
                yield from _with_includes(included)
                break


def readable(symbol: str) -> str:
    """A C++ name as it was written, where there is a tool that knows."""
    if not symbol.startswith("_Z") or not (tool := shutil.which("cu++filt") or shutil.which("c++filt")):
        return symbol
    return subprocess.run([tool, "-p", symbol], capture_output=True, text=True, check=False).stdout.strip()


def _by_nvcc(path: Path, arch: str, form: str, ptx: bytes | None = None) -> bytes:
    """What a file compiles to, or the PTX that was made of it."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = path, Path(folder) / f"code.{form}"
        if ptx is not None:
            given = Path(folder) / "given.ptx"
            given.write_bytes(ptx)
        command = ["nvcc", f"-{form}", "-lineinfo", "-std=c++17", f"-arch={arch}", "-o", str(made), str(given)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            found = DIAGNOSTIC.search(done.stderr)
            what = found["what"] if found else done.stderr.strip().partition("\n")[0]
            raise CompilerRefused(path, int(found["line"]) if found else None, what, arch)
        return made.read_bytes()


def _nvcc_version() -> str:
    try:
        return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise MissingTool("a .cu file", "nvcc", "the CUDA toolkit") from None


class _Said(Exception):
    """What the compiler wrote on its way to an error."""

    def __init__(self, text: str, error: Exception):
        super().__init__(text)
        self.text, self.error = text, error


@contextlib.contextmanager
def _stderr_of_the_compiler() -> Iterator[Any]:
    """Its passes write there, past Python: for a reader that is noise, until an error is to be explained."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:

        def said() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(before, 2)
            os.close(before)


def _refused(code: TritonCode | CudaCode, error: Exception) -> CompilerRefused:
    """An error of a compiler as one line, with the line of the source where there is one."""
    text = ""
    if isinstance(error, _Said):
        text, error = error.text, error.error
    if isinstance(error, CompilationError):
        return CompilerRefused(code.file, *_innermost(error, Path(code.file).read_text()), code.arch)
    if found := DIAGNOSTIC.search(text) or DIAGNOSTIC.search(str(error)):
        return CompilerRefused(found["file"], int(found["line"]), found["what"].replace("\n", " "), code.arch)
    if found := PTXAS_DIAGNOSTIC.search(str(error)):
        file, line = _source_of_ptx(Path(found["file"]), int(found["line"])) or (code.file, None)
        return CompilerRefused(file, line, found["what"], code.arch)
    if found := LLVM_DIAGNOSTIC.search(text):
        what = f"{found['what']}: {found['code']}" if found["code"] else found["what"]
        return CompilerRefused(code.file, None, what, code.arch)
    return CompilerRefused(code.file, None, first_line(error), code.arch)


def _source_of_ptx(path: Path, number: int) -> tuple[str, int] | None:
    """File and line of the source that a line of PTX came from."""
    text = path.read_text()
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]+)"', text, re.M))
    before = "\n".join(text.splitlines()[:number])
    places = re.findall(r"^\s*\.loc\s+(\d+)\s+(\d+)", before, re.M)
    return (files[places[-1][0]], int(places[-1][1])) if places else None


def _innermost(error: Any, text: str) -> tuple[int | None, str]:
    """Line and message of the first error of a chain; helpers are found by their source, in the file's text."""
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

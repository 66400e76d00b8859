"""CUDA C++ from `ops/cuda/`: compiled at run time through NVRTC, kept on disk, launched on torch's stream."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from tilewright import settings
from tilewright.errors import MissingPackage

FOLDER = Path(__file__).parent / "cuda"
SPELLED = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}  # as in cuda/dtypes.cuh


class Source:
    """A `.cu` file whose kernels are templates over one dtype."""

    def __init__(self, file: str, *kernels: str):
        self.file = file
        self.kernels = kernels

    def cubin(self, arch: str) -> tuple[bytes, dict[str, str]]:
        """The machine code and the symbol of each instantiated kernel. Needs no GPU."""
        text = (FOLDER / self.file).read_text()
        names = tuple(f"{kernel}<{dtype}>" for kernel in self.kernels for dtype in SPELLED.values())
        folder = settings.cache_dir() / "cuda"
        code = folder / f"{self._key(text, arch, names)}.cubin"
        symbols = code.with_suffix(".json")
        if not symbols.exists():
            compiled = _program(text, arch, names).compile("cubin", name_expressions=names)
            folder.mkdir(parents=True, exist_ok=True)
            _write(code, bytes(compiled.code))
            _write(symbols, json.dumps({k: _text(v) for k, v in compiled.symbol_mapping.items()}).encode())
        return code.read_bytes(), json.loads(symbols.read_text())

    def launch(
        self, kernel: str, dtype: torch.dtype, grid: tuple[int, ...], block: int, *args: Any, shared: int = 0
    ) -> None:
        """Launch on torch's current stream. Tensors pass as pointers, ints as int64, floats as float."""
        core = _core()
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else _scalar(a) for a in args]
        config = core.LaunchConfig(grid=grid, block=block, shmem_size=shared)
        core.launch(_stream(), config, self._kernel(kernel, dtype, torch.cuda.current_device()), *values)

    @functools.cache  # noqa: B019  sources are module-level constants
    def _kernel(self, kernel: str, dtype: torch.dtype, device: int) -> Any:
        major, minor = torch.cuda.get_device_capability(device)
        code, symbols = self.cubin(f"sm_{major}{minor}")
        module = _core().ObjectCode.from_cubin(code, symbol_mapping={k: v.encode() for k, v in symbols.items()})
        return module.get_kernel(f"{kernel}<{SPELLED[dtype]}>")

    def _key(self, text: str, arch: str, names: tuple[str, ...]) -> str:
        headers = "".join(path.read_text() for path in sorted(FOLDER.glob("*.cuh")))
        identity = repr((text, headers, arch, names, _core().__version__)).encode()
        return f"{Path(self.file).stem}-{hashlib.sha256(identity).hexdigest()[:24]}"


def _core() -> Any:
    try:
        import cuda.core
    except ImportError:
        raise MissingPackage("a CUDA C++ kernel", "cuda-core nvidia-cuda-nvrtc") from None
    return cuda.core


def _program(text: str, arch: str, names: tuple[str, ...]) -> Any:
    options = _core().ProgramOptions(arch=arch, std="c++17", include_path=str(FOLDER))
    return _core().Program(text, "c++", options)


def _scalar(value: float | int) -> Any:
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)


def _text(symbol: str | bytes) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else symbol


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: another process may be reading."""
    part = path.with_name(f"{path.name}.{hashlib.sha256(data).hexdigest()[:8]}.part")
    part.write_bytes(data)
    part.replace(path)


class _TorchStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def _stream() -> Any:
    device = _core().Device(torch.cuda.current_device())
    device.set_current()
    return device.create_stream(_TorchStream())

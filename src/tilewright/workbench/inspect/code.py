"""A kernel with everything it is specialised on: the input of the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget

from tilewright.runtime.cuda import FOLDER, CudaSource


@dataclass(frozen=True)
class TritonCode:
    """A Triton or Gluon kernel with everything its machine code depends on."""

    function: Any  # a JITFunction
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: GPUTarget

    @property
    def arch(self) -> str:
        return str(self.target.arch) if self.target.backend == "hip" else f"sm_{self.target.arch}"

    @property
    def file(self) -> str:
        return self.function.fn.__code__.co_filename

    @property
    def cluster(self) -> int:
        return self.options.get("num_ctas", 1)

    @property
    def config(self) -> dict[str, Any]:
        """Return what a search could tune: constexpr arguments, num_warps and num_stages."""
        names = [*self.signature]
        chosen = {names[path[0]]: value for path, value in self.constants.items() if len(path) == 1}
        constexprs = {p.name: chosen[p.name] for p in self.function.params if p.is_constexpr and p.name in chosen}
        return constexprs | {name: self.options[name] for name in ("num_warps", "num_stages") if name in self.options}


@dataclass(frozen=True)
class CudaCode:
    """An instance of a CUDA C++ kernel template."""

    source: CudaSource
    instance: str  # as C++ spells it
    arch: str
    threads: int
    shared: int  # bytes of dynamic shared memory
    cluster: int

    @property
    def file(self) -> str:
        return str(FOLDER / self.source.file)

    @property
    def config(self) -> dict[str, Any]:
        return {"threads": self.threads} | ({"cluster": self.cluster} if self.cluster > 1 else {})

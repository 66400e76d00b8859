"""Every CUDA C++ file compiles to machine code, without a GPU: a typo in a .cu file fails here."""

import importlib

import pytest

from tilewright import source
from tilewright.runtime import cuda
from tilewright.runtime.cuda import CudaSource

ARCHITECTURES = ("sm_80", "sm_90")


def sources() -> list[CudaSource]:
    """Return the sources of all modules below ops/, one per file."""
    modules = [importlib.import_module(source.module_name(path)) for path in sorted(source.OPS.rglob("*.py"))]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, CudaSource)]
    return list({one.file: one for one in found}.values())


def test_every_file_belongs_to_an_op():
    files = {str(path.relative_to(source.OPS)) for path in source.OPS.rglob("*.cu")}
    assert {one.file for one in sources()} == files


@pytest.mark.parametrize("one", sources(), ids=lambda one: one.file)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(one, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    code, symbols = one.cubin(arch, one.names())
    assert code.startswith(b"\x7fELF")
    assert len(symbols) == 3 * len(one.kernels)
    assert one.cubin(arch, one.names()) == (code, symbols), "the cached copy must be the same"


def test_a_typo_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "FOLDER", tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    (tmp_path / "typo.cu").write_text("template <typename T> __global__ void f(T* x) { x[0] = ; }")
    with pytest.raises(Exception, match="COMPILATION"):
        CudaSource("typo.cu", "f").cubin("sm_90", ("f<float>",))

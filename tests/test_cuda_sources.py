"""Every CUDA C++ file compiles to machine code, without a GPU: a typo in a .cu fails here."""

import importlib

import pytest

from tilewright import source
from tilewright.runtime.cuda import Source

ARCHITECTURES = ("sm_80", "sm_90")


def sources() -> list[Source]:
    """Those of ops and of what ops share."""
    names = [path.stem for path in sorted(source.OPS.glob("*.py"))]
    modules = [importlib.import_module(f"tilewright.ops.{name}") for name in names]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Source)]
    return list({one.file: one for one in found}.values())


def test_every_file_belongs_to_an_op():
    assert {one.file for one in sources()} == {path.name for path in source.CUDA.glob("*.cu")}


@pytest.mark.parametrize("one", sources(), ids=lambda one: one.file)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(one, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    code, symbols = one.cubin(arch, one.names())
    assert code.startswith(b"\x7fELF")
    assert len(symbols) == 3 * len(one.kernels)
    assert one.cubin(arch, one.names()) == (code, symbols), "the kept copy is the same"


def test_a_typo_is_an_error(tmp_path, monkeypatch):
    from tilewright.runtime import cuda as _cuda

    monkeypatch.setattr(_cuda, "FOLDER", tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    (tmp_path / "typo.cu").write_text("template <typename T> __global__ void f(T* x) { x[0] = ; }")
    with pytest.raises(Exception, match="COMPILATION"):
        Source("typo.cu", "f").cubin("sm_90", ("f<float>",))

"""The hash of a kernel changes when code it runs changes, and only then."""

from pathlib import Path

import pytest

from tilewright import source

OP = '''"""Doubles."""
from tilewright.ops._helper import scale

BLOCK = 4  # why four

def reference(x):
    """The truth."""
    return x * 2

op = Op("double", reference, bench=grid(N=(1,)))

def _launch(x):
    # a comment
    return scale(x, BLOCK)

@op.kernel("fast", language="triton")
def fast(x):
    return registered(x)

def registered(x):
    return _launch(x)

registered.register_fake(lambda x: x)

@registered.register_vmap
def _(x):
    return x

@op.kernel("cuda", language="cuda")
def cuda(x):
    return Source("double.cu", "double")

def public(x):
    return fast(x)
'''


@pytest.fixture
def hashes(tmp_path, monkeypatch):
    """kernel → hash, for an op file changed by replacing text."""
    monkeypatch.setattr(source, "OPS", tmp_path)
    monkeypatch.setattr(source, "CUDA", tmp_path)

    def of(old: str = "", new: str = "", helper: str = "def scale(x, n): return n * x", cu: str = "a = 1;"):
        assert old in OP
        (tmp_path / "_helper.py").write_text(helper)
        (tmp_path / "double.cu").write_text(f'#include "h.cuh"\n{cu}')
        (tmp_path / "h.cuh").write_text("// shared")
        path: Path = tmp_path / "double.py"
        path.write_text(OP.replace(old, new))
        source.read.cache_clear()
        found = source.read(path)
        return {name: found.kernel_hash(name) for name in found.kernels}

    yield of
    source.read.cache_clear()


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_reads_summary_and_kernels(tmp_path):
    (tmp_path / "double.py").write_text(OP)
    found = source.OpSource(tmp_path / "double.py")
    assert found.summary == "Doubles."
    assert found.kernels == ["eager", "compile", "fast", "cuda"]


@pytest.mark.parametrize(
    ("old", "new", "touched"),
    [
        ("# why four", "# because", set()),
        ('    """The truth."""\n', "", set()),
        ("    # a comment\n", "\n\n", set()),
        ("N=(1,)", "N=(2,)", set()),
        ("return fast(x)", "return x", set()),
        ("x * 2", "x + x", {"eager", "compile", "fast", "cuda"}),
        ("BLOCK = 4", "BLOCK = 8", {"fast"}),
        ("return scale(x, BLOCK)", "return scale(x, 2 * BLOCK)", {"fast"}),
        ("lambda x: x)", "lambda x: 2 * x)", {"fast"}),
        ("def _(x):\n    return x", "def _(x):\n    return -x", {"fast"}),
        ('language="triton"', 'language="torch"', {"fast"}),
    ],
)
def test_what_an_edit_makes_stale(hashes, old, new, touched):
    assert changed(hashes(), hashes(old, new)) == touched


def test_helpers_and_cuda_files_count(hashes):
    assert changed(hashes(), hashes(helper="def scale(x, n): return x * n")) == {"fast"}
    assert changed(hashes(), hashes(helper="def scale(x, n): return n * x\n\ndef unused(): pass")) == set()
    assert changed(hashes(), hashes(cu="a = 2;")) == {"cuda"}
    assert changed(hashes(), hashes(cu="a = 1; // said")) == set()


def test_a_kernel_that_is_gone_has_no_hash():
    assert source.kernel_hash("softmax", "never") is None
    assert source.kernel_hash("never", "triton") is None
    assert source.kernel_hash("softmax", "triton") != source.kernel_hash("softmax", "eager")


def test_what_an_imported_name_decorates_is_no_part_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "OPS", tmp_path)
    (tmp_path / "_helper.py").write_text("def scale(x): return x")
    text = """import torch
from tilewright.ops._helper import scale
def reference(x): return torch.mul(scale(x), 2)
@torch.compile
def one(x): return x
@scale
def two(x): return x
@op.kernel("first")
def first(x): return one(x)
"""
    hashes = []
    for body in ("return x", "return x + 0"):
        path = tmp_path / f"{len(hashes)}.py"
        path.write_text(text.replace("def two(x): return x", f"def two(x): {body}"))
        found = source.OpSource(path)
        hashes.append([found.kernel_hash("eager"), found.kernel_hash("first")])
    assert hashes[0] == hashes[1]
    (tmp_path / "changed.py").write_text(text.replace("def one(x): return x", "def one(x): return x + 0"))
    found = source.OpSource(tmp_path / "changed.py")
    assert found.kernel_hash("eager") == hashes[0][0]
    assert found.kernel_hash("first") != hashes[0][1]

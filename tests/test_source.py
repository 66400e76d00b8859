"""A kernel's source hash changes if and only if the code it runs changes."""

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
def ops(tmp_path, monkeypatch) -> Path:
    """The empty folder `ops` of a package."""
    package = tmp_path / "tilewright"
    (package / "ops").mkdir(parents=True)
    monkeypatch.setattr(source, "PACKAGE", package)
    monkeypatch.setattr(source, "OPS", package / "ops")
    monkeypatch.setattr(source, "INCLUDE", package / "ops")
    source.read.cache_clear()
    yield package / "ops"
    source.read.cache_clear()


@pytest.fixture
def hashes(ops):
    """A function that returns {kernel: hash} for the op file after replacing text in it."""

    def hash_kernels(old: str = "", new: str = "", helper: str = "def scale(x, n): return n * x", cu: str = "a = 1;"):
        assert old in OP
        (ops / "_helper.py").write_text(helper)
        (ops / "double.cu").write_text(f'#include "h.cuh"\n{cu}')
        (ops / "h.cuh").write_text("// shared")
        (ops / "double.py").write_text(OP.replace(old, new))
        source.read.cache_clear()
        found = source.read(ops / "double.py")
        return {name: found.kernel_hash(name) for name in found.kernels}

    return hash_kernels


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_summary_and_kernels_are_read_from_the_text(tmp_path):
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
def test_an_edit_changes_the_hash_of_the_kernels_that_run_it(hashes, old, new, touched):
    assert changed(hashes(), hashes(old, new)) == touched


def test_helper_modules_and_cuda_files_are_hashed(hashes):
    assert changed(hashes(), hashes(helper="def scale(x, n): return x * n")) == {"fast"}
    assert changed(hashes(), hashes(helper="def scale(x, n): return n * x\n\ndef unused(): pass")) == set()
    assert changed(hashes(), hashes(cu="a = 2;")) == {"cuda"}
    assert changed(hashes(), hashes(cu="a = 1; // a comment")) == set()


def test_a_removed_kernel_has_no_hash():
    assert source.kernel_hash("softmax", "never") is None
    assert source.kernel_hash("never", "triton") is None
    assert source.kernel_hash("softmax", "triton") != source.kernel_hash("softmax", "eager")


def test_functions_decorated_by_an_imported_name_do_not_become_part_of_it(ops):
    (ops / "_helper.py").write_text("def scale(x): return x")
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
        path = ops / f"{len(hashes)}.py"
        path.write_text(text.replace("def two(x): return x", f"def two(x): {body}"))
        found = source.OpSource(path)
        hashes.append([found.kernel_hash("eager"), found.kernel_hash("first")])
    assert hashes[0] == hashes[1]
    (ops / "changed.py").write_text(text.replace("def one(x): return x", "def one(x): return x + 0"))
    found = source.OpSource(ops / "changed.py")
    assert found.kernel_hash("eager") == hashes[0][0]
    assert found.kernel_hash("first") != hashes[0][1]


def test_attributes_of_imported_modules_belong_to_it(ops):
    (ops / "family").mkdir()
    text = """from tilewright.ops.family import _helper
def reference(x): return x
@op.kernel("first")
def first(x): return _helper.scale(x)
"""
    hashes = []
    for scaled, other in (("x", "x"), ("x + 0", "x"), ("x", "x + 0")):
        (ops / "family" / "_helper.py").write_text(f"def scale(x): return {scaled}\ndef other(x): return {other}\n")
        source.read.cache_clear()
        (ops / "one.py").write_text(text)
        hashes.append(source.OpSource(ops / "one.py").kernel_hash("first"))
    assert hashes[0] != hashes[1]
    assert hashes[0] == hashes[2]


SCRIPT = '''"""Times a kernel."""
import math

REPEATS = 10  # enough

def measure_numba(n):
    """The time of n steps."""
    return n * REPEATS

def main():
    print(measure_numba(3))
'''


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("# enough", "# because", True),
        ("Times a kernel", "Measures a kernel", True),
        ('    """The time of n steps."""\n', "", True),
        ("import math", "import cmath", True),
        ("n * REPEATS", "n  *  REPEATS", True),
        ("print(measure_numba(3))", "print('nothing')", True),
        ("REPEATS = 10", "REPEATS = 11", False),
        ("n * REPEATS", "n + REPEATS", False),
        ("def measure_numba(n):", "def measure_numba(n, m=1):", False),
    ],
)
def test_code_hash_counts_definitions_but_not_their_formatting(tmp_path, old, new, is_same):
    assert old in SCRIPT
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(SCRIPT)
    after.write_text(SCRIPT.replace(old, new))
    assert (source.code_hash(before) == source.code_hash(after)) == is_same


def test_code_hash_of_some_names_ignores_the_others(tmp_path):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(SCRIPT)
    after.write_text(SCRIPT.replace("REPEATS = 10", "REPEATS = 11"))
    assert source.code_hash(before, only="numba") == source.code_hash(after, only="numba")
    after.write_text(SCRIPT.replace("n * REPEATS", "n + REPEATS"))
    assert source.code_hash(before, only="numba") != source.code_hash(after, only="numba")

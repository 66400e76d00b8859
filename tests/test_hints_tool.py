"""tools/hints.py: the copy of the package that it compares with, and the calls it makes."""

from pathlib import Path

import pytest

import tilewright
from tilewright import registry


@pytest.fixture(scope="module")
def tool():
    return registry.load_module(Path(__file__).parent.parent / "tools" / "hints.py")


def ops_text(package):
    return {p.name: p.read_text() for p in (package / "ops").rglob("*") if p.suffix in (".py", ".cu", ".cuh")}


def test_the_copy_has_the_same_code_without_the_hint(tool, tmp_path):
    package = Path(tilewright.__file__).parent
    copy = tool.without_hints(package, tmp_path)
    before, after = ops_text(package), ops_text(copy)
    changed = {name for name in before if before[name] != after[name]}
    assert {"_activation.py", "_norm_triton.py", "_softmax.py", "dtypes.cuh"} <= changed
    assert not [name for name, text in after.items() if "evict_last" in text]
    assert all(before[name].count("\n") == after[name].count("\n") for name in before)


def test_calls_are_cases_of_operations(tool):
    for name, text in tool.CALLS:
        assert str(tool.parsed(name, text)) == text

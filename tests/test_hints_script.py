"""scripts/hints.py: the copy of the package that it compares with, and the calls it makes."""

from pathlib import Path

import pytest

import tilewright
from tilewright import registry
from tilewright.timer import Sample


@pytest.fixture(scope="module")
def tool():
    return registry.load_module(Path(__file__).parent.parent / "scripts" / "hints.py")


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


def test_pairs_follow_each_other_and_those_that_were_not_queued_in_time_have_no_time(tool):
    done = []

    class Written:
        """A clock that writes down what it is to time."""

        def __init__(self, is_queued):
            self.is_queued = is_queued

        def sample(self, calls, ahead, fill=lambda: None, then=None):
            fill()
            done.append("start")
            for call in calls:
                call()
            return Sample(7.0, self.is_queued)

    def call():
        done.append("call")
        return "result"

    assert tool.pair_us(tool.paired(Written(True), call, done.append)) == 7.0
    assert done == ["call", "result"] * tool.INPUTS + ["start"] + ["call", "result"] * tool.PAIRS
    with pytest.raises(SystemExit, match="before all was queued"):
        tool.pair_us(tool.paired(Written(False), call, done.append))

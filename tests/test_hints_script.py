"""scripts/hints.py: the copy of the package without hints, and the timed calls."""

from pathlib import Path

import pytest

import tilewright
from tilewright import registry
from tilewright.timer import Sample


@pytest.fixture(scope="module")
def script():
    return registry.load_module(Path(__file__).parent.parent / "scripts" / "hints.py")


def sources(package):
    kernels = (path for path in package.rglob("*") if path.suffix in (".py", ".cu", ".cuh"))
    return {path.relative_to(package): path.read_text() for path in kernels}


def test_the_copy_differs_only_in_the_hints(script, tmp_path):
    package = Path(tilewright.__file__).parent
    copy = script.without_hints(package, tmp_path)
    before, after = sources(package), sources(copy)
    changed = {str(path.parent) for path in before if before[path] != after[path]}
    assert {"ops/activation", "ops/include", "ops/norm", "ops/softmax"} <= changed
    assert not [path for path, text in after.items() if '"evict_last' in text or "L2::evict_last" in text]
    assert all(before[path].count("\n") == after[path].count("\n") for path in before)


def test_calls_are_cases_of_operations(script):
    for name, text in script.CALLS:
        assert str(script.parse_case(name, text)) == text


def test_pairs_run_back_to_back_and_a_sample_that_was_not_queued_is_an_error(script):
    done = []

    class RecordingClock:
        """A clock that records the order of calls."""

        def __init__(self, is_queued):
            self.is_queued = is_queued

        def sample(self, calls, head_start, fill=lambda: None, keep=None):
            fill()
            done.append("start")
            for call in calls:
                call()
            return Sample(7.0, self.is_queued)

    def call():
        done.append("call")
        return "result"

    assert script.pair_us(script.pair_sampler(RecordingClock(True), call, done.append)) == 7.0
    assert done == ["call", "result"] * script.INPUTS + ["start"] + ["call", "result"] * script.PAIRS
    with pytest.raises(SystemExit, match="before all launches were queued"):
        script.pair_us(script.pair_sampler(RecordingClock(False), call, done.append))

"""Triton's language tests: a sample of the parameters of every test that needs no GPU of another kind."""

from __future__ import annotations

import collections
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outside_suites.cases import RIGHT, WRONG, Case, Missing, Outcome, describe, interpreted, outcome_of

SUITE = "language"
SAMPLE = {"test_tuple.py 0"}
PER_TEST = 8  # sets of parameters
SECONDS = 60  # of CPU time per test
SHARDS = 16  # of the largest file
# Tests of the compiler: of its IR, its reproducers, its line tables, its errors and pipelines in compiled kernels.
COMPILER = {
    "test_clc.py",
    "test_compile_only.py",
    "test_frontend.py",
    "test_line_info.py",
    "test_pipeliner.py",
    "test_reproducer.py",
    "test_subprocess.py",
    "test_warp_specialization.py",
}


def cases(path: Path | None) -> Iterator[Case]:
    folder = (path or Path()) / "python" / "test" / "unit" / "language"
    if path is None or not folder.is_dir() or not (folder.parents[1] / "conftest.py").is_file():
        raise Missing(
            "language: git clone --branch v3.6.0 https://github.com/triton-lang/triton, and name it with --triton PATH"
        )
    if importlib.util.find_spec("scipy") is None:
        raise Missing("language: pip install --no-deps scipy, which the tests import")
    for file in sorted(folder.glob("test_*.py")):
        if file.name not in COMPILER:
            shards = SHARDS if file.name == "test_core.py" else 1
            for shard in range(shards):
                yield Case(SUITE, f"{file.name} {shard}", lambda f=file, s=shard, n=shards: _run(f, s, n))


def _run(file: Path, shard: int, shards: int) -> list[Outcome]:
    # Some tests race, or read and write memory that is not theirs.
    plugin = InterpretedTests(SUITE, per_test=PER_TEST, faults="collect", shard=shard, shards=shards)
    return run_tests(file, plugin, ["--device", "cpu", "--confcutdir", str(file.parents[2])])


def run_tests(file: Path, plugin: InterpretedTests, options: list[str]) -> list[Outcome]:
    """Run the tests of a file and return their outcomes."""
    os.chdir(file.parent)
    sys.path.insert(0, str(file.parent))
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore"]
    with interpreted():  # kernels and devices are also asked for when a file is imported
        code = pytest.main([str(file), *quiet, *options], plugins=[plugin])
    if not plugin.outcomes and code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with exit code {int(code)}: {plugin.problem}")
    return plugin.outcomes


class InterpretedTests:
    """A pytest plugin that interprets the launches of a sample of the tests and collects the outcomes."""

    def __init__(self, suite: str, per_test: int, faults: str, shard: int = 0, shards: int = 1):
        self.outcomes: list[Outcome] = []
        self.problem = ""
        self._suite, self._per_test, self._faults = suite, per_test, faults
        self._shard = shard, shards

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        by_test = collections.defaultdict(list)
        for item in items:
            by_test[item.nodeid.split("[")[0]].append(item)
        draw = random.Random(0)
        chosen = [
            group if len(group) <= self._per_test else draw.sample(group, self._per_test) for group in by_test.values()
        ]
        shard, shards = self._shard
        items[:] = [item for number, group in enumerate(chosen) if number % shards == shard for item in group]

    @pytest.fixture(autouse=True)
    def launches(self) -> Iterator[None]:
        with interpreted(self._faults):
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        signal.signal(signal.SIGPROF, self._stop)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        yield
        signal.setitimer(signal.ITIMER_PROF, 0)

    @staticmethod
    def _stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {SECONDS} s of CPU time")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        report = (yield).get_result()
        if report.skipped or (report.passed and call.when != "call"):
            return
        outcome, reason = RIGHT, ""
        if report.failed:
            error = call.excinfo.value
            outcome = WRONG if isinstance(error, AssertionError) else outcome_of(error)
            reason = describe(error)
        self.outcomes.append(Outcome(self._suite, item.nodeid.split("/")[-1], outcome, reason, round(call.duration, 2)))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.problem = str(report.longrepr).splitlines()[-1]

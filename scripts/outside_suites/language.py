"""Triton's language tests: a sample of the parameters of every test that needs no GPU of another kind."""

from __future__ import annotations

import collections
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
SAMPLE: set[str] = set()
PER_TEST = 8  # sets of parameters
SECONDS = 60  # per test
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
    if path is None or not folder.is_dir():
        raise Missing(
            "language: git clone --branch v3.6.0 https://github.com/triton-lang/triton, and name it with --triton PATH"
        )
    for file in sorted(folder.glob("test_*.py")):
        if file.name not in COMPILER:
            shards = SHARDS if file.name == "test_core.py" else 1
            for shard in range(shards):
                yield Case(SUITE, f"{file.name} {shard}", lambda f=file, s=shard, n=shards: _run(f, s, n))


def _run(file: Path, shard: int, shards: int) -> list[Outcome]:
    os.chdir(file.parent)
    sys.path.insert(0, str(file.parent))
    plugin = InterpretedTests(shard, shards)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--device", "cpu", "--confcutdir", str(file.parents[2])]
    with interpreted():  # kernels and devices are also asked for when a file is imported
        code = pytest.main([str(file), *options], plugins=[plugin])
    if not plugin.outcomes and code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with exit code {int(code)}: {plugin.problem}")
    return plugin.outcomes


class InterpretedTests:
    """A pytest plugin that interprets the launches of a sample of the tests and collects the outcomes."""

    def __init__(self, shard: int, shards: int):
        self.outcomes: list[Outcome] = []
        self.problem = ""
        self._shard = shard, shards

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        by_test = collections.defaultdict(list)
        for item in items:
            by_test[item.nodeid.split("[")[0]].append(item)
        draw = random.Random(0)
        chosen = [group if len(group) <= PER_TEST else draw.sample(group, PER_TEST) for group in by_test.values()]
        shard, shards = self._shard
        items[:] = [item for number, group in enumerate(chosen) if number % shards == shard for item in group]

    @pytest.fixture(autouse=True)
    def launches(self) -> Iterator[None]:
        with interpreted(faults="collect"):  # some tests race, or read and write memory that is not theirs
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        signal.signal(signal.SIGALRM, self._stop)
        signal.alarm(SECONDS)
        yield
        signal.alarm(0)

    @staticmethod
    def _stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {SECONDS} s")

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
        self.outcomes.append(Outcome(SUITE, item.nodeid.split("/")[-1], outcome, reason, round(call.duration, 2)))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.problem = str(report.longrepr).splitlines()[-1]

"""Triton's Gluon tutorials 01 to 08: a sample of the parameters of their tests, those for Blackwell left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from triton._C.libtriton import nvidia

from outside_suites.cases import Case, Missing, Outcome
from outside_suites.language import InterpretedTests, run_tests

SUITE = "gluon"
SAMPLE = {"01-intro", "04-tma"}
PER_TEST = 4  # sets of parameters


def cases(path: Path | None) -> Iterator[Case]:
    folder = (path or Path()) / "python" / "tutorials" / "gluon"
    if path is None or not folder.is_dir():
        raise Missing(
            "gluon: git clone --branch v3.6.0 https://github.com/triton-lang/triton, and name it with --triton PATH"
        )
    for file in sorted(folder.glob("0[1-8]-*.py")):
        yield Case(SUITE, file.stem, lambda f=file: _run(f))


def _run(file: Path) -> list[Outcome]:
    plugin = InterpretedTests(SUITE, per_test=PER_TEST, faults="raise")
    with mock.patch.object(nvidia.cublas, "CublasLt"):  # for benchmarks
        return run_tests(file, plugin, [])

"""Run other projects' Triton kernels in the interpreter, and print how many give the right result.

python scripts/outside.py                                   the suites whose package is installed
python scripts/outside.py --triton PATH --puzzles PATH      suites that need a checkout: Triton, Triton-Puzzles
python scripts/outside.py --suite fla --case chunk_gla      one suite, and the cases whose name contains a text
python scripts/outside.py --sample --json                   a few fast cases of every suite, as JSON

Every case runs in a process of its own, with a time limit. See docs/audit.md.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from outside_suites.cases import ERROR, REFUSED, RIGHT, WRONG, Case, Missing, Outcome, judge

SUITES = ("liger", "fla", "tutorials", "language", "gluon", "puzzles")
OF_TRITON = ("tutorials", "language", "gluon")
OF_TESTS = ("language", "gluon")  # whose cases are files of tests
FORK = multiprocessing.get_context("fork")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run other projects' Triton kernels in the interpreter.")
    parser.add_argument("--suite", action="append", choices=SUITES, help="A suite to run; repeat it for several.")
    parser.add_argument("--case", default="", help="Run only the cases whose name contains this text.")
    parser.add_argument("--sample", action="store_true", help="Run only a few fast cases of every suite.")
    parser.add_argument(
        "--triton", type=Path, help="A checkout of Triton, for its tutorials, Gluon tutorials and language tests."
    )
    parser.add_argument("--puzzles", type=Path, help="A checkout of Triton-Puzzles.")
    parser.add_argument("--liger", type=Path, help="A checkout of Liger instead of the package.")
    parser.add_argument("--fla", type=Path, help="A checkout of flash-linear-attention instead of the package.")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="Processes at a time.")
    parser.add_argument("--limit", type=_positive, default=1200, help="Seconds per case, or file of tests.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    missing: list[str] = []
    for suite in options.suite or SUITES:
        try:
            cases = list(suite_cases(suite, options))
        except Missing as error:
            missing.append(str(error))
            continue
        if cases:
            print(f"{suite}: {len(cases)} {'files' if suite in OF_TESTS else 'cases'}", file=sys.stderr, flush=True)
        outcomes += run_all(cases, options.jobs, options.limit, quiet=options.json)
    if options.case and not outcomes and not missing:
        parser.error(f"no case has a name that contains {options.case!r}")
    if options.json:
        print(json.dumps({"missing": missing, "cases": [outcome.as_dict() for outcome in outcomes]}, indent=1))
    else:
        print("\n".join([*table(outcomes), *(f"not run: {line}" for line in missing)]))
    return int(any(outcome.outcome != RIGHT for outcome in outcomes))


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def suite_cases(suite: str, options: argparse.Namespace) -> Iterator[Case]:
    """Return the cases of a suite that the options choose."""
    module = importlib.import_module(f"outside_suites.{suite}")
    path = getattr(options, "triton" if suite in OF_TRITON else suite)
    for case in module.cases(path):
        if options.case in case.name and (not options.sample or case.name in module.SAMPLE):
            yield case


def run_all(cases: list[Case], jobs: int, limit: float, quiet: bool = False) -> list[Outcome]:
    """Run every case in a process of its own, some at a time, and return the outcomes in the order of the cases."""
    waiting = list(enumerate(cases))[::-1]
    running: dict[Connection, tuple[int, Any, float]] = {}
    outcomes: dict[int, list[Outcome]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, case = waiting.pop()
                receiver, sender = FORK.Pipe(duplex=False)
                process = FORK.Process(target=_run_case, args=(case, sender))
                process.start()
                sender.close()
                running[receiver] = number, process, time.monotonic()
            ready = wait(list(running), timeout=0.5)
            for receiver, (number, process, start) in list(running.items()):
                if receiver in ready:
                    found = _received(receiver, process, cases[number])
                elif time.monotonic() - start > limit:
                    os.killpg(process.pid, signal.SIGKILL)
                    found = [Outcome(cases[number].suite, cases[number].name, ERROR, f"longer than {limit:g} s", limit)]
                else:
                    continue
                process.join()
                del running[receiver]
                outcomes[number] = found
                for outcome in found:
                    if not quiet and outcome.outcome != RIGHT:
                        print(f"{outcome.suite}: {outcome.name}: {outcome.outcome}: {outcome.reason}", flush=True)
    finally:
        for _, process, _ in running.values():  # interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [outcome for number in range(len(cases)) for outcome in outcomes[number]]


def _run_case(case: Case, sender: Connection) -> None:
    os.setpgid(0, 0)  # so that the processes that the case starts end with it
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):  # foreign code prints
        found = judge(case)
    sender.send(found)


def _received(receiver: Connection, process: Any, case: Case) -> list[Outcome]:
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return [Outcome(case.suite, case.name, ERROR, f"the process ended with exit code {process.exitcode}")]


def table(outcomes: list[Outcome]) -> list[str]:
    """Return one line per suite with the number of cases by outcome."""
    columns = (RIGHT, WRONG, REFUSED, ERROR)
    lines = [f"{'suite':10} {'cases':>6} " + " ".join(f"{c:>8}" for c in columns) + f" {'seconds':>8}"]
    for suite in dict.fromkeys(outcome.suite for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.suite == suite]
        counts = " ".join(f"{sum(o.outcome == c for o in own):8}" for c in columns)
        lines.append(f"{suite:10} {len(own):6} {counts} {sum(o.seconds for o in own):8.0f}")
    return lines


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")

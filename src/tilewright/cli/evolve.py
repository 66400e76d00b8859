"""The command `tilewright evolve`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright import source
from tilewright.cli.mcp import require_arena
from tilewright.cli.options import AsJson, Cases
from tilewright.cli.shared import warn

if TYPE_CHECKING:
    from tilewright.agents.arbiter import ArenaArbiter
    from tilewright.agents.evolve import Report


def evolve(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="Operation, path or name of a problem.")],
    command: Annotated[
        str,
        typer.Option(
            "--with", metavar="COMMAND", help="Program that reads a prompt on stdin and writes a kernel on stdout."
        ),
    ],
    rounds: Annotated[
        int, typer.Option(min=1, metavar="INTEGER", help="Attempts in all, including those of earlier runs.")
    ] = 10,
    budget: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Start no attempt after this time.")] = 3600.0,
    jobs: Annotated[int, typer.Option(min=1, metavar="INTEGER", help="Attempts at once.")] = 1,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, metavar="SECONDS", help="Time limit of one COMMAND.")
    ] = 300.0,
    arena: Annotated[
        str | None,
        typer.Option(metavar="URL|DIR", help="Arena that judges and ranks.", show_default="a folder in --out"),
    ] = None,
    board: Annotated[
        str | None,
        typer.Option("--board", metavar="BOARD", help="e.g. h200, or 'h200 predicted'.", show_default="the first"),
    ] = None,
    case: Cases = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check a few cases. Takes seconds.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run.", show_default="evolve-PROBLEM")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let a program write kernels: judge each, show it the best and the last verdict, and repeat.

    A run in the same folder continues where the last one ended. Exits with 1 if no kernel was ranked.
    """
    require_arena("tilewright evolve")
    from tilewright.agents.evolve import Run
    from tilewright.agents.generator import parse_command

    words = parse_command(command)
    folder = out or Path(f"evolve-{re.sub(r'[^-.A-Za-z0-9_]+', '-', Path(problem).stem)}")
    arbiter = _arbiter(problem, folder, arena, board, case or [], jobs, quick)
    try:
        limits = {"rounds": rounds, "budget": budget, "jobs": jobs, "seconds": seconds}
        run = Run(arbiter, words, folder, **limits, say=warn if as_json else _say)
        if run.attempts:
            warn(f"{len(run.attempts)} attempts were made before in {folder}")
        report = run()
    finally:
        arbiter.close()
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        _print(report, folder)
    if not report.ranked:
        raise typer.Exit(1)


def _arbiter(
    target: str, folder: Path, arena: str | None, board: str | None, cases: list[str], jobs: int, quick: bool
) -> ArenaArbiter:
    from tilewright import hardware
    from tilewright.agents.arbiter import ArenaArbiter, add_problem
    from tilewright.agents.arenas import Arena

    where, gpu = arena or str(folder / "arena"), hardware.has_gpu()
    name = target
    if not where.startswith(("http://", "https://")):
        default = hardware.current_gpu()["gpu"] if gpu else "h200 predicted"
        name = add_problem(Path(where), target, board or default, cases)
    elif cases:
        raise typer.BadParameter("--case: an arena at a URL has its own cases.")
    opened = Arena(where, workers=1 if gpu else jobs, is_quick=quick)  # a GPU times one kernel at a time
    try:
        if name not in source.op_files():
            return ArenaArbiter(opened, name, opened.problem_text(name), board)
        from tilewright.agents.problems import describe

        return ArenaArbiter(opened, name, describe(name), board)
    except BaseException:
        opened.close()
        raise


def _say(line: str) -> None:
    print(line, flush=True)


def _print(report: Report, folder: Path) -> None:
    from tilewright.agents.evolve import BEST

    counts = f"{report.kernels} kernels, {report.right} right, {report.ranked} ranked"
    print(f"\n{report.problem}: {report.attempts} attempts, {counts}")
    shares = [f"{name} {share:.0%}" for name, share in report.fast.items() if share is not None]
    print(f"share of attempts: {', '.join(shares)}")
    print(
        f"cost: {report.generate_s:.0f} s generating, {report.judge_s:.0f} s judging, "
        f"{report.prompt_chars} characters of prompts, {report.code_chars} of kernels"
    )
    if report.best:
        print(f"best: attempt {report.best.line().strip()}\n\nNext: {folder / BEST}")

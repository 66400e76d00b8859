"""`tilewright check --problem FOLDER SOLUTIONS`: judge the solutions of many problems and report fast_p."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewright.cli.shared import console, progress, table, warn
from tilewright.errors import CannotWrite, FileMissing
from tilewright.record import require_writable

if TYPE_CHECKING:
    from tilewright.workbench.check.batch import Job, Outcome

DEFAULT_JOBS = 2
RENDERED = (".md", ".html")
INTERRUPTED = 130  # as shells report it


def check_folder(problems: Path, named: list[Path], plan: Any, jobs: int, reports: list[Path], record: Any) -> None:
    """Judge every solution in a folder. Exits with 1 unless each problem has a right one, and with 130 on Ctrl-C."""
    if len(named) != 1 or record or plan.kernels or plan.dtypes or plan.cases:
        raise typer.BadParameter(
            "--problem with a folder takes one folder of solutions, and no --record, --kernel, --case or --dtype."
        )
    from tilewright.workbench.check.batch import PENDING, Options, Outcome, find_jobs, find_problems, judge_all

    find_problems(problems)
    (solutions,) = named
    if not solutions.is_dir():
        raise FileMissing(solutions, "a folder of solutions")
    for path in reports:
        if path.suffix not in RENDERED:
            raise typer.BadParameter(f"--report: '{path}' ends neither in .md nor in .html.")
        require_writable(path)
    from tilewright import hardware

    found, unused = find_jobs(problems, solutions)
    if unused:
        count = "1 file" if len(unused) == 1 else f"{len(unused)} files"
        warn(f"no problem in {problems} is solved by {count} in {solutions}, for example {unused[0].name}")
    device = "cuda" if hardware.has_gpu() else "cpu"
    measure = None
    if device == "cuda":
        from tilewright.workbench.bench.problems import speedup

        measure = speedup
    outcomes = {job: Outcome(job.name, str(job.solution or ""), PENDING) for job in found}
    is_interrupted = False
    with progress(f"judging {len(found)} solutions", len(found)) as advance:

        def show(job: Job, outcome: Outcome) -> None:
            outcomes[job] = outcome
            advance(outcome.problem)
            if plan.as_json:
                content = {"problem": outcome.problem, "speedup": outcome.speedup, **outcome.content}
                known = {"verdict": outcome.verdict, "reason": outcome.reason, "file": outcome.solution}
                known |= {"seconds": outcome.seconds}
                print(json.dumps(content | known), flush=True)

        options = Options(plan.depth, plan.scale, plan.seed)
        try:
            judge_all(found, options, device, jobs, show, measure)
        except KeyboardInterrupt:
            is_interrupted = True
    pending = sum(outcome.verdict == PENDING for outcome in outcomes.values())
    title = f"{solutions.name} on {problems.name}, checked {_where(device)}"
    title += f", interrupted: {pending} of {len(found)} not judged" if is_interrupted else ""
    _write([*outcomes.values()], title, reports, plan.as_json)
    if is_interrupted:
        warn(f"interrupted: {pending} of {len(found)} solutions were not judged")
        raise typer.Exit(INTERRUPTED)
    best = {outcome.problem for outcome in outcomes.values() if outcome.verdict == "right"}
    if len(best) < len({outcome.problem for outcome in outcomes.values()}):
        raise typer.Exit(1)


def _where(device: str) -> str:
    from tilewright import hardware

    return f"on {hardware.current_gpu()['name']}" if device == "cuda" else "without a GPU"


def _write(outcomes: list[Outcome], title: str, reports: list[Path], as_json: bool) -> None:
    from tilewright.report import fast_p

    if not as_json:
        for rows in (fast_p.details(outcomes), fast_p.summary(outcomes)):
            header, *lines = rows
            shown = table(*header)
            for line in lines:
                shown.add_row(*line)
            console().print(shown, "")
    for path in reports:
        render = fast_p.html if path.suffix == ".html" else fast_p.markdown
        try:
            path.write_text(render(outcomes, title), encoding="utf-8")
        except OSError as error:  # the disk is full
            raise CannotWrite(path, error.strerror or str(error)) from None
        warn(f"wrote {path}")

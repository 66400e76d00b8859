"""The command `tilewright check`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright import source
from tilewright.cli.check_folder import DEFAULT_JOBS, check_folder
from tilewright.cli.options import AsJson, CallOptions, RecordFile, flattened
from tilewright.cli.selection import load_target, next_words, refuse_for_operations, select_kernels
from tilewright.cli.shared import (
    console,
    exit_unless_correct,
    parse_cases,
    parse_dtypes,
    progress,
    require_files,
    say_next,
    start_worker_early,
    warn,
)
from tilewright.errors import FileMissing, InvalidKernelFile, NothingChecked
from tilewright.record import append, require_writable, stamp

if TYPE_CHECKING:
    from tilewright.spec import Case, Op
    from tilewright.workbench.check import Verdict
    from tilewright.workbench.check.problems import Problem


@flattened
def check(
    ctx: typer.Context,
    *,
    op_name: Annotated[
        str | None,
        typer.Argument(metavar="OP|FILE", help="Operation, or a .py file with one of your own.", show_default="all"),
    ] = None,
    options: CallOptions,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 2, metavar="INTEGER", help="Repeat a run with the seed in its JSON output."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check a few cases. Takes seconds.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Check every variant of every small case. Takes minutes.")
    ] = False,
    problem: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Check FILEs as solutions of this KernelBench file, gpu-mode folder or flashinfer-bench definition.",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(metavar="FRACTION", help="Shrink the sizes of --problem to this fraction of its work, e.g. 1/64."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="INTEGER", help="Solutions of a --problem folder to judge at once.")
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Write fast_p of a --problem folder to this .md or .html file. Repeatable."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 also if a kernel, or a case of a FILE, cannot run here.")
    ] = False,
    record: RecordFile = None,
    as_json: AsJson = False,
) -> None:
    """Check kernels against a float64 reference on many cases. Needs no GPU for Triton kernels.

    Exits with 1 if a kernel is not correct.
    """
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other.")
    if record:
        require_writable(record)
    refuse_for_operations(ctx, None if problem else op_name)
    files, kernels = options.files or [], options.kernel or []
    depth = "quick" if quick else "full" if full else "default"
    plan = Plan(kernels, options.case, options.dtype, seed, depth, as_json, parse_scale(scale))
    if scale and (problem is None or options.case):
        raise typer.BadParameter("--scale needs --problem, and excludes --case.")
    if problem is not None and problem.is_dir() and not (problem / "task.yml").exists():
        named = [Path(name) for name in ([op_name] if op_name else [])] + files
        check_folder(problem, named, plan, jobs or DEFAULT_JOBS, report or [], record)
        return
    if jobs or report:
        raise typer.BadParameter("--jobs and --report need --problem with a folder of problems.")
    if problem is not None:
        found = _check_problem(problem, [Path(name) for name in ([op_name] if op_name else [])] + files, plan)
    elif op_name is None:
        found = _check_all(plan)
    else:
        found = _check_op(op_name, options, plan)
    if record:
        own = Path(op_name) if op_name and op_name not in source.op_files() else None
        _append(record, found, own, is_narrow=bool(options.case or options.dtype))
    exit_unless_correct(found)
    if not any(verdict.verdict == "right" for verdict in found):
        raise NothingChecked("; ".join(dict.fromkeys(f"{verdict.kernel} {verdict.reason}" for verdict in found)))
    if left := [verdict for verdict in found if verdict.verdict != "right"]:
        names = ", ".join(dict.fromkeys(verdict.kernel for verdict in left))
        warn(f"not checked on this machine: {names}")
        if strict or any(verdict.file for verdict in left):
            raise typer.Exit(1)
    if strict and (partly := [verdict for verdict in found if verdict.file and verdict.summary != verdict.verdict]):
        warn("; ".join(f"{verdict.kernel} is {verdict.summary}" for verdict in partly))
        raise typer.Exit(1)
    if not as_json and not problem:
        say_next(shlex.join(["tilewright", *next_words(op_name or "softmax", options)]))


def _append(path: Path, found: list[Verdict], own: Path | None, *, is_narrow: bool) -> None:
    """Record the verdicts; `own` is the file of a user's operation.

    `is_narrow` marks a check of selected cases, which does not prove a kernel correct.
    """
    from tilewright import hardware

    about = {
        "is_narrow": is_narrow,
        "device": hardware.current_gpu() if hardware.has_gpu() else {},
        "versions": hardware.versions(),
    }
    for verdict in found:
        content = {k: v for k, v in verdict.as_json().items() if k not in ("op", "kernel", "file")}
        code = Path(verdict.file) if verdict.file else own
        file = {"file": str(code)} if code else {}
        hashed = source.file_hash(code) if code else source.kernel_hash(verdict.op, verdict.kernel)
        append(path, [stamp("verdict", verdict.op, verdict.kernel, hashed or "", **content, **about, **file)])


@dataclass(frozen=True)
class Plan:
    """The kernels and cases to check, and the depth of the check."""

    kernels: list[str]
    cases: list[str] | None
    dtypes: list[str] | None
    seed: int | None
    depth: str
    as_json: bool
    scale: Fraction | None = None  # the share of a third-party problem's work


def parse_scale(text: str | None) -> Fraction | None:
    try:
        scale = Fraction(text) if text else None
    except (ValueError, ZeroDivisionError):
        scale = Fraction(0)
    if scale is not None and not 0 < scale <= 1:
        raise typer.BadParameter(f"--scale: '{text}' is not a fraction like 1/64.")
    return scale


def _check_all(plan: Plan) -> list[Verdict]:
    """Check every operation, two at a time, each in its own process, because compilers take most of the time."""
    from tilewright.report import terminal
    from tilewright.workbench.check import Verdict

    named = [("--kernel", k) for k in plan.kernels] + [("--dtype", d) for d in plan.dtypes or []]
    named += [("--seed", str(plan.seed))] if plan.seed is not None else []
    options = [word for pair in named for word in pair] + ([f"--{plan.depth}"] if plan.depth != "default" else [])

    def run(name: str) -> list[Verdict]:
        command = [sys.executable, "-m", "tilewright", "check", name, "--json", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode > 1:
            raise InvalidKernelFile(f"{name}: {done.stderr.strip() or f'check exited with {done.returncode}'}")
        return [Verdict.from_json(json.loads(line)) for line in done.stdout.splitlines()]

    found = []
    names = sorted(source.op_files(), key=lambda name: -source.op_files()[name].stat().st_size)  # the longest first
    with ThreadPoolExecutor(2) as pool, progress("checking all operations", len(names)) as advance:
        for name, verdicts in zip(names, pool.map(run, names), strict=True):
            advance(name)
            found += verdicts
            if plan.as_json:
                print("\n".join(json.dumps(verdict.as_json()) for verdict in verdicts), flush=True)
            else:
                console().print(terminal.verdicts(verdicts, name))
    return found


def _check_op(name: str, options: CallOptions, plan: Plan) -> list[Verdict]:
    files = options.files or []
    if files or name.endswith(".py"):
        start_worker_early()
    op = load_target(name, options)
    cases, dtypes = parse_cases(op, plan.cases), parse_dtypes(op, plan.dtypes)
    return check_and_print(op, files, plan.kernels, cases, dtypes, plan.seed, plan.as_json, plan.depth)


def _check_problem(path: Path, files: list[Path], plan: Plan) -> list[Verdict]:
    if not files:
        raise typer.BadParameter("--problem needs a FILE that solves it.")
    if plan.kernels or plan.dtypes:
        raise typer.BadParameter("--kernel and --dtype cannot be combined with --problem, which determines them.")
    if not path.exists():
        raise FileMissing(path, "a KernelBench file, a gpu-mode folder with task.yml, or a flashinfer-bench definition")
    require_files(files, (".py", ".json") if path.suffix == ".json" else (".py",))
    start_worker_early()
    from tilewright import hardware
    from tilewright.workbench.check import problems

    loaded = problems.load(path)
    try:
        loaded.select(plan.cases or [], plan.scale, "cuda" if hardware.has_gpu() else "cpu")
        return check_and_print(loaded.op, files, [], None, None, plan.seed, plan.as_json, plan.depth, problem=loaded)
    finally:
        loaded.close()


def check_and_print(
    op: Op,
    files: list[Path],
    kernel_names: list[str],
    cases: list[Case] | None,
    dtypes: list[str] | None,
    seed: int | None,
    as_json: bool,
    depth: str = "default",
    problem: Problem | None = None,
) -> list[Verdict]:
    from tilewright import hardware
    from tilewright.report import terminal
    from tilewright.workbench.check import case_count
    from tilewright.workbench.check import check as run_check

    device = "cuda" if hardware.has_gpu() else "cpu"
    kernels = select_kernels(op, kernel_names, files)
    total = case_count(op, kernels, files, cases, dtypes, depth, device, problem)
    found = []
    with progress(f"checking {op.name}", total) as advance:
        for verdict in run_check(
            op,
            kernels,
            files,
            device=device,
            cases=cases,
            dtypes=dtypes,
            seed=seed,
            depth=depth,
            problem=problem,
            on_case=lambda: advance(""),
        ):
            found.append(verdict)
            if as_json:
                print(json.dumps(verdict.as_json()), flush=True)
    if not as_json:
        where = "on this GPU" if device == "cuda" else "without a GPU"
        console().print(terminal.verdicts(found, f"{op.name}, checked {where}"))
    return found

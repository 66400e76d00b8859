"""`tilewright check`"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright import source
from tilewright.cli.shared import (
    AsJson,
    CaseText,
    DtypeName,
    Files,
    Kernels,
    cases_of,
    console,
    dtypes_of,
    exit_unless_good,
    load_op,
    progress,
    require_files,
    say_next,
    start_worker_early,
)
from tilewright.errors import FileMissing, FileUnusable, NothingChecked
from tilewright.record import append, require_writable, stamp

if TYPE_CHECKING:
    from tilewright.spec import Case, Op
    from tilewright.workbench.check import Verdict
    from tilewright.workbench.check.problems import Problem


def check(
    op_name: Annotated[
        str | None, typer.Argument(metavar="[OP]", help="An operation; all of them unless told.")
    ] = None,
    files: Files = None,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 2, help="Repeat a run: the seed its JSON names.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases and variants: seconds.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every variant of every small case: minutes.")] = False,
    problem: Annotated[
        Path | None,
        typer.Option(help="FILEs solve this: a KernelBench file, or a gpu-mode folder with task.yml; then without OP."),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Append every verdict to this file, as JSON lines.")] = None,
    as_json: AsJson = False,
) -> None:
    """Is it right? Hold every kernel of OP, or those in FILEs, against float64 on many cases."""
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other.")
    depth = "quick" if quick else "full" if full else "default"
    if record:
        require_writable(record)
    asked = Asked(kernel or [], case, dtype, seed, depth, as_json)
    if problem is not None:
        found = _check_problem(problem, [Path(name) for name in ([op_name] if op_name else [])] + (files or []), asked)
    elif op_name is None:
        found = _check_all(asked)
    else:
        found = _check_op(op_name, files or [], asked)
    if record:
        _append(record, found, is_narrow=bool(case or dtype))
    exit_unless_good(found)
    if not any(verdict.verdict == "right" for verdict in found):
        raise NothingChecked("; ".join(dict.fromkeys(f"{verdict.kernel} {verdict.reason}" for verdict in found)))
    if left := [verdict.kernel for verdict in found if verdict.verdict != "right"]:
        names = ", ".join(dict.fromkeys(left))
        print(f"tilewright: not checked here: {names}; name those to check with --kernel", file=sys.stderr)
        raise typer.Exit(1)
    if not as_json and not problem:
        say_next(shlex.join(["tilewright", "bench", op_name or "softmax", *map(str, files or [])]))


def _append(path: Path, found: list[Verdict], *, is_narrow: bool) -> None:
    """`is_narrow`: not all was asked that a proof needs."""
    from tilewright import hardware

    about = {
        "is_narrow": is_narrow,
        "device": hardware.in_hand() if hardware.has_gpu() else {},
        "versions": hardware.versions(),
    }
    for verdict in found:
        content = {k: v for k, v in verdict.as_json().items() if k not in ("op", "kernel", "file")}
        file = {"file": verdict.file} if verdict.file else {}
        hashed = (
            source.file_hash(Path(verdict.file)) if verdict.file else source.kernel_hash(verdict.op, verdict.kernel)
        )
        append(path, [stamp("verdict", verdict.op, verdict.kernel, hashed or "", **content, **about, **file)])


@dataclass
class Asked:
    """What the options say."""

    kernels: list[str]
    cases: list[str] | None
    dtypes: list[str] | None
    seed: int | None
    depth: str
    as_json: bool


def _check_all(asked: Asked) -> list[Verdict]:
    """Every operation, two at a time, each in a process of its own: most of the time goes into compilers."""
    from tilewright.report import terminal
    from tilewright.workbench.check import Verdict

    named = [("--kernel", k) for k in asked.kernels] + [("--dtype", d) for d in asked.dtypes or []]
    named += [("--seed", str(asked.seed))] if asked.seed is not None else []
    options = [word for pair in named for word in pair] + ([f"--{asked.depth}"] if asked.depth != "default" else [])

    def run(name: str) -> list[Verdict]:
        command = [sys.executable, "-m", "tilewright", "check", name, "--json", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode > 1:
            raise FileUnusable(f"{name}: {done.stderr.strip() or 'check ended with code ' + str(done.returncode)}")
        return [Verdict.from_json(json.loads(line)) for line in done.stdout.splitlines()]

    found = []
    names = sorted(source.op_files(), key=lambda name: -source.op_files()[name].stat().st_size)  # the longest first
    with ThreadPoolExecutor(2) as pool, progress("checking all operations", len(names)) as advance:
        for name, verdicts in zip(names, pool.map(run, names), strict=True):
            advance(name)
            found += verdicts
            if asked.as_json:
                print("\n".join(json.dumps(verdict.as_json()) for verdict in verdicts), flush=True)
            else:
                console().print(terminal.verdicts(verdicts, f"{name}"))
    return found


def _check_op(name: str, files: list[Path], asked: Asked) -> list[Verdict]:
    if files:
        start_worker_early()
    op = load_op(name, files)
    cases, dtypes = cases_of(op, asked.cases), dtypes_of(op, asked.dtypes)
    return check_and_print(op, files, asked.kernels, cases, dtypes, asked.seed, asked.as_json, asked.depth)


def _check_problem(path: Path, files: list[Path], asked: Asked) -> list[Verdict]:
    if not files:
        raise typer.BadParameter("--problem needs a file that solves it.")
    if asked.kernels or asked.dtypes:
        raise typer.BadParameter("--kernel and --dtype do not go with --problem, which decides them.")
    if not path.exists():
        raise FileMissing(path, "a KernelBench file, or of a gpu-mode folder with task.yml")
    require_files(files)
    start_worker_early()
    from tilewright.workbench.check import problems

    loaded = problems.load(path)
    try:
        cases = cases_of(loaded.op, asked.cases)
        if cases:
            loaded.use([case.with_dtype(loaded.op.dtypes[0]) for case in cases])
        return check_and_print(
            loaded.op, files, [], cases, None, asked.seed, asked.as_json, asked.depth, problem=loaded
        )
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
    """Check and print."""
    from tilewright import hardware, registry
    from tilewright.report import terminal
    from tilewright.workbench.check import case_count
    from tilewright.workbench.check import check as run_check

    device = "cuda" if hardware.has_gpu() else "cpu"
    kernels = registry.pick(op, kernel_names) if kernel_names or not files else []
    total = case_count(op, kernels, files, cases, dtypes, depth, device)
    found = []
    with progress(f"checking {op.name}", total) as advance:
        asked = run_check(
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
        )
        for verdict in asked:
            found.append(verdict)
            if as_json:
                print(json.dumps(verdict.as_json()), flush=True)
    if not as_json:
        where = "on this GPU" if device == "cuda" else "without a GPU: Triton in our interpreter"
        console().print(terminal.verdicts(found, f"{op.name}, checked {where}"))
    return found

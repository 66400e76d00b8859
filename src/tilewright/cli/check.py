"""`tilewright check`"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.shared import (
    AsJson,
    CaseText,
    DtypeName,
    Files,
    Kernels,
    OpName,
    cases_of,
    console,
    dtypes_of,
    exit_unless_good,
    load_op,
    progress,
    say_next,
)
from tilewright.errors import NothingChecked

if TYPE_CHECKING:
    from tilewright.spec import Case, Op
    from tilewright.tools.check import Verdict


def check(
    op_name: OpName,
    files: Files = None,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 2, help="Repeat a run: the seed its JSON names.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases and variants: seconds.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every variant of every small case: minutes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Is it right? Hold every kernel of OP, or those in FILEs, against float64 on many cases."""
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other.")
    depth = "quick" if quick else "full" if full else "default"
    op = load_op(op_name, files)
    cases, dtypes = cases_of(op, case), dtypes_of(op, dtype)
    found = check_and_print(op, files or [], kernel or [], cases, dtypes, seed, as_json, depth)
    exit_unless_good(found)
    if not any(verdict.verdict == "right" for verdict in found):
        raise NothingChecked("; ".join(dict.fromkeys(f"{verdict.kernel} {verdict.reason}" for verdict in found)))
    if not as_json:
        say_next(shlex.join(["tilewright", "bench", op_name, *map(str, files or [])]))


def check_and_print(
    op: Op,
    files: list[Path],
    kernel_names: list[str],
    cases: list[Case] | None,
    dtypes: list[str] | None,
    seed: int | None,
    as_json: bool,
    depth: str = "default",
) -> list[Verdict]:
    """Check and print."""
    from tilewright import hardware, registry
    from tilewright.report import terminal
    from tilewright.tools.check import case_count
    from tilewright.tools.check import check as run_check

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

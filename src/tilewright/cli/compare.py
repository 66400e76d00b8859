"""The command `tilewright compare`."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import source
from tilewright.cli.options import AsJson
from tilewright.cli.shared import console, read_records, say_next, table, warn
from tilewright.errors import NoCommonTimings, NoTimings
from tilewright.record import spelled
from tilewright.report.formatting import digits

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.workbench.bench.changes import Change

NOT_CORRECT = "no longer correct"
STYLE = {"faster": "green", "same": "", "not comparable": "dim", "new": "dim", "missing": "dim"}
NOTES = {
    "missing": "not timed in NEW",
    "not comparable": "one file timed single calls, the other back-to-back ones",
}


def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Records before the change (bench --record FILE).")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Records after it.")],
    threshold: Annotated[
        float, typer.Option(min=0.0, metavar="FLOAT", help="Relative slowdown that counts as slower.")
    ] = 0.02,
    as_json: AsJson = False,
) -> None:
    """Compare the timings in two files of records; exit with 1 if a kernel became slower or incorrect."""
    from tilewright.workbench.bench.changes import ORDER, compare, gpus

    before, after = map(_read_timings, (old, new))
    changes = compare(before, after, threshold)
    if not any(change.now or change.verdict not in ("missing", "new") for change in changes):
        raise NoCommonTimings(old, gpus(before), new, gpus(after))
    if different := sorted(gpus(before) ^ gpus(after)):
        warn(f"only one of the files has timings on {', '.join(different)}; not compared")
    if as_json:
        for change in changes:
            print(json.dumps(change.as_json()))
    else:
        out = console()
        out.print(_table(changes, f"{old} → {new} on {', '.join(sorted(gpus(before) & gpus(after)))}"))
        count = Counter(NOT_CORRECT if change.now else change.verdict for change in changes)
        out.print(f"\n{', '.join(f'{count[what]} {what}' for what in (NOT_CORRECT, *ORDER))}")
        regressed = changes[0].is_regression
        say_next(_bench_again(changes[0]) if regressed else f"compare the next change with {new}")
    if any(change.is_regression for change in changes):
        raise typer.Exit(1)


def _read_timings(path: Path) -> list[dict[str, Any]]:
    found = read_records(path)
    if not any(r["kind"] == "timing" for r in found):
        raise NoTimings(path)
    return found


def _table(changes: list[Change], title: str) -> Table:
    """Return one row per call. The verdict is the first column, so that a narrow terminal does not cut it off."""
    from rich.text import Text

    several = len({change.gpu for change in changes}) > 1
    numbers = ("new / old", "95 % interval", "old (us)", "new (us)")
    shown = table("", right=numbers, last=("kernel", "op and case", ""), title=title)
    for change in changes:
        where = [change.op, spelled(change.case).replace(",", ", "), change.dtype]
        where += [change.direction] if change.direction != "forward" else []
        cells = [
            "not correct" if change.now else change.verdict,
            f"{change.ratio:.3f}" if change.ratio else "",
            "{:.3f} to {:.3f}".format(*change.interval) if change.interval else "",
            digits(change.old_us) or "-",
            digits(change.new_us) or "-",
            change.kernel,
            " ".join([*where, *([change.gpu] if several else [])]),
            f"now {change.now}" if change.now else NOTES.get(change.verdict, ""),
        ]
        shown.add_row(*map(Text, cells), style="bold red" if change.is_regression else STYLE[change.verdict])
    return shown


def _bench_again(change: Change) -> str:
    is_ours = change.kernel in (*source.kernels(change.op), *source.peer_files())
    kernel = ["-k", change.kernel] if is_ours else [change.kernel]  # a user's file
    case = ["--case", spelled(change.case), "--dtype", change.dtype, "--direction", change.direction]
    return shlex.join(["tilewright", "bench", change.op, *kernel, *case])

"""`tilewright bench --compare`"""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilewright import source
from tilewright.cli.shared import console, say_next
from tilewright.errors import CorruptRecords, NewerRecords, NothingInCommon, NoTimings
from tilewright.record import spelled

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.record import Read
    from tilewright.workbench.bench.compare import Change

NOT_RIGHT = "no longer right"
STYLE = {"faster": "green", "same": "", "unlike": "dim", "new": "dim", "gone": "dim"}
SAID = {"gone": "not timed now", "unlike": "not compared: back-to-back calls in one file, single ones in the other"}


def compare_files(old: Path, new: Path, threshold: float, as_json: bool) -> None:
    """Say which kernels became faster, slower or stayed the same; exit with 1 if one became slower or wrong."""
    from tilewright.workbench.bench.compare import ORDER, compare, gpus

    before, after = (_read(path).records for path in (old, new))
    changes = compare(before, after, threshold)
    if not any(change.now or change.verdict not in ("gone", "new") for change in changes):
        raise NothingInCommon(old, gpus(before), new, gpus(after))
    if apart := sorted(gpus(before) ^ gpus(after)):
        print(f"tilewright: only one of the files has timings of {', '.join(apart)}; not compared", file=sys.stderr)
    if as_json:
        for change in changes:
            print(json.dumps(change.as_json()))
    else:
        out = console()
        out.print(_table(changes, f"{old} → {new} on {', '.join(sorted(gpus(before) & gpus(after)))}"))
        count = Counter(NOT_RIGHT if change.now else change.verdict for change in changes)
        out.print(f"\n{', '.join(f'{count[what]} {what}' for what in (NOT_RIGHT, *ORDER))}")
        say_next(_bench_again(changes[0]) if changes[0].is_regression else f"hold the next change against {new}")
    if any(change.is_regression for change in changes):
        raise typer.Exit(1)


def _read(path: Path) -> Read:
    from tilewright.record import read

    found = read(path)
    for number in found.torn:
        print(f"tilewright: {path}, line {number} was cut off while written; skipped", file=sys.stderr)
    if found.newer:
        raise NewerRecords(path, found.newer)
    if found.corrupt:
        raise CorruptRecords(path, found.corrupt)
    if not any(r["kind"] == "timing" for r in found.records):
        raise NoTimings(path)
    return found


def _table(changes: list[Change], title: str) -> Table:
    """What became of it comes first, so that no narrow terminal cuts it off."""
    from rich.table import Table
    from rich.text import Text

    several = len({change.gpu for change in changes}) > 1
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("new / old", justify="right", no_wrap=True)
    for column in ("95 % of it", "old", "new"):
        table.add_column(column, justify="right")
    for column in ("kernel", "op and case", ""):
        table.add_column(column, overflow="fold")
    for change in changes:
        where = [change.op, spelled(change.case).replace(",", ", "), change.dtype]
        where += [change.direction] if change.direction != "forward" else []
        cells = [
            "not right" if change.now else change.verdict,
            f"{change.ratio:.3f}" if change.ratio else "",
            "{:.3f} to {:.3f}".format(*change.interval) if change.interval else "",
            _us(change.old_us),
            _us(change.new_us),
            change.kernel,
            " ".join([*where, *([change.gpu] if several else [])]),
            f"now {change.now}" if change.now else SAID.get(change.verdict, ""),
        ]
        table.add_row(*map(Text, cells), style="bold red" if change.is_regression else STYLE[change.verdict])
    return table


def _bench_again(change: Change) -> str:
    is_ours = change.kernel in (*source.kernels(change.op), *source.peer_files())
    kernel = ["-k", change.kernel] if is_ours else [change.kernel]  # else a user's file
    case = ["--case", spelled(change.case), "--dtype", change.dtype, "--direction", change.direction]
    return shlex.join(["tilewright", "bench", change.op, *kernel, *case])


def _us(us: float | None) -> str:
    return f"{us:.1f} us" if us else "-"

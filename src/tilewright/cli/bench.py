"""`tilewright bench`"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import settings, source
from tilewright.cli.check import check_and_print
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
    recorded,
    say_next,
)

if TYPE_CHECKING:
    from tilewright.spec import Case, Op


def bench(
    op_name: OpName,
    files: Files = None,
    kernel: Kernels = None,
    case: CaseText = None,
    dtype: DtypeName = None,
    direction: Annotated[str, typer.Option(help="forward, backward or both.")] = "forward",
    samples: Annotated[int | None, typer.Option(min=3, help="Timed calls of each kernel; 50 unless told.")] = None,
    record: Annotated[Path | None, typer.Option(help="Append every timing to this file, as JSON lines.")] = None,
    as_json: AsJson = False,
) -> None:
    """How fast is it? Time every right kernel of OP, and those in FILEs, against the ceiling measured here.

    Without a GPU: check what can run here, and show the recorded timings.
    """
    from tilewright import hardware
    from tilewright.record import require_writable

    if direction not in ("forward", "backward", "both"):
        raise typer.BadParameter(f"'{direction}' is none of forward, backward, both.")
    op = load_op(op_name, files)
    cases, dtypes = cases_of(op, case), dtypes_of(op, dtype)
    if record:
        require_writable(record)
    if hardware.has_gpu():
        timed = [c.with_dtype(d) for d in dtypes or [op.bench_dtype] for c in cases or op.bench]
        _bench_here(op, files or [], kernel or [], timed, direction, samples, record, as_json)
    else:
        _bench_recorded(op, files or [], kernel or [], cases, dtypes, direction, as_json)
        if record:
            print(f"tilewright: no GPU, so nothing was recorded in {record}", file=sys.stderr)


def _bench_here(
    op: Op,
    files: list[Path],
    kernel_names: list[str],
    cases: list[Case],
    direction: str,
    samples: int | None,
    path: Path | None,
    as_json: bool,
) -> None:
    from tilewright import hardware, registry
    from tilewright.record import append, stamp
    from tilewright.report import terminal
    from tilewright.report.rows import rows
    from tilewright.tools import bench as tool

    kernels = registry.pick(op, kernel_names)
    timer = tool.Timer()
    timings, records = [], []
    by_file = {file.name: file for file in files}
    with progress(f"timing {op.name}", None) as advance:
        advance("measuring this GPU's ceilings")
        context = {
            "ceilings": tool.measure(timer, tool.units(op, cases)),
            "device": hardware.in_hand(),
            "versions": hardware.versions(),
        }
        for timing in tool.bench(
            op,
            kernels,
            files,
            timer=timer,
            cases=cases,
            direction=direction,
            samples=samples or tool.SAMPLES,
            on_step=advance,
        ):
            timings.append(timing)
            file = by_file.get(timing.kernel)
            source_hash = source.file_hash(file) if file else source.kernel_hash(op.name, timing.kernel)
            extra = {"file": str(file)} if file else {}
            content = {k: v for k, v in timing.as_json().items() if k not in ("op", "kernel")}
            record = stamp("timing", op.name, timing.kernel, source_hash or "", **content, **context, **extra)
            records.append(record)
            if path:
                append(path, [record])
            if as_json:
                print(json.dumps(record), flush=True)
    if not as_json:
        out = console()
        out.print(terminal.timings(list(rows(records)), f"{op.name} on {context['device']['name']}"))
        out.print(_ceilings_line(context["ceilings"]))
        say_next(f"{len(records)} records are in {path}" if path else f"tilewright bench {op.name} --record FILE.jsonl")
    exit_unless_good(timings)


def _bench_recorded(
    op: Op,
    files: list[Path],
    kernel_names: list[str],
    cases: list[Case] | None,
    dtypes: list[str] | None,
    direction: str,
    as_json: bool,
) -> None:
    from tilewright.record import is_stale

    if not as_json:
        print("No GPU here, so nothing is timed: kernels are checked, and recorded timings are shown.\n")
    found = check_and_print(op, files, kernel_names, cases, dtypes, None, as_json)
    points = [dict(case.point) for case in cases or []]

    def is_wanted(r: dict[str, Any]) -> bool:
        return (
            r["kind"] == "timing"
            and r["op"] == op.name
            and direction in (r["direction"], "both")
            and (not kernel_names or r["kernel"] in kernel_names)
            and (not points or r["case"] in points)
            and (not dtypes or r["dtype"] in dtypes)
        )

    with recorded() as records:
        shown = [r for r in records if is_wanted(r)]
        if as_json:
            for r in shown:
                print(json.dumps({**r, "recorded": True, "stale": is_stale(r)}))
        else:
            _show_recorded(op, shown)
    exit_unless_good(found)


def _show_recorded(op: Op, records: list[dict[str, Any]]) -> None:
    from tilewright.report import terminal
    from tilewright.report.rows import rows

    if not records:
        print(f"\nNo such timings of {op.name} were recorded in {settings.results_dir()}.")
    for device in dict.fromkeys(r["device"]["name"] for r in records):
        here = [r for r in records if r["device"]["name"] == device]
        dates = sorted({r["date"][:10] for r in here})
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        console().print(terminal.timings(list(rows(here)), f"\n{op.name}, RECORDED on {device}, {when}"))
        console().print(_ceilings_line(here[-1]["ceilings"]))
    say_next(f"on a machine with a GPU: tilewright bench {op.name}")


def _ceilings_line(ceilings: dict[str, float]) -> str:
    def figure(unit: str, rate: float) -> str:
        return f"{unit} {rate / 1e9:.0f} GB/s" if unit in ("copy", "read") else f"{unit} {rate / 1e12:.0f} TFLOP/s"

    return "Ceilings measured in the same run: " + ", ".join(figure(u, r) for u, r in ceilings.items())

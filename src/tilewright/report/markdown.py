"""Tables inside Markdown pages, filled from records between two markers, so that no number is typed by hand.

<!-- records: softmax forward -->
…replaced…
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Any

from tilewright import source
from tilewright.cost import DIRECTIONS
from tilewright.counters import Counters
from tilewright.record import TRAIN_STEP, is_stale, spelled
from tilewright.report import portability, prediction_accuracy, regressions, training
from tilewright.report.formatting import STALE, STALE_NOTE, digits, op_label, percent, provenance, table
from tilewright.report.timings import TimingRow, timing_rows

DEFAULT_DTYPE = "bfloat16"  # tables name only other dtypes
EARLIER_TIMER = "‡"
EARLIER_TIMER_NOTE = f"{EARLIER_TIMER} Measured with an earlier timer, without a confidence interval."
SUMMARY_ROWS = 10
ALL_OPS = ("cases", "largest")  # every case of every op, or the case of each op that moves the most bytes
BLOCK = re.compile(r"(<!-- records: (?P<name>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
WHY_UNTIMED = {
    "wrong": "it returns a wrong result",
    "unsupported": "it does not support the case",
    "implausible": "the measured time is below what the hardware can do",
}
NO_RECORDS = "No records yet.\n"
Records = list[dict[str, Any]]


class BlockError(ValueError):
    """A page has no block, or a block with an unknown name."""


def fill(page: str, records: Records) -> str:
    """Return the page with every marked block filled from the records.

    A block is named `summary OP,OP,…`, `bank-conflicts OP`, a key of BLOCKS, a direction after an op, `cases` or
    `largest`, or `cases DIRECTION FAMILY`.
    """
    if not BLOCK.search(page):
        raise BlockError("it has no block of records")
    return BLOCK.sub(lambda found: found[1] + _block(found["name"], records) + found[3], page)


def _block(full_name: str, records: Records) -> str:
    name, _, option = full_name.partition(" ")
    ops = source.op_files()
    if name in BLOCKS and (option in ops if name in OP_BLOCKS else not option):
        belongs, render = BLOCKS[name]
        chosen = [r for r in records if belongs(r, option)]
        return render(chosen) if chosen else NO_RECORDS
    timings = [r for r in records if r["kind"] == "timing" and not r.get("sized")]
    if name == "summary" and all(op in ops for op in option.split(",")):
        return _summary(timings, option.split(","))
    direction, _, family = option.partition(" ")
    members = [op for op, path in ops.items() if family in ("", path.parent.name) and name in (op, *ALL_OPS)]
    if direction in DIRECTIONS and members and (name == "cases" or not family):
        chosen = [r for r in timings if r["direction"] == direction and r["op"] in members]
        gpus = dict.fromkeys(r["device"]["name"] for r in chosen)
        tables = [_timings(name, [r for r in chosen if r["device"]["name"] == gpu]) for gpu in gpus]
        return "\n".join(tables) or NO_RECORDS
    raise BlockError(f"no block is named '{full_name}'")


def _timings(name: str, records: Records) -> str:
    rows = list(timing_rows(records))
    if name in ALL_OPS:
        return _cases(_largest(rows) if name == "largest" else rows, records)
    return _kernels(rows, records)


def _summary(records: Records, ops: Sequence[str]) -> str:
    """Render one row per op, from fresh records of the GPU that has most: its largest case, forward if timed alone."""
    fresh = [r for r in records if r["op"] in ops and not is_stale(r)]
    gpu = max({r["device"]["gpu"] for r in fresh}, key=[r["device"]["gpu"] for r in fresh].count, default="")
    fresh = [r for r in fresh if r["device"]["gpu"] == gpu]
    largest: dict[str, list[TimingRow]] = {}
    for op in ops:
        for direction in ("forward", "both"):
            of_op = [r for r in fresh if r["op"] == op and r["direction"] == direction]
            if found := _largest(list(timing_rows(of_op))):
                largest.setdefault(op, found)
    shown = [*largest][:SUMMARY_ROWS]
    missing = [op for op in ops if op not in largest]
    note = f"Not shown, for lack of fresh records: {', '.join(missing)}." if missing else ""
    return _cases([row for op in shown for row in largest[op]], [r for r in fresh if r["op"] in shown], note)


def _largest(rows: Sequence[TimingRow]) -> list[TimingRow]:
    """Return the rows of each op's case with the most bytes, of those that one of our kernels was timed on."""
    most: dict[str, TimingRow] = {}
    for row in rows:
        if row.us and not row.is_baseline and (row.op not in most or row.cost.bytes > most[row.op].cost.bytes):
            most[row.op] = row
    return [row for row in rows if row.op in most and _key(row) == _key(most[row.op])]


def _key(row: TimingRow) -> tuple[str, str, str]:
    return row.case, row.dtype, row.direction


def _cases(rows: Sequence[TimingRow], records: Records, more: str = "") -> str:
    """Render one row per case: the baselines, the public function (or, without one, our fastest kernel), speedup."""
    columns = ("op", "case", ">eager (us)", ">compile (us)", ">other (us)", ">Tilewright (us)", ">% of ceiling")
    lines: list[Sequence[str]] = []
    shown: list[TimingRow] = []
    has_directions = len({row.direction for row in rows}) > 1
    for (op, direction, case), group in groupby(rows, key=lambda row: (row.op, row.direction, _case(row))):
        by_time = list(group)
        ours = [row for row in by_time if row.us and not row.is_baseline]
        if not ours:
            continue
        best = next((row for row in ours if row.kernel == source.PUBLIC), ours[0])
        baselines = [row for row in by_time if row.is_baseline]
        timed = [row for row in baselines if row.us]
        chosen = [_first(baselines, kernel) for kernel in ("eager", "compile", "")]
        named = zip(("eager", "compile", "other", source.PUBLIC), (*chosen, best), strict=True)
        notes = [f"{column}: {row.kernel}" for column, row in named if row and row.kernel != column]
        notes += ["runs torch"] * best.runs_torch
        notes += ["tie"] * bool(timed and best.place == timed[0].place == "ties")
        speedup = f"{(timed[0].us or 0) / (best.us or 1):.2f}" if timed else ""
        cells = [_us(row) for row in (*chosen, best)]
        label = op_label(op, direction if has_directions else "forward")
        lines.append((label, case, *cells, percent(best.share), speedup, ", ".join(notes)))
        shown += [*(row for row in chosen if row), best]
    note = "" if {row.dtype for row in shown} == {DEFAULT_DTYPE} else f"; {DEFAULT_DTYPE} unless a case says otherwise"
    return _with_notes(table((*columns, ">speedup", "notes"), lines), shown, records, note, more)


def _first(baselines: Sequence[TimingRow], prefix: str) -> TimingRow | None:
    """Return the fastest baseline of a prefix, or one without a time; without a prefix, of another library."""
    torch = ("eager", "manual", "compile")
    found = (r for r in baselines if (r.kernel.startswith(prefix) if prefix else not r.kernel.startswith(torch)))
    return next(found, None)


def _with_notes(tables: str, shown: Sequence[TimingRow], records: Records, note: str = "", more: str = "") -> str:
    """Append below a table what its marks mean, why a kernel has no time, and where it was measured."""
    notes = [STALE_NOTE] * any(row.us and row.is_stale for row in shown)
    notes += [EARLIER_TIMER_NOTE] * any(row.us and not row.interval_us for row in shown)
    notes += dict.fromkeys(
        f"Not timed: {row.kernel} on {op_label(row.op, row.direction)}, because "
        f"{WHY_UNTIMED.get(row.verdict, f'its verdict is {row.verdict}')}: {row.reason}."
        for row in shown
        if not row.us
    )
    notes += [more] * bool(more)
    where = provenance("Measured on", records, "torch", "triton", note=note)
    return "\n\n".join([tables, *(["  \n".join(notes)] if notes else []), "  \n".join(where)]) + "\n"


def _sizes(records: Records) -> str:
    """Render one row per op, direction and size: torch's times, the public function's, and how they compare."""
    columns = ("op", "case", ">MB", ">eager (us)", ">compile (us)", ">Tilewright (us)", ">time / best of torch")
    lines, shown = [], []
    together = groupby(timing_rows(records, sized=True), key=lambda row: (row.op, row.direction, row.case, row.dtype))
    for (op, direction, case, _), group in together:
        timed = {row.kernel: row for row in group if row.us}
        ours, eager = timed.get(source.PUBLIC), timed.get("eager")
        baselines = [row.us for row in timed.values() if row.is_baseline and row.us]
        if ours is None or not ours.us or eager is None or not baselines:
            continue
        host = f"{ours.host_us / eager.host_us:.2f}" if ours.host_us and eager.host_us else ""
        cells = [_us(timed.get(name)) for name in ("eager", "compile", source.PUBLIC)]
        ratio = f"{ours.us / min(baselines):.2f}"
        megabytes = digits(ours.cost.bytes / 1e6)
        lines.append((op_label(op, direction), case, megabytes, *cells, ratio, host, "runs torch" * ours.runs_torch))
        shown += timed.values()
    return _with_notes(table((*columns, ">host time / eager", "notes"), lines), shown, records)


def _case(row: TimingRow) -> str:
    return row.case + ("" if row.dtype == DEFAULT_DTYPE else f" {row.dtype}")


def _us(row: TimingRow | None) -> str:
    """Return the time with its marks, or the verdict of a kernel that has none."""
    if row is None:
        return ""
    return digits(row.us) + STALE * row.is_stale + EARLIER_TIMER * (not row.interval_us) if row.us else row.verdict


def _kernels(rows: Sequence[TimingRow], records: Records) -> str:
    """Render one row per case and one column per kernel: a table of times and one of shares of the ceiling."""
    named = dict.fromkeys(row.kernel for row in rows)
    in_order = source.kernels(rows[0].op)
    kernels = [name for name in in_order if name in named] + [name for name in named if name not in in_order]
    times, shares = [], []
    for case, group in groupby(rows, key=_case):
        by_kernel = {row.kernel: row for row in group}
        of_case = [by_kernel.get(kernel) for kernel in kernels]
        times.append((case, *(f"**{_us(row)}**" if row and row.place else _us(row) for row in of_case)))
        shares.append((case, *(percent(row.share) if row else "" for row in of_case)))
    parts = []
    for caption, lines in (("Time (us); the fastest, with ties, in bold", times), ("Share of the ceiling (%)", shares)):
        parts.append(f"{caption}:\n\n{table(('case', *(f'>{kernel}' for kernel in kernels)), lines)}")
    return _with_notes("\n\n".join(parts), rows, records)


def _audits(records: Records) -> str:
    """Render the bytes that `audit` counts beside those that the hardware counted."""
    columns = ("call", ">requested (MB)", ">read (MB)", ">read, ncu (MB)", ">ncu / audit")
    columns += (">written (MB)", ">written, ncu (MB)", ">ncu / audit")
    lines = []
    for r in records:
        arguments = [argument for launch in r["launches"] for argument in launch["arguments"]]
        cells = []
        for name in ("read", "written"):
            expected, counted = sum(argument[f"distinct_{name}"] for argument in arguments), r["counted"][name]
            ratio = f"{counted / expected:.3f}" if expected >= 1e6 else ""
            cells += [f"{expected / 1e6:.1f}", f"{counted / 1e6:.1f}", ratio]
        call = r["call"]
        inputs = call.get("inputs") or [spelled(call["case"]), call["dtype"]]
        name = f"`{call['file']}`" if "file" in call else f"{call['op']}, {call['kernel']}"
        lines.append((f"{name}, {' '.join(inputs)}{_stale(r)}", f"{r['moved'] / 1e6:.1f}", *cells))
    return _experiment(table(columns, lines), records, "Counted on", "triton")


def _bank_conflicts(records: Records) -> str:
    """Render the shared-memory wavefronts per access of a warp: predicted and counted."""
    columns = ("kernel", "case", ">per store, predicted", ">per store, ncu", ">per load, predicted", ">per load, ncu")
    lines = []
    for r in records:
        counted = Counters.from_record(r) or Counters()
        cells = []
        for kind, value in (("store", counted.wavefronts_per_store), ("load", counted.wavefronts_per_load)):
            predicted = r["predicted"].get(kind)
            cells += [f"{predicted[0]:.2f}" if predicted else "", f"{value:.2f}" if value else ""]
        conflicts = (counted.load_conflicts or 0) + (counted.store_conflicts or 0)
        case = f"{spelled(r['case'])} {r['dtype']}"
        lines.append((r["kernel"] + _stale(r), case, *cells, f"{conflicts:,.0f}", digits(counted.us)))
    tables = table((*columns, ">conflicts, ncu", ">time (us)"), lines)
    return _experiment(f"Shared-memory wavefronts:\n\n{tables}", records, "Counted by ncu on", "triton")


def _verdicts(records: Records) -> str:
    """Render one row per kernel: its verdict, how many cases it passed, and remarks."""
    lines = []
    for r in records:
        verdicts = [case["verdict"] for case in r["cases"] if case["verdict"] != "unsupported"]
        notes = [r["reason"]] if r["reason"] else [label for label in r["labels"] if "left out" not in label]
        name = f"`{r['file']}`" if "file" in r else r["kernel"]
        passed = f"{verdicts.count('right')} / {len(verdicts)}"
        lines.append((r["op"], name, r["verdict"] + _stale(r), passed, "; ".join(notes)))
    columns = ("op", "kernel", "verdict", ">cases passed", "notes")
    return _experiment(table(columns, lines), records, "Checked on", "torch", "triton")


def _traps(records: Records) -> str:
    """Render each measuring mistake beside the right way to measure."""
    lines = []
    for r in records:
        wrong, right = (median(r[side]) for side in ("wrong", "right"))
        scale, unit = (r["flops"] / 1e6, "TFLOP/s") if "flops" in r else (r["bytes"] / 1e3, "GB/s")
        low, high = r["interval"]
        rates = f"{digits(scale / wrong)} → {digits(scale / right)} {unit}"
        times = (digits(wrong), digits(right), f"{r['ratio']:.2f}", f"{low:.2f} to {high:.2f}")
        lines.append((r["kernel"] + _stale(r), r["what"], *times, rates))
    columns = ("mistake", "workload", ">wrong way (us)", ">right way (us)", ">right / wrong", ">95 % interval")
    return _experiment(table((*columns, "rate, wrong → right"), lines), records, "Measured on", "torch")


HINTED = {"nothing": "alone", "sum of the result": "then a sum of the result", "matrix product": "then a GEMM"}


def _hints(records: Records) -> str:
    """Render each call, alone and followed by another: loads with an L2 eviction hint and loads without one."""
    followers = list(dict.fromkeys(name for r in records for name in r["us"]))
    heads = [f">{HINTED.get(name, f'then {name}')}, {side} (us)" for name in followers for side in ("hint", "no hint")]
    lines = []
    for r in records:
        cells = [digits(median(r["us"][name][side]), 4) for name in followers for side in ("kept", "plain")]
        lines.append((f"{r['op']} {spelled(r['case'])}{_stale(r)}", *cells))
    return _experiment(table(("call", *heads), lines), records, "Measured on", "torch", "triton")


def _flaws(records: Records) -> str:
    """Render each slow kernel beside its fixed version."""
    lines = []
    for r in records:
        low, high = r["interval"]
        guess = r["predicted_us"]
        predicted = digits(guess["slow"] / guess["mended"]) if guess else ""
        times = [digits(median(r[side])) for side in ("slow", "mended")]
        name = f"[{r['op']}](../{r['file']}){_stale(r)}"
        interval = f"{digits(low)} to {digits(high)}"
        lines.append((name, ", ".join(r["named"]), *times, digits(r["ratio"]), interval, predicted))
    columns = ("flaw", "failed checks", ">slow (us)", ">fixed (us)", ">speedup", ">95 % interval", ">predicted speedup")
    return _experiment(table(columns, lines), records, "Measured on", "triton")


def _loss_curves(records: Records) -> str:
    """Render how far training with our kernels is from training without, and two seeds from each other."""
    lines = []
    for r in records:
        window = r["window"]
        means = {
            name: [[fmean(one[n : n + window]) for n in range(0, len(one), window)] for one in curves]
            for name, curves in r["curves"].items()
        }
        original, ours = means["original"], means[r["kernel"]]
        ends = [", ".join(f"{one[-1]:.3f}" for one in curves) for curves in (original, ours)]
        begin = ", ".join(f"{one[0]:.3f}" for one in original)
        apart = max(_apart(a, b) for a, b in zip(original, ours, strict=True))
        name = f"{r['device']['name']}, {r['dtype']}{_stale(r)}"
        lines.append((name, begin, *ends, f"{apart:.4f}", f"{_apart(*original):.4f}"))
    columns = ("device, dtype", ">loss, first steps", ">last steps, original", ">last steps, Tilewright")
    columns += (">largest difference with and without", ">between the seeds")
    return _experiment(table(columns, lines), records, "Trained on", "torch")


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _stale(r: dict[str, Any]) -> str:
    return STALE * is_stale(r)


def _experiment(tables: str, records: Iterable[dict[str, Any]], verb: str, *libraries: str) -> str:
    notes = [STALE_NOTE, ""] if STALE in tables else []
    return "\n".join([tables, "", *notes, *provenance(verb, records, *libraries)]) + "\n"


OP_BLOCKS = ("bank-conflicts",)  # those whose option is an op
# Which records belong to a block, given its option, and the function that renders them.
BLOCKS: dict[str, tuple[Callable[[dict[str, Any], str], bool], Callable[[Records], str]]] = {
    "audit": (lambda r, _: r["kind"] == "audit" and "counted" in r, _audits),
    "bank-conflicts": (
        lambda r, op: r["kind"] == "counters" and r["op"] == op and bool(r["counters"]),
        _bank_conflicts,
    ),
    "bottlenecks": (
        lambda r, _: r["kind"] == "prediction" or (r["kind"] == "counters" and "case" in r),
        prediction_accuracy.bottlenecks,
    ),
    "flaws": (lambda r, _: r["kind"] == "flaw", _flaws),
    "hints": (lambda r, _: r["kind"] == "hint", _hints),
    "loss-curves": (lambda r, _: r["kind"] == "loss_curve", _loss_curves),
    "portability": (lambda r, _: r["kind"] == "resources", portability.table),
    "predictions": (lambda r, _: r["kind"] == "prediction", prediction_accuracy.predictions),
    "sizes": (lambda r, _: r["kind"] == "timing" and bool(r.get("sized")), _sizes),
    "slower": (lambda r, _: r["kind"] == "timing", regressions.table),
    "submissions": (lambda r, _: r["kind"] == "verdict" and "file" in r, _verdicts),
    "train-steps": (lambda r, _: r["kind"] == TRAIN_STEP, training.markdown),
    "traps": (lambda r, _: r["kind"] == "trap", _traps),
    "verdicts": (lambda r, _: r["kind"] == "verdict" and "file" not in r, _verdicts),
}

"""Tables from records inside Markdown pages, between markers, so that no number is typed by hand.

<!-- records: softmax forward -->
…replaced…
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from tilewright import source
from tilewright.cost import DIRECTIONS, size
from tilewright.counters import Counters
from tilewright.record import is_stale, spelled
from tilewright.report import portability, prediction_accuracy, regressions
from tilewright.report.formatting import provenance
from tilewright.report.timings import TimingRow, timing_rows

USUAL = "bfloat16"  # of which tables say nothing
OF_ALL_OPS = ("summary", "largest")  # every case, or of each op the one with the most work
BLOCK = re.compile(r"(<!-- records: (?P<what>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


class Unfillable(ValueError):
    """A page whose blocks cannot be made: the message says why."""


def fill(page: str, records: list[dict[str, Any]]) -> str:
    """The page with every marked block made anew. A block names an op, `summary` or `largest`, and a direction; or else
    one of PARTS, `banks` with an op."""
    if not BLOCK.search(page):
        raise Unfillable("it has no block of records")

    def block(found: re.Match[str]) -> str:
        name, _, of = found["what"].partition(" ")
        if name in PARTS and bool(of) == (name == "banks"):
            belongs, table = PARTS[name]
            chosen = [r for r in records if belongs(r, of)]
            return found[1] + (table(chosen) if chosen else "No records yet.\n") + found[3]
        if of not in DIRECTIONS or name not in (*OF_ALL_OPS, *source.op_files()):
            raise Unfillable(f"no records are called '{found['what']}'")
        timings = [r for r in records if r["kind"] == "timing" and not r.get("sized")]
        chosen = [r for r in timings if r["direction"] == of and name in (r["op"], *OF_ALL_OPS)]
        gpus = dict.fromkeys(r["device"]["name"] for r in chosen)
        tables = [_table(name, [r for r in chosen if r["device"]["name"] == gpu]) for gpu in gpus]
        return found[1] + "\n".join(tables or ["No records yet.\n"]) + found[3]

    return BLOCK.sub(block, page)


def _table(what: str, records: list[dict[str, Any]]) -> str:
    found = list(timing_rows(records))
    found = _largest(found) if what == "largest" else found
    return f"{_summary(found) if what in OF_ALL_OPS else _all_kernels(found)}\n\n{_provenance(records)}\n"


def _largest(found: Sequence[TimingRow]) -> list[TimingRow]:
    """Of each op the rows of the case with the most work."""
    most: dict[str, TimingRow] = {}
    for row in found:
        if row.op not in most or row.cost.bytes > most[row.op].cost.bytes:
            most[row.op] = row
    return [row for row in found if (row.case, row.dtype) == (most[row.op].case, most[row.op].dtype)]


def _summary(found: Sequence[TimingRow]) -> str:
    """One line a case: what one could use otherwise, what a user's call takes (or, if there is none, the fastest of
    ours), its share of the ceiling, and who wins."""
    lines = ["| op | case | eager | compile | other | ours | | of ceiling | vs best other |"]
    lines.append("|---|---|--:|--:|--:|--:|---|--:|--:|")
    for (op, case), group in groupby(found, key=lambda r: (r.op, _case(r))):
        timed = [row for row in group if row.us]  # fastest first
        ours = [row for row in timed if not row.is_baseline]
        if not ours:
            continue
        best = next((row for row in ours if row.kernel == source.PUBLIC), ours[0])
        others = [row for row in timed if row.is_baseline]
        shown = [
            next((row for row in others if row.kernel == "eager"), None),
            next((row for row in others if row.kernel.startswith("compile")), None),
            next((row for row in others if not row.kernel.startswith(("eager", "manual", "compile"))), None),
        ]
        cells = [_named(row) if row else "" for row in shown]
        against = f"{(others[0].us or 0) / (best.us or 1):.2f}x" if others else ""
        against += ", tie" if others and best.place == others[0].place == "ties" else ""
        lines.append(
            f"| {op} | {case} | {' | '.join(cells)} | {_us(best)} | {best.kernel}{_remarks(best)} | {best.share:.0%} "
            f"| {against} |"
        )
    return "\n".join(lines)


def _sizes(records: list[dict[str, Any]]) -> str:
    """One line an op, direction and size: what torch takes, what a user's call takes, and how the two compare."""
    lines = ["| op | case | tensors | eager | compile | tilewright | of the best | host time, of eager's |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    together = groupby(timing_rows(records, sized=True), key=lambda r: (r.op, r.direction, r.case, r.dtype))
    for (op, direction, case, _), group in together:
        timed = {row.kernel: row for row in group if row.us}
        ours, eager = timed.get(source.PUBLIC), timed.get("eager")
        torchs = [row.us for row in timed.values() if row.is_baseline and row.us]
        if ours is None or not ours.us or eager is None or not torchs:
            continue
        host = f"{ours.host_us / eager.host_us:.2f}" if ours.host_us and eager.host_us else ""
        cells = [_us(timed[name]) if name in timed else "" for name in ("eager", "compile", source.PUBLIC)]
        lines.append(
            f"| {op}{'' if direction == 'forward' else f' {direction}'} | {case} | {size(ours.cost.bytes)} "
            f"| {' | '.join(cells)}{_remarks(ours)} | {ours.us / min(torchs):.2f} | {host} |"
        )
    return "\n".join(lines) + f"\n\n{_provenance(records)}\n"


def _case(row: TimingRow) -> str:
    return row.case + ("" if row.dtype == USUAL else f" {row.dtype}")


def _named(row: TimingRow) -> str:
    return _us(row) + ("" if row.kernel in ("eager", "compile") else f", {row.kernel}") + _remarks(row)


def _remarks(row: TimingRow) -> str:
    """Whose it is, if not ours, and what takes from a time's worth."""
    words = (", by torch" * row.is_torchs, ", earlier timer" * (not row.interval_us), ", stale" * row.is_stale)
    return "".join(words)


def _all_kernels(found: Sequence[TimingRow]) -> str:
    """One line a case, one column a kernel: time and share of the ceiling."""
    timed = dict.fromkeys(row.kernel for row in found)
    in_order = source.kernels(found[0].op)
    kernels = [name for name in in_order if name in timed] + [name for name in timed if name not in in_order]
    lines = [f"| case | {' | '.join(kernels)} |", "|---|" + "--:|" * len(kernels)]
    for case, group in groupby(found, key=_case):
        by_kernel = {row.kernel: row for row in group}
        cells = [_cell(by_kernel.get(kernel)) for kernel in kernels]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: TimingRow | None) -> str:
    if row is None or not row.us or not row.share:
        return ""
    text = f"{_us(row)}, {row.share:.0%}{_remarks(row)}"
    return f"**{text}**" if row.place else text


def _us(row: TimingRow) -> str:
    return f"{row.us:.1f} us"


def _audits(records: Sequence[dict[str, Any]]) -> str:
    """What the audit says of a call beside what the hardware counted, in millions of bytes."""
    lines = ["| call | asked for | read | counted | | written | counted | |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for r in records:
        arguments = [a for launch in r["launches"] for a in launch["arguments"]]
        cells = []
        for said, name in (("distinct_read", "read"), ("distinct_written", "written")):
            expected, counted = sum(a[said] for a in arguments), r["counted"][name]
            near = f"{counted / expected:.3f}x" if expected >= 1e6 else ""
            cells += [f"{expected / 1e6:.1f}", f"{counted / 1e6:.1f}", near]
        called = r["call"]
        what = called.get("inputs") or [spelled(called["case"]), called["dtype"]]
        name = f"`{called['file']}`" if "file" in called else f"{called['op']}, {called['kernel']}"
        stale = ", stale" if is_stale(r) else ""
        lines.append(f"| {name}, {' '.join(what)}{stale} | {r['moved'] / 1e6:.1f} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *provenance("Counted on", records, "triton", end="; in MB.")]) + "\n"


def _banks(records: Sequence[dict[str, Any]]) -> str:
    """Wavefronts of a warp's access to shared memory: those predicted beside those counted."""
    lines = ["| kernel | case | store, predicted | counted | load, predicted | counted | conflicts, counted | time |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    for r in records:
        counted = Counters.of_record(r) or Counters()
        made = {"store": counted.wavefronts_a_store, "load": counted.wavefronts_a_load}
        cells = []
        for kind, value in made.items():
            predicted = r["predicted"].get(kind)
            cells += [f"{predicted[0]:.2f}" if predicted else "", f"{value:.2f}" if value else ""]
        conflicts = (counted.load_conflicts or 0) + (counted.store_conflicts or 0)
        stale = ", stale" if is_stale(r) else ""
        lines.append(
            f"| {r['kernel']}{stale} | {spelled(r['case'])} {r['dtype']} | {' | '.join(cells)} | {conflicts:,.0f} "
            f"| {counted.us or 0:.1f} us |"
        )
    return "\n".join([*lines, "", *provenance("Counted by ncu on", records, "triton")]) + "\n"


def _verdicts(records: Sequence[dict[str, Any]]) -> str:
    """One line a kernel: its verdict, the cases behind it, and what is said of it."""
    lines = ["| op | kernel | verdict | right of asked | |", "|---|---|---|--:|---|"]
    for r in records:
        asked = [case["verdict"] for case in r["cases"] if case["verdict"] != "unsupported"]
        said = [r["reason"]] if r["reason"] else [label for label in r["labels"] if "left out" not in label]
        name = f"`{r['file']}`" if "file" in r else r["kernel"]
        verdict = r["verdict"] + (", stale" if is_stale(r) else "")
        lines.append(f"| {r['op']} | {name} | {verdict} | {asked.count('right')} / {len(asked)} | {'; '.join(said)} |")
    return "\n".join([*lines, "", *provenance("Checked on", records, "torch", "triton")]) + "\n"


def _traps(records: Sequence[dict[str, Any]]) -> str:
    """Each way to measure wrongly beside the right way."""
    lines = ["| trap | what is timed | the wrong way | the right way | right / wrong, 95 % |", "|---|---|--:|--:|--:|"]
    for r in records:
        ways = []
        for samples in (r["wrong"], r["right"]):
            us = median(samples)
            rate = f"{r['flops'] / us / 1e6:.0f} TFLOP/s" if "flops" in r else f"{r['bytes'] / us / 1e3:.0f} GB/s"
            ways.append(f"{us:.1f} us, {rate}")
        low, high = r["interval"]
        stale = ", stale" if is_stale(r) else ""
        lines.append(
            f"| {r['kernel']}{stale} | {r['what']} | {' | '.join(ways)} | {r['ratio']:.2f}, {low:.2f} to {high:.2f} |"
        )
    return "\n".join([*lines, "", *provenance("Measured on", records, "torch")]) + "\n"


def _hints(records: Sequence[dict[str, Any]]) -> str:
    """Each call, alone and with what runs next: loads whose lines stay in the L2 beside loads without that hint."""
    nexts = list(dict.fromkeys(what for r in records for what in r["us"]))
    lines = [f"| call, then | {' | '.join(nexts)} |", "|---" + "|--:" * len(nexts) + "|"]
    for r in records:
        pairs = [[median(r["us"][what][side]) for side in ("kept", "plain")] for what in nexts]
        cells = [f"{kept:.1f} / {plain:.1f} us" for kept, plain in pairs]
        lines.append(f"| {r['op']} {spelled(r['case'])}{', stale' if is_stale(r) else ''} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *provenance("Measured on", records, "torch", "triton")]) + "\n"


def _provenance(records: Sequence[dict[str, Any]]) -> str:
    """Where, when and with what: one line a combination."""
    lines = (provenance("Measured on", [r], "torch", "triton", end=f", {r['dtype']}.") for r in records)
    return "\n".join(dict.fromkeys(line for (line,) in lines))


Records = list[dict[str, Any]]
PARTS: dict[str, tuple[Callable[[dict[str, Any], str], bool], Callable[[Records], str]]] = {  # what belongs, its table
    "audit": (lambda r, _: r["kind"] == "audit" and "counted" in r, _audits),
    "banks": (lambda r, op: r["kind"] == "counters" and r["op"] == op and bool(r["counters"]), _banks),
    "bottlenecks": (
        lambda r, _: r["kind"] == "prediction" or (r["kind"] == "counters" and "case" in r),
        prediction_accuracy.bottlenecks,
    ),
    "flaws": (lambda r, _: r["kind"] == "flaw", prediction_accuracy.flaws),
    "hints": (lambda r, _: r["kind"] == "hint", _hints),
    "portability": (lambda r, _: r["kind"] == "resources", portability.table),
    "predictions": (lambda r, _: r["kind"] == "prediction", prediction_accuracy.predictions),
    "sizes": (lambda r, _: r["kind"] == "timing" and bool(r.get("sized")), _sizes),
    "slower": (lambda r, _: r["kind"] == "timing", regressions.table),
    "submissions": (lambda r, _: r["kind"] == "verdict" and "file" in r, _verdicts),
    "traps": (lambda r, _: r["kind"] == "trap", _traps),
    "verdicts": (lambda r, _: r["kind"] == "verdict" and "file" not in r, _verdicts),
}

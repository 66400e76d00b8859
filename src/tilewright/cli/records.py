"""The command `tilewright records`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tilewright import source
from tilewright.cli.options import AsJson, Command
from tilewright.cli.shared import console, newest_records, progress, say_next, table
from tilewright.errors import UnknownOp
from tilewright.record import call_key, is_stale, stale_reason

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.workbench.fingerprints import Comparison

    Record = dict[str, Any]

FIX = "correct this with: tilewright records verify --update"
Gpu = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Only records of this GPU.")]


class ListByDefault(TyperGroup):
    """A group that runs `list` unless another command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_named = args[:1] and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if is_named else ["list", *args])


app = typer.Typer(
    cls=ListByDefault,
    rich_markup_mode=None,
    add_completion=False,
    help="List fresh and stale records, or verify them. `tilewright records [OP]` is `tilewright records list [OP]`.",
)


@app.command("list", cls=Command, short_help="Count fresh and stale records by operation.")
def list_records(
    op: Annotated[
        str | None, typer.Argument(metavar="OP", help="Operation; show its kernels.", show_default="all")
    ] = None,
    gpu: Gpu = None,
    as_json: AsJson = False,
) -> None:
    """Count fresh and stale records by operation, and say why the stale ones are stale.

    A record is fresh if its source hash or its launch fingerprint matches the current code. Only the newest record
    of each call counts.
    """
    with newest_records() as records:
        groups = _group(_select(records, [op] if op else [], gpu))
        if as_json:
            for (name, kernel, kind, on), reasons in groups.items():
                fresh, stale = reasons.pop(None, 0), {str(why): count for why, count in reasons.items()}
                about = {"op": name, "kernel": kernel, "kind": kind, "gpu": on}
                print(json.dumps({**about, "fresh": fresh, "stale": sum(stale.values()), "reasons": stale}))
            return
        console().print(_table(groups, by_kernel=op is not None))
        print(f"\n{_summary(sum(groups.values(), Counter()))}")
        say_next("tilewright records verify" if op else "tilewright records OP for its kernels")


@app.command(cls=Command, short_help="Compare launch fingerprints with the current code.")
def verify(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Operations.", show_default="all")] = None,
    gpu: Gpu = None,
    sample: Annotated[
        int | None, typer.Option(min=1, metavar="INTEGER", help="Verify only this many records, drawn at random.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="INTEGER", help="Seed of the random sample.")] = 0,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Save the fingerprints of the current code in the results folder, and add them to fresh records.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute launch fingerprints and compare them with those of the records. Needs no GPU.

    Exits with 1 if a record that counts as fresh was measured with other launches than those of the current code.
    """
    if update and (sample or ops):
        raise typer.BadParameter("--update needs all records of a GPU; leave out OP and --sample.")
    from tilewright.workbench import fingerprints as tool

    with newest_records() as records:
        chosen = [r for r in _select(records, ops or [], gpu) if _has_fingerprint(r) or (update and not is_stale(r))]
        kernels = {(r["op"], r["kernel"]) for r in chosen}
        with progress("verifying", None if sample else len(kernels)) as advance:
            found = tool.compare(chosen, sample=sample, seed=seed, on_done=advance)
        contradictions = [one for one in found if _has_fingerprint(one.record) and one.contradicts]
        if as_json:
            for one in found:
                print(json.dumps(_as_json(one)))
        else:
            _print_comparison(found, contradictions, is_updating=update)
        if update:
            added, written = tool.update(found)
            if not as_json:
                print(f"Saved the fingerprints of {written} kernels; {added} records got their first one.")
        elif contradictions:
            raise typer.Exit(1)


def _select(records: list[Record], ops: list[str], gpu: str | None) -> list[Record]:
    """Return the records of these operations and this GPU; of all by default."""
    recorded = {r["op"] for r in records}
    for name in ops:
        if name not in recorded and name not in source.op_files():
            raise UnknownOp(name, source.op_files())
    gpus = {r["device"]["gpu"] for r in records if "gpu" in r.get("device", {})}
    if gpu and gpu.lower() not in gpus:
        raise typer.BadParameter(f"--gpu: no records of '{gpu}'; there are records of {', '.join(sorted(gpus))}.")
    return [
        r
        for r in records
        if r["kind"] != "fingerprint"
        and (not ops or r["op"] in ops)
        and (not gpu or r.get("device", {}).get("gpu") == gpu.lower())
    ]


def _has_fingerprint(record: Record) -> bool:
    return "fingerprint" in record


Groups = dict[tuple[str, str, str, str], Counter[str | None]]  # reasons, None if fresh, by op, kernel, kind and GPU


def _group(records: list[Record]) -> Groups:
    groups: Groups = defaultdict(Counter)
    for r in records:
        key = (r["op"], r["kernel"], r["kind"], r.get("device", {}).get("gpu", ""))
        groups[key][stale_reason(r)] += 1
    return dict(sorted(groups.items()))


def _table(groups: Groups, *, by_kernel: bool) -> Table:
    labels = ("op", "kernel", "kind", "gpu") if by_kernel else ("op",)
    rows: dict[tuple[str, ...], Counter[str | None]] = defaultdict(Counter)
    for key, reasons in groups.items():
        rows[key[: len(labels)]] += reasons
    shown = table(*labels, right=("fresh", "stale"), last=("why stale",))
    for key, reasons in rows.items():
        stale = {why: count for why, count in reasons.items() if why}
        why = "; ".join(f"{count}: {why}" if len(stale) > 1 else str(why) for why, count in stale.items())
        shown.add_row(*key, str(reasons[None]), str(sum(stale.values()) or ""), why)
    return shown


def _summary(reasons: Counter[str | None]) -> str:
    stale = {why: count for why, count in reasons.items() if why}
    lines = [f"{reasons[None]} fresh, {sum(stale.values())} stale"]
    lines += [f"  {count:5d}  {why}" for why, count in sorted(stale.items(), key=lambda item: -item[1])]
    return "\n".join(lines)


def _print_comparison(found: list[Comparison], contradictions: list[Comparison], *, is_updating: bool) -> None:
    with_fingerprint = [one for one in found if _has_fingerprint(one.record)]
    changed = [one for one in with_fingerprint if not one.is_same]
    if changed:
        shown = table("op", "kernel", "call", "record", title="Changed launches")
        for one in changed:
            state = "counts as fresh" if one in contradictions else "stale"
            shown.add_row(one.record["op"], one.record["kernel"], call_key(one.record), state)
        console().print(shown)
    same = len(with_fingerprint) - len(changed)
    print(f"Compared {len(with_fingerprint)} records: {same} have the same launches, {len(changed)} have others.")
    if is_updating:
        return
    if contradictions:
        print(f"Counted as fresh although their launches differ: {len(contradictions)}; {FIX}")
    if outdated := [one for one in found if one.is_same and "--update" in (stale_reason(one.record) or "")]:
        print(f"Counted as stale although their launches are the same: {len(outdated)}; {FIX}")


def _as_json(one: Comparison) -> Record:
    about = {key: one.record[key] for key in ("op", "kernel", "kind", "date")} | {"call": call_key(one.record)}
    has_fingerprint = _has_fingerprint(one.record)
    result = {"same": one.is_same if has_fingerprint else None, "contradicts": has_fingerprint and one.contradicts}
    return {**about, "gpu": one.record["device"]["gpu"], **result}

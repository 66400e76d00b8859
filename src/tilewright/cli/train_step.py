"""The command `tilewright train-step`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import settings
from tilewright.cli.options import AsJson, Fresh, RecordFile
from tilewright.cli.shared import (
    console,
    measure_ceilings,
    progress,
    read_records,
    require_choice,
    require_outputs,
    table,
    warn,
)

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.hardware import GPU
    from tilewright.report.training import Rows
    from tilewright.workbench.train.work import Step
    from tilewright.workbench.train.workloads import Workload

DEFAULT_GPU = "h200"
Record = dict[str, Any]


def train_step(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="llama-1b, qwen2-0.5b, gpt2, gpt2-large, bert, bert-large, tiny, or MODULE:FACTORY, a function that "
            "returns (model, batch).",
        ),
    ] = "llama-1b",
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            "-v",
            metavar="NAME",
            help="eager, compile, liger, ours, ours-8bit or ours-graphs. Repeatable. [default: the first four]",
        ),
    ] = None,
    graphs: Annotated[bool, typer.Option("--graphs", help="Also measure ours-graphs, with CUDA graphs.")] = False,
    batch: Annotated[int | None, typer.Option(min=1, metavar="INTEGER", help="Sequences per step.")] = None,
    length: Annotated[int | None, typer.Option(min=2, metavar="INTEGER", help="Tokens per sequence.")] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", "-d", metavar="DTYPE", help="Dtype of the weights: bfloat16, float16 or float32.")
    ] = "bfloat16",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in backward (gradient checkpointing).")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, metavar="INTEGER", help="Rounds, each in random order.")] = 5,
    steps: Annotated[int, typer.Option(min=1, metavar="INTEGER", help="Steps per variant and round.")] = 5,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cuda or cpu. [default: cuda if there is a GPU]")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="Predict the step on this GPU instead of measuring it.")
    ] = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
    record: RecordFile = None,
) -> None:
    """Measure a training step: tokens per second, MFU, memory, where the time goes, and what limits it.

    Weights and tokens are random. Without a GPU, show recorded results and a prediction.
    """
    require_choice("--dtype", dtype, ("bfloat16", "float16", "float32"))
    if device is not None:
        require_choice("--device", device, ("cuda", "cpu"))
    require_outputs(record, None)
    from tilewright import hardware
    from tilewright.workbench.train.variants import GRAPHS, VARIANTS, default
    from tilewright.workbench.train.workloads import workload

    sheet = hardware.datasheet(gpu or DEFAULT_GPU)
    for name in variant or ():
        require_choice("--variant", name, VARIANTS)
    wanted: list[str] = [*(variant or default()), *([GRAPHS] if graphs else [])]
    names = tuple(dict.fromkeys(wanted))
    work = workload(model, batch=batch, length=length, dtype=dtype, checkpointing=checkpointing)
    has_gpu = hardware.has_gpu()
    if device == "cuda" and not has_gpu:
        raise typer.BadParameter("--device cuda: this machine has no GPU; --device cpu runs the same steps on the CPU.")
    if gpu is None and (device or has_gpu):
        found = _measure(work, names, device or "cuda", rounds, steps, fresh)
        _show(found, as_json)
        if record:
            from tilewright.record import append

            append(record, found)
        if not any(one.get("median_us") for one in found):
            raise typer.Exit(1)
        return
    if record:
        raise typer.BadParameter("--record: nothing is measured without a GPU; leave it out, or pass --device cpu.")
    _predict(work, sheet, as_json)


def _measure(work: Workload, names: tuple[str, ...], device: str, rounds: int, steps: int, fresh: bool) -> list[Record]:
    from tilewright import hardware
    from tilewright.workbench.train.results import as_record
    from tilewright.workbench.train.rounds import Options, measure
    from tilewright.workbench.train.work import count

    step = count(work)
    ceilings: dict[str, float] = {}
    about: dict[str, Any] = {"gpu": "cpu", "name": "cpu"}
    if device == "cuda":
        from tilewright.timer import Timer

        ceilings, about = measure_ceilings(Timer(), fresh).rates, hardware.current_gpu()
    with progress("training", None) as advance:
        found = measure(work, names, Options(device, rounds, steps), advance)
    return [as_record(work, one, step, ceilings, about) for one in found]


def _predict(work: Workload, sheet: GPU, as_json: bool) -> None:
    from tilewright.workbench.train.work import count

    step, recorded = count(work), _recorded(work)
    if not as_json:
        warn("nothing was measured: recorded results and a prediction at the datasheet's rates")
    if recorded:
        _show(recorded, as_json)
    if isinstance(step, str):
        warn(f"no prediction: {step}")
        return
    predicted = step.predict(sheet.rates())
    if as_json:
        limit = {"matrix_s": predicted.matrix_s, "by_kind_s": predicted.by_kind, "seconds": predicted.seconds}
        about = {"kind": "prediction", "model": work.name, "case": work.case, "dtype": work.dtype, "gpu": sheet.name}
        print(json.dumps({**about, "units": step.units, "unit": step.unit, **limit}))
        return
    console().print(_prediction_table(work, step, sheet))


def _recorded(work: Workload) -> list[Record]:
    """Return the newest records of this job in the results folder."""
    from tilewright.record import TRAIN_STEP, latest
    from tilewright.workbench.train.results import FILE

    files = sorted(Path(settings.results_dir()).glob(f"*/{FILE}"))
    found = [r for file in files for r in read_records(file) if r["kind"] == TRAIN_STEP and r["op"] == work.name]
    return [r for r in latest(found) if r["case"] == work.case and r["dtype"] == work.dtype]


def _show(found: list[Record], as_json: bool) -> None:
    if as_json:
        for one in found:
            print(json.dumps(one))
        return
    from tilewright.report.formatting import STALE, STALE_NOTE
    from tilewright.report.training import jobs

    for job in jobs(found):
        print(f"{job.title}, on {job.gpu}")
        for rows in (job.speeds(), job.memory(), job.times()):
            console().print(_as_table(rows))
            print()
        for one in job.records:
            print(f"{one['kernel']}: {_diagnosis(one)}")
        if any(STALE in row[0] for row in job.speeds().cells):
            print(STALE_NOTE)
    for one in found:
        if one["reason"]:
            warn(f"{one['kernel']} was not measured: {one['reason']}")


def _as_table(rows: Rows) -> Table:
    last = len(rows.columns) - rows.texts
    shown = table(rows.columns[0], right=rows.columns[1:last], last=rows.columns[last:])
    for cells in rows.cells:
        shown.add_row(*cells)
    return shown


def _diagnosis(one: Record) -> str:
    from tilewright.workbench.train.diagnosis import Diagnosis

    return str(Diagnosis(**one["diagnosis"]))


def _prediction_table(work: Workload, step: Step, sheet: GPU) -> Table:
    predicted = step.predict(sheet.rates())
    kinds = sorted(predicted.by_kind, key=lambda kind: -predicted.by_kind[kind])
    title = f"{work}: prediction on {sheet.name}, in ms per step"
    shown = table("if", right=(f"{step.unit}/s", "ms/step", "MFU", *kinds), title=title)
    whole = [f"{predicted.by_kind[kind] * 1e3:.3g}" for kind in kinds]
    for name, seconds, cells in (
        ("each operator is one kernel at its ceiling", predicted.seconds, whole),
        ("GEMM and attention are all there is", predicted.matrix_s, [""] * len(kinds)),
    ):
        if seconds:
            mfu = step.share_of_peak(step.model_flops, seconds, sheet.rates())
            share = "" if mfu is None else f"{mfu:.1%}"
            shown.add_row(name, f"{step.units / seconds:,.0f}", f"{seconds * 1e3:.4g}", share, *cells)
    return shown

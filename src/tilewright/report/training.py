"""Results of `train-step`: speed, memory and time by kind of each variant, as rows that every report shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.record import TRAIN_STEP, is_stale
from tilewright.report.formatting import STALE, STALE_NOTE, digits, provenance, table
from tilewright.workbench.train.kinds import kinds
from tilewright.workbench.train.trace import StepTimes

GB, MS = 1e9, 1e3
MEMORY = ("parameters", "gradients", "optimizer", "activations", "rest", "peak")
IDLE = "idle"
OWN = ":"  # in MODULE:FACTORY, a model whose batches have sizes of their own
Record = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """A table: its columns, the first and the last `texts` of them text, the others numbers; and its cells."""

    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    texts: int = 0


@dataclass(frozen=True)
class TrainingJob:
    """One training step on one GPU: a record per variant."""

    records: Sequence[Record]

    @property
    def gpu(self) -> str:
        device = self.records[0]["device"]
        return device.get("name", device["gpu"])

    @property
    def title(self) -> str:
        """Return "llama-1b 4x4096 tokens bfloat16, 1,240 M parameters"."""
        first = self.records[0]
        case, count = first["case"], first["parameters"]
        sizes = "" if OWN in first["op"] else f" {case['batch']}x{case['length']} tokens"
        checkpointing = " with checkpointing" if case["checkpointing"] else ""
        size = "" if count is None else f", {digits(count / 1e6)} M parameters"
        return f"{first['op']}{sizes} {first['dtype']}{checkpointing}{size}"

    def speeds(self) -> Rows:
        """Return the speed of each variant, its MFU, its memory at the peak, and what limits it."""
        unit = self.records[0]["unit"]
        columns = ("variant", f"{unit}/s", "ms/step", "95 % interval", "speedup", "95 % interval")
        columns += ("MFU", "of datasheet", "HFU", "peak GB", "bottleneck")
        return Rows(columns, [_speed(r) for r in self.records], texts=1)

    def memory(self) -> Rows:
        """Return the memory of each variant by category, in GB."""
        cells = [[_name(r), *(_gigabytes(r["memory"][name]) for name in MEMORY)] for r in self.records]
        return Rows(("memory", *(f"{name} (GB)" for name in MEMORY)), cells)

    def times(self) -> Rows:
        """Return the device time of a step of each variant by kind, in ms, and how long the GPU is idle."""
        of_each = [by_kind(r) for r in self.records]
        names = [name for name in (*kinds(), IDLE) if any(one.get(name) for one in of_each)]
        waits = [digits(r["times"]["wait_us"] / MS) for r in self.records]
        cells = [
            [_name(r), *(digits(one.get(name, 0.0) / MS) for name in names), wait]
            for r, one, wait in zip(self.records, of_each, waits, strict=True)
        ]
        return Rows(("time (ms per step)", *names, "waiting for data"), cells)


def jobs(records: Iterable[Record]) -> list[TrainingJob]:
    """Return the measured training steps of these records, in their order."""
    found: dict[str, list[Record]] = {}
    for r in records:
        if r["kind"] == TRAIN_STEP and r.get("median_us"):
            found.setdefault(repr((r["op"], r["case"], r["dtype"], r["device"]["gpu"])), []).append(r)
    return [TrainingJob(of_job) for of_job in found.values()]


def by_kind(r: Record) -> dict[str, float]:
    """Return the microseconds of a step by kind of work, with the time in which the device is idle."""
    times = StepTimes(**r["times"])
    return {**times.by_kind, IDLE: max(0.0, times.wall(r["median_us"]) - times.busy_us)}


def markdown(records: Sequence[Record]) -> str:
    """Render the speeds of every job."""
    parts = []
    for job in jobs(records):
        rows = job.speeds()
        last = len(rows.columns) - rows.texts
        columns = [f"{'>' * (0 < n < last)}{name}" for n, name in enumerate(rows.columns)]
        stale = [STALE_NOTE] if any(map(is_stale, job.records)) else []
        where = provenance("Measured on", job.records, "torch", "triton")
        parts.append("\n\n".join([f"{job.title}:", table(columns, rows.cells), *stale, *where]))
    return "\n\n".join(parts) + "\n"


def _speed(r: Record) -> list[str]:
    against, mfu = r["against"], r["mfu"]
    speedup = ("", "") if against is None else (f"{against['ratio']:.2f}", _interval(against["interval"], 1.0, ".2f"))
    return [
        _name(r),
        f"{r['units'] / r['median_us'] * 1e6:,.0f}",
        digits(r["median_us"] / MS),
        _interval(r["interval_us"], MS, ".4g"),
        *speedup,
        *(_percent(share) for share in (mfu.get("measured"), mfu.get("datasheet"), r["hfu"].get("measured"))),
        _gigabytes(r["memory"]["peak"]),
        r["diagnosis"]["limit"],
    ]


def _name(r: Record) -> str:
    return r["kernel"] + STALE * is_stale(r)


def _interval(bounds: Sequence[float], unit: float, form: str) -> str:
    return f"{bounds[0] / unit:{form}} to {bounds[1] / unit:{form}}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _gigabytes(size: int | None) -> str:
    return "" if size is None else digits(size / GB)

"""The record of a variant's training step: everything that a table shows, and everything it was computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tilewright import hardware, source
from tilewright.record import TRAIN_STEP, TRAINING, stamp
from tilewright.workbench.train.diagnosis import diagnose
from tilewright.workbench.train.kinds import MATRIX
from tilewright.workbench.train.rounds import Measurement
from tilewright.workbench.train.work import Step
from tilewright.workbench.train.workloads import Workload

FILE = "train_step.jsonl"


def as_record(
    work: Workload, one: Measurement, step: Step | str, ceilings: Mapping[str, float], device: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of a measurement. `step` is the work of a step, or why it is not known."""
    about = {"case": work.case, "dtype": one.dtype, "direction": "both", "reason": one.reason}
    where = {"ceilings": dict(ceilings), "device": dict(device), "versions": hardware.versions()}
    made = stamp(TRAIN_STEP, work.name, one.variant, source.tree_hash(TRAINING), **about, **where)
    if not one.samples_us or one.times is None or one.memory is None:
        return made
    sheet = hardware.DATASHEETS.get(str(device.get("gpu")))
    peaks = {"measured": ceilings, "datasheet": sheet.rates() if sheet else {}}
    seconds = one.median_us / 1e6
    shares: dict[str, dict[str, float | None]] = {"mfu": {}, "hfu": {}}
    share_of_peak = None
    if isinstance(step, Step):
        for name, rates in peaks.items():
            shares["mfu"][name] = step.share_of_peak(step.model_flops, seconds, rates)
            shares["hfu"][name] = step.share_of_peak(step.hardware_flops, seconds, rates)
        matrix_us = sum(us for kind, us in one.times.by_kind.items() if kind in MATRIX)
        if matrix_us:
            share_of_peak = step.share_of_peak(step.hardware_flops, matrix_us / 1e6, ceilings)
    return made | {
        "samples_us": one.samples_us,
        "median_us": one.median_us,
        "interval_us": [*one.interval_us],
        "against": one.against,
        "units": one.units,
        "unit": one.unit,
        "parameters": step.parameters if isinstance(step, Step) else None,
        "flops": {"model": step.model_flops, "hardware": step.hardware_flops} if isinstance(step, Step) else step,
        **shares,
        "memory": asdict(one.memory) | {"rest": one.memory.rest},
        "times": asdict(one.times),
        "diagnosis": asdict(diagnose(one.median_us, one.times, share_of_peak)),
    }

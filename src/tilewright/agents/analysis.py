"""Analyses of one kernel: audit, inspect and explain. They load users' files, so those run in a worker's sandbox.

Arguments and results are JSON values, since they cross a process boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright import hardware, registry, settings
from tilewright.agents.answers import (
    AuditAnswer,
    BenchRow,
    ExplainAnswer,
    FailedCheck,
    InspectAnswer,
    KernelResources,
    TensorTraffic,
)
from tilewright.arguments import parse_cases, parse_dtypes
from tilewright.errors import ForwardOnlyFile, NoGradient, NothingAudited, NothingLaunched, UnsuitableCase, as_arguments
from tilewright.record import latest, read
from tilewright.spec import Case, Kernel, Op
from tilewright.workbench import audit as audit_tool
from tilewright.workbench.explain import PREDICTED, Diagnosis, diagnose
from tilewright.workbench.explain.collect import collect_cases
from tilewright.workbench.inspect import CompileFailure, Inspection, inspect_cases
from tilewright.workbench.inspect.fake_gpu import fake_gpu

FIX_FINDINGS = "fix the findings, then call check"
FINDINGS = 8  # shown
FACTS = 4  # shown per failed check


class Selection:
    """A kernel of an operation, and the cases to analyse it on."""

    def __init__(self, problem: str, kernel: str | None, file: str | None, case: str | None, dtype: str | None):
        self.op: Op = registry.load(problem)
        self.file, self._name = Path(file) if file else None, kernel
        dtypes = parse_dtypes(self.op, [dtype] if dtype else None) or [self.op.bench_dtype]
        self.dtype = dtypes[0]
        self.cases = [one.with_dtype(self.dtype) for one in parse_cases(self.op, [case] if case else None) or []]
        self.candidates = self.cases or [one.with_dtype(self.dtype) for one in (*self.op.bench, *self.op.check)]

    def kernel(self) -> Kernel:
        if self.file:
            return registry.load_file(self.file, self.op)
        return registry.pick(self.op, [self._name or ""])[0]

    def traced_kernel(self) -> Kernel:
        """Return the kernel, from a file that may query the GPU when it is imported."""
        with fake_gpu(hardware.datasheet("h200")):
            return self.kernel()


def audit(
    problem: str,
    kernel: str | None = None,
    file: str | None = None,
    case: str | None = None,
    dtype: str | None = None,
    gpu: str = "h200",
) -> dict[str, Any]:
    """Interpret one call and return its memory traffic and faults."""
    hardware.datasheet(gpu)
    selection = Selection(problem, kernel, file, case, dtype)
    chosen = selection.cases[0] if selection.cases else _small_case(selection)
    loaded = selection.kernel()
    if not loaded.fits(*selection.op.make(chosen, "meta")):
        raise UnsuitableCase(loaded.name, f"{chosen} {chosen.dtype}")
    found = audit_tool.audit_kernel(selection.op, loaded, chosen, gpu=gpu)
    if not found.launches:
        raise NothingAudited(loaded.name)
    findings = [str(one) for one in found.findings]
    traffic = [
        TensorTraffic(
            launch=launch.kernel,
            argument=one.name,
            role=found.role(one),
            loaded=one.loaded + one.atomic,
            stored=one.stored + one.atomic,
            reads_per_element=round(one.reads_per_element, 3),
            masked_share=round(one.masked / one.lanes, 3),
        )
        for launch in found.launches
        for one in launch.arguments.values()
        if one.lanes
    ]
    return asdict(
        AuditAnswer(
            title=found.title,
            findings=findings[:FINDINGS],
            summary=found.summary(),
            moved_bytes=found.moved,
            min_bytes=found.min_bytes,
            traffic=traffic,
            next=FIX_FINDINGS if findings else "call explain for the bottleneck on a GPU",
        )
    )


def _small_case(selection: Selection) -> Case:
    return audit_tool.default_case(selection.op).with_dtype(selection.dtype)


def inspect(
    problem: str,
    kernel: str | None = None,
    file: str | None = None,
    case: str | None = None,
    dtype: str | None = None,
    gpu: str = "h200",
    direction: str = "forward",
) -> dict[str, Any]:
    """Compile the launches of one call for a GPU and return their resources."""
    sheet = hardware.datasheet(gpu)
    selection = Selection(problem, kernel, file, case, dtype)
    _require_direction(selection, direction)
    loaded = selection.traced_kernel()
    found = inspect_cases(selection.op, loaded, selection.candidates, sheet, (direction,), only_first=True)
    if not found:
        raise NothingLaunched(loaded.name)
    launches = [_resources(one) for one in found]
    errors = any(one.error for one in launches)
    spills = any(one.spilled_bytes for one in launches)
    advice = "call explain for the bottleneck"
    if errors:
        advice = "fix what does not compile or launch, then call check"
    elif spills:
        advice = "registers are spilled: use smaller blocks or more warps, then inspect again"
    return asdict(InspectAnswer(found[0].title, launches, advice))


def _resources(one: Inspection | CompileFailure) -> KernelResources:
    if isinstance(one, CompileFailure):
        return KernelResources(one.name, one.gpu.name, error=str(one.error))
    used, occupancy = one.resources, one.occupancy
    return KernelResources(
        kernel=one.name,
        gpu=one.gpu.name,
        error=one.launch_error,
        grid=list(one.launch.grid) if one.launch else [],
        threads=one.compiled.threads,
        registers=used.registers,
        spilled_bytes=used.spills,
        shared_bytes=used.shared,
        blocks_per_sm=occupancy.blocks,
        occupancy=round(occupancy.share, 3),
        limiter=occupancy.limiter,
        waves=_rounded(one.waves),
        bytes_per_load=_rounded(one.mix.mean_width("global load", "async copy")),
        bytes_per_store=_rounded(one.mix.mean_width("global store")),
        note=one.launch.note if one.launch else "",
    )


def explain(
    problem: str,
    kernel: str | None = None,
    file: str | None = None,
    case: str | None = None,
    dtype: str | None = None,
    gpu: str = "h200",
    direction: str = "forward",
) -> dict[str, Any]:
    """Diagnose one call for a GPU."""
    selection = Selection(problem, kernel, file, case, dtype)
    _require_direction(selection, direction)
    return asdict(_explanation(_diagnose(selection, selection.traced_kernel(), selection.candidates, gpu, direction)))


def predict(
    problem: str,
    kernel: str | None = None,
    file: str | None = None,
    case: list[str] | None = None,
    dtype: str | None = None,
    gpu: str = "h200",
) -> list[dict[str, Any]]:
    """Return the predicted times of the given cases, or of the bench cases, as rows of a bench."""
    selection = Selection(problem, kernel, file, None, dtype)
    loaded = selection.traced_kernel()
    rows = []
    for one in parse_cases(selection.op, case) or selection.op.bench:
        chosen = one.with_dtype(selection.dtype)
        row = BenchRow(loaded.name, str(chosen), chosen.dtype, source=PREDICTED)
        try:
            found = _diagnose(selection, loaded, [chosen], gpu, "forward")
        except NothingLaunched as error:
            row.reason = as_arguments(error)
        else:
            times = _times(found)
            row.us, row.source = times["us"], times["us_source"]
            row.low_us, row.high_us = times["predicted_low_us"], times["predicted_high_us"]
            row.share_of_ceiling = times["share_of_ceiling"]
            row.reason = "" if row.us is not None else found.call.no_audit_reason
        rows.append(asdict(row))
    return rows


def _diagnose(selection: Selection, kernel: Kernel, cases: Sequence[Case], gpu: str, direction: str) -> Diagnosis:
    """Diagnose the kernel on the first of the cases that it supports."""
    records = list(latest([r for path in settings.record_files() for r in read(path).records]))
    sheet = hardware.datasheet(gpu)
    found = collect_cases(selection.op, kernel, cases, sheet, records, direction, only_first=True)
    if not found:
        raise NothingLaunched(kernel.name)
    return diagnose(found[0])


def _require_direction(selection: Selection, direction: str) -> None:
    if direction == "backward" and selection.op.backward_cost is None:
        raise NoGradient(selection.op.name)
    if direction == "backward" and selection.file:
        raise ForwardOnlyFile(selection.file.name)


def _times(one: Diagnosis) -> dict[str, Any]:
    us, source = one.us or (None, "not available")
    prediction = one.prediction
    return {
        "us": _rounded(us),
        "us_source": source,
        "predicted_low_us": _rounded(prediction and prediction.low),
        "predicted_high_us": _rounded(prediction and prediction.high),
        "floor_us": _rounded(one.floor_us),
        "share_of_ceiling": _rounded(one.share),
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)


def _explanation(one: Diagnosis) -> ExplainAnswer:
    failed = [
        FailedCheck(
            name=check.name,
            evidence=[fact.text for fact in check.facts[:FACTS]],
            line=f"{check.source_line[0]}:{check.source_line[1]}" if check.source_line else "",
            advice=check.advice,
        )
        for check in one.failed
    ]
    bottleneck = one.bottleneck
    advice = [bottleneck.advice] if bottleneck else []
    advice += [check.advice for check in failed]
    return ExplainAnswer(
        title=one.call.title,
        gpu=one.call.gpu.name,
        bottleneck=bottleneck.name if bottleneck else "unknown",
        reason=bottleneck.reason if bottleneck else one.call.no_audit_reason,
        **_times(one),
        failed_checks=failed,
        next=next(filter(None, advice), "no check fails: measure it with bench"),
    )

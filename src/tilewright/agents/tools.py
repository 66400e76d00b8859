"""The workbench as functions for agents. A user's code runs only in the sandbox of a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright import hardware, registry, settings, source
from tilewright.agents import analysis
from tilewright.agents.answers import BenchAnswer, BenchRow, CaseFailure, CheckAnswer
from tilewright.agents.problems import describe, opened
from tilewright.arguments import parse_cases, parse_dtypes
from tilewright.errors import InvalidKernelFile, OneKernelNeeded, OnlyForOperations
from tilewright.spec import Case, Kernel, Op
from tilewright.timer import Timer, timer_for
from tilewright.workbench import bench as bench_tool
from tilewright.workbench.bench import Timing
from tilewright.workbench.bench.ceilings import current
from tilewright.workbench.bench.runner import physical_seconds
from tilewright.workbench.check import Verdict, case_count
from tilewright.workbench.check import check as run_check
from tilewright.workbench.check.problems import Problem as ThirdParty
from tilewright.worker.execute import KernelFailed
from tilewright.worker.parent import Worker

Progress = Callable[[int, "int | None", str], None]
FAILURES = 3  # cases shown
ANALYSIS_SECONDS = 300.0  # for compilers and the interpreter on a loaded machine


def silent(done: int, total: int | None, message: str) -> None:
    """Report no progress."""


def read_problem(problem: str, progress: Progress = silent) -> dict[str, Any]:
    """Return the text of a problem."""
    return asdict(describe(problem))


def check(
    problem: str,
    file: str | None = None,
    kernel: str | None = None,
    case: list[str] | None = None,
    dtype: list[str] | None = None,
    depth: str = "default",
    seed: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Judge a kernel against the float64 reference."""
    _require_one(file, kernel)
    with opened(problem) as (op, loaded):
        if loaded and kernel:
            raise OnlyForOperations("a kernel by name", problem)
        kernels = registry.pick(op, [kernel]) if kernel else []
        files = [Path(file)] if file else []
        device = "cuda" if hardware.has_gpu() else "cpu"
        if loaded:
            loaded.select(case or (), device=device)
        cases, dtypes = (None, None) if loaded else (parse_cases(op, case), parse_dtypes(op, dtype))
        total = case_count(op, kernels, files, cases, dtypes, depth, device, loaded)
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            progress(done, total, f"{done} of {total} cases")

        (verdict,) = run_check(
            op,
            kernels,
            files,
            device=device,
            cases=cases,
            dtypes=dtypes,
            seed=seed,
            depth=depth,
            problem=loaded,
            on_case=advance,
        )
        return asdict(check_answer(verdict, device))


def check_answer(verdict: Verdict, device: str) -> CheckAnswer:
    """Return a verdict in the form for agents: without the cases that passed."""
    failed = [one for one in verdict.cases if one.verdict not in ("right", "unsupported")]
    right = sum(one.verdict == "right" for one in verdict.cases)
    return CheckAnswer(
        problem=verdict.op,
        kernel=verdict.kernel,
        verdict=verdict.verdict,
        is_right=verdict.right,
        reason=verdict.reason,
        cases_right=right,
        cases=len(verdict.cases),
        calls=verdict.calls,
        failures=[
            CaseFailure(one.case, one.dtype, one.verdict, one.reason, list(one.picture)) for one in failed[:FAILURES]
        ],
        labels=verdict.labels,
        isolation=verdict.isolation,
        seed=verdict.seed,
        device=hardware.current_gpu()["name"] if device == "cuda" else "interpreter",
        next="call explain or bench" if verdict.right else "fix the first failure, then check again",
    )


def audit(
    problem: str,
    file: str | None = None,
    kernel: str | None = None,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, Any]:
    """Count the bytes that a call moves, and find invalid accesses."""
    return _analyse("audit", problem, file, kernel, options, progress)


def inspect(
    problem: str,
    file: str | None = None,
    kernel: str | None = None,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, Any]:
    """Compile the launches of a call for a GPU, and return registers, shared memory and occupancy."""
    return _analyse("inspect", problem, file, kernel, options, progress)


def explain(
    problem: str,
    file: str | None = None,
    kernel: str | None = None,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, Any]:
    """Find the bottleneck of a call on a GPU, and the next thing to try."""
    return _analyse("explain", problem, file, kernel, options, progress)


def _analyse(
    tool: str,
    problem: str,
    file: str | None,
    kernel: str | None,
    options: dict[str, Any],
    progress: Progress,
) -> Any:
    """Run a function of `analysis`: on our kernels in this process, on a user's file in the sandbox."""
    _require_one(file, kernel)
    if problem not in source.op_files() and Path(problem).exists():
        raise OnlyForOperations(tool, problem)
    progress(0, None, f"{tool}: {problem}")
    if file is None:
        return getattr(analysis, tool)(problem, kernel=kernel, **options)
    path = Path(file)
    source.require_python_file(path)
    arguments = {"problem": problem, "file": str(path.resolve()), **options}
    with Worker(device="cpu", seconds=ANALYSIS_SECONDS) as worker:
        try:
            return worker.run(f"{analysis.__name__}:{tool}", path, arguments, [settings.results_dir()])
        except KernelFailed as failure:
            raise InvalidKernelFile(str(failure)) from None


def bench(
    problem: str,
    file: str | None = None,
    kernel: str | None = None,
    case: list[str] | None = None,
    dtype: str | None = None,
    gpu: str = "h200",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Time a kernel against eager and compile on this GPU; without one, predict its time on `gpu`."""
    _require_one(file, kernel)
    if not hardware.has_gpu():
        return asdict(_predicted(problem, file, kernel, case, dtype, gpu, progress))
    with opened(problem) as (op, loaded):
        if loaded and kernel:
            raise OnlyForOperations("a kernel by name", problem)
        kernels = registry.pick(op, ["eager", "compile", *([kernel] if kernel else [])])
        dtypes = [op.dtypes[0]] if loaded else parse_dtypes(op, [dtype] if dtype else None) or [op.bench_dtype]
        if loaded:
            loaded.select(case or (), device="cuda")
        chosen = None if loaded else parse_cases(op, case)
        cases = [one.with_dtype(dtypes[0]) for one in chosen or op.bench or op.check]
        return asdict(_measured(op, kernels, [Path(file)] if file else [], cases, progress, loaded))


def _predicted(
    problem: str,
    file: str | None,
    kernel: str | None,
    case: list[str] | None,
    dtype: str | None,
    gpu: str,
    progress: Progress,
) -> BenchAnswer:
    options = {"case": case, "dtype": dtype, "gpu": gpu}
    found = _analyse("predict", problem, file, kernel, options, progress)
    advice = "this machine has no GPU, so nothing was timed: these are predictions; run bench on a GPU, or submit"
    return BenchAnswer(
        problem, hardware.datasheet(gpu).name, is_measured=False, rows=[BenchRow(**row) for row in found], next=advice
    )


def _measured(
    op: Op,
    kernels: list[Kernel],
    files: list[Path],
    cases: list[Case],
    progress: Progress,
    problem: ThirdParty | None = None,
    device: str = "cuda",
) -> BenchAnswer:
    clock, rates, gpu = timer_for(device), {}, device
    limits: dict[str, Any] = {}
    if isinstance(clock, Timer):
        progress(0, None, "measuring the ceilings of this GPU")
        measured, about = current(clock).rates, hardware.current_gpu()
        limits, gpu = {"physical": physical_seconds(measured, about)}, about["name"]
        rates = hardware.rates(measured, about["gpu"])
    total, done = bench_tool.step_count(kernels, files, cases, ("forward",)), 0

    def advance(step: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, step)

    limits |= {"clock": clock, "cases": cases, "device": device, "problem": problem, "on_step": advance}
    timings = bench_tool.bench(op, kernels, files, **limits)
    rows = [_row(timing, rates) for timing in timings]
    return BenchAnswer(op.name, gpu, is_measured=True, rows=rows, next="call explain, or submit")


def _row(timing: Timing, rates: dict[str, float]) -> BenchRow:
    us, floor = timing.median_us, timing.cost.floor(rates)[1] * 1e6
    low, high = timing.interval_us or (None, None)
    return BenchRow(
        kernel=timing.kernel,
        case=",".join(f"{name}={value}" for name, value in timing.case.items()),
        dtype=timing.dtype,
        source="measured",
        us=us,
        low_us=low,
        high_us=high,
        share_of_ceiling=round(floor / us, 3) if us and floor else None,
        speedup=timing.against["ratio"] if timing.against else None,
        reason="" if timing.verdict == "right" else f"{timing.verdict}: {timing.reason}",
    )


def _require_one(file: str | None, kernel: str | None) -> None:
    if (file is None) == (kernel is None):
        raise OneKernelNeeded

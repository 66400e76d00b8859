"""Judge one submission: check it with secret seeds, analyse it, and time it or predict its time.

The submission runs in confined processes only. To take first place it is judged twice from scratch.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright import hardware
from tilewright.arena import problems
from tilewright.arena.analysis import Analyst
from tilewright.arena.board import figures, takes_first_place
from tilewright.arena.problems import Board, Loaded
from tilewright.arena.store import geomean
from tilewright.arena.tables import CHECKING, TIMING
from tilewright.errors import (
    BadProblem,
    CannotWrite,
    GPUUnusable,
    InvalidKernelFile,
    NoGPU,
    TilewrightError,
    first_line,
)

# A right verdict with a label that begins like this does not reach a board.
BLOCKING = ("lower precision", "not deterministic", "not isolated")
REQUIRED_LAYERS = ("landlock filesystem", "seccomp", "seccomp network")
EVIDENCE_CASES = 60  # the result keeps this many of a verdict
SAMPLES = 50
SCRATCH = "tilewright-arena-"  # begins the name of the folder that holds a submission while it is judged
IMPLAUSIBLE = 0.9  # times the minimum by the datasheet; a shorter prediction is refused


# Faults of the machine, for which a submission is not refused.
MACHINE_FAULTS = (GPUUnusable, NoGPU, CannotWrite)


class Killed(Exception):
    """Something outside of the judge killed the submission: Linux when memory ran out, or the submission itself."""


class Refused(Exception):
    """The submission does not reach the board; the message is the reason."""


@dataclass
class Judge:
    """Judges jobs one after the other, and keeps what they share: the device and the analysis server."""

    device: str
    depth: str = "default"
    requires_isolation: bool = True
    analyst: Callable[[dict[str, Any]], dict[str, Any]] = field(default_factory=Analyst)

    def __call__(self, job: Mapping[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
        """Return the result of a job: {"ranked": …, "reason": …} and the evidence. `report` gets each new state."""
        started = time.monotonic()
        result: dict[str, Any] = {"ranked": False, "reason": "", "versions": hardware.versions()}
        result["gpu"] = hardware.current_gpu() if self.device == "cuda" else {}
        result["leader"] = (job.get("leader") or {}).get("id")
        with problems.loaded(job["problem"]) as found, self._folder(job) as (file, leader):
            try:
                self._judge(job, found, file, leader, result, report)
                result["ranked"] = True
            except BadProblem as error:
                result["reason"] = f"the problem cannot be judged: {error.why}"
            except MACHINE_FAULTS:
                raise
            except (Refused, TilewrightError) as error:
                result["reason"] = str(error)
        result["seconds"] = round(time.monotonic() - started, 1)
        return _as_reported(result)

    def _judge(
        self,
        job: Mapping[str, Any],
        found: Loaded,
        file: Path,
        leader: Path | None,
        result: dict[str, Any],
        report: Callable[[str], None],
    ) -> None:
        board = Board.parse(job["board"])
        report(CHECKING)
        self._check(found, file, result)
        report(TIMING)
        request = {"problem": dict(job["problem"]), "file": str(file), "gpu": board.gpu}
        result["analysis"] = self._analysis(request, board)
        result["timing"] = self._time(found, file, leader, board, result)
        if _leads(job, result["timing"]):
            report(CHECKING)
            again: dict[str, Any] = {}
            self._check(found, file, again)
            report(TIMING)
            result["first"] = result["timing"]
            result["timing"] = self._time(found, file, leader, board, result)
            result["confirmed"] = _leads(job, result["timing"])

    def _check(self, found: Loaded, file: Path, result: dict[str, Any]) -> None:
        from tilewright.workbench.check import check
        from tilewright.workbench.check.judge import FALLS_BACK

        try:
            options: dict[str, Any] = {"device": self.device, "depth": self.depth, "problem": found.problem}
            (verdict,) = check(found.op, files=[file], **options)
        except InvalidKernelFile as error:
            raise Refused(f"unusable: {error}") from None
        evidence: dict[str, Any] = verdict.as_json() | {"file": file.name}
        del evidence["seed"]
        evidence["case_count"] = len(evidence["cases"])
        bad = [case for case in evidence["cases"] if case["verdict"] != "right"]
        evidence["cases"] = [*bad, *(case for case in evidence["cases"] if case not in bad)][:EVIDENCE_CASES]
        result["verdict"] = evidence
        if verdict.verdict == "crashed" and "killed by SIGKILL" in verdict.reason:
            raise Killed(f"{verdict.reason}; this machine may lack memory")  # the job is given back
        if verdict.verdict != "right":
            raise Refused(f"{verdict.verdict}: {verdict.reason}")
        # One that falls back in some cases only may be ranked: a kernel may leave sizes that it does not fit to torch.
        blocking = [label for label in verdict.labels if label == FALLS_BACK or label.startswith(BLOCKING)]
        if label := next(iter(blocking), None):
            raise Refused(f"right, but not ranked: {label}")
        missing = [layer for layer in REQUIRED_LAYERS if layer not in verdict.isolation]
        if missing and self.requires_isolation:
            raise Refused(f"not isolated by {', '.join(missing)} on this worker")

    def _analysis(self, request: dict[str, Any], board: Board) -> dict[str, Any]:
        """Return the analysis. A predicted board needs it; on a measured one it is evidence only."""
        if not board.is_predicted and board.gpu not in hardware.DATASHEETS:
            return {"error": f"no datasheet of {board.gpu}"}
        answer = self.analyst(request)
        for case in answer.get("cases", ()):
            if case["findings"]:
                raise Refused(f"invalid access: {case['findings'][0]}")
        return answer

    def _time(
        self, found: Loaded, file: Path, leader: Path | None, board: Board, result: dict[str, Any]
    ) -> dict[str, Any]:
        if not board.is_predicted:
            return measured(found, file, leader, self.device)
        return predicted(found, result["analysis"], board.gpu)

    @contextlib.contextmanager
    def _folder(self, job: Mapping[str, Any]) -> Iterator[tuple[Path, Path | None]]:
        """Write the submission and the leader's code into a folder each: a process sees the folder of its own file."""
        with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as root:
            files: list[Path | None] = []
            for name, one in (("submission", job["submission"]), ("leader", job.get("leader"))):
                if not one or not one.get("code"):
                    files.append(None)
                    continue
                path = Path(root) / name / f"{name}_{one['id']}.py"
                path.parent.mkdir()
                path.write_text(one["code"], encoding="utf-8")
                files.append(path)
            assert files[0]
            yield files[0], files[1]


def predicted(found: Loaded, analysis: Mapping[str, Any], gpu: str) -> dict[str, Any]:
    """Return the predicted times as a timing, with the recorded times of eager and compile on the same GPU."""
    if "error" in analysis:
        raise Refused(f"no time can be predicted: {analysis['error']}")
    rates = hardware.DATASHEETS[gpu].rates()
    rows = []
    for case, answer in zip(found.cases, analysis["cases"], strict=True):
        if answer["us"] is None or answer["other_work"]:
            raise Refused(f"no time can be predicted: {answer['other_work'] or 'its bytes are not known'}")
        floor = found.op.cost(*found.op.make(case, "meta")).floor(rates)[1] * 1e6
        if answer["us"] < IMPLAUSIBLE * floor:
            raise Refused(f"implausible: {answer['us']:.1f} us for {case} is less than the GPU's peak permits")
        row = {"case": str(case), "dtype": case.dtype, "us": answer["us"], "low": answer["low"], "high": answer["high"]}
        row["floor_us"] = answer["floor_us"] or floor or None
        rows.append(row | _recorded_baselines(found.op.name, case, gpu))
    return {"kind": "predicted", "cases": rows, **summary(rows)}


def measured(found: Loaded, file: Path, leader: Path | None, device: str) -> dict[str, Any]:
    """Time the submission interleaved with eager, compile and the leader of the board."""
    from tilewright import registry
    from tilewright.timer import timer_for
    from tilewright.workbench.bench import bench, ceilings, intervals
    from tilewright.workbench.bench.runner import physical_seconds

    clock, rates, physical = timer_for(device), {}, lambda _: 0.0
    if device == "cuda":
        rates = ceilings.current(clock).rates  # type: ignore[arg-type]
        physical = physical_seconds(rates, hardware.current_gpu())
        rates = hardware.rates(rates, hardware.current_gpu()["gpu"])
    kernels = registry.pick(found.op, ["eager", "compile"] if device == "cuda" else ["eager"])
    files = [file, *([leader] if leader else [])]
    timings: dict[str, dict[str, Any]] = {}
    options: dict[str, Any] = {"clock": clock, "cases": found.cases, "samples": SAMPLES, "device": device}
    options |= {"physical": physical, "problem": found.problem, "proven": [one.name for one in files]}
    for timing in bench(found.op, kernels, files, **options):
        timings.setdefault(f"{timing.case}", {})[timing.kernel] = timing
    rows, ratios, failures = [], [], []
    for case in found.cases:
        by_kernel = timings.get(str(dict(case.point)), {})
        mine = by_kernel.get(file.name)
        if mine is None or mine.median_us is None:
            raise Refused(f"{mine.verdict}: {mine.reason}" if mine else f"{case} was not timed")
        floor = mine.cost.floor(rates)[1] * 1e6 or None
        row = {"case": str(case), "dtype": case.dtype, "us": mine.median_us, "floor_us": floor}
        row |= dict(zip(("low", "high"), mine.interval_us, strict=True)) | {"state": mine.state}
        for name in ("eager", "compile"):
            other = by_kernel.get(name)
            row[f"{name}_us"] = other.median_us if other else None
        rows.append(row)
        theirs = by_kernel.get(leader.name) if leader else None
        if theirs is not None and theirs.median_us is not None:
            ratios.append(intervals.of_ratio(mine.samples_us, theirs.samples_us, paired=True))
        elif leader and theirs is not None:
            failures.append(f"{case}: {theirs.verdict}, {theirs.reason}".replace(f"{leader.parent}/", ""))
    timing = {"kind": "measured", "cases": rows, **summary(rows)}
    if leader and len(ratios) == len(rows):
        keys = ("ratio", "low", "high")
        timing["against_leader"] = {key: geomean([one[n] for one in ratios]) for n, key in enumerate(keys)}
    elif leader:
        timing["note"] = f"placed by its own time, since the leader was not timed ({next(iter(failures), 'no answer')})"
    return timing


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the geometric means over the cases; None where a case lacks the figure."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value]
        return geomean(known) if known and len(known) == len(values) else None

    found: dict[str, Any] = {key: geomean([row[key] for row in rows]) for key in ("us", "low", "high")}
    found["share"] = mean([row["floor_us"] and row["floor_us"] / row["us"] for row in rows])
    for name in ("eager", "compile"):
        speeds = [us / row["us"] if (us := row.get(f"{name}_us")) else None for row in rows]
        found[f"over_{name}"] = mean(speeds)
    return found


def _leads(job: Mapping[str, Any], timing: Mapping[str, Any]) -> bool:
    """Return whether a timing would take first place."""
    problem, leader = job["problem"], job.get("leader")
    return takes_first_place(figures(timing, problem["threshold"], leader), leader, problem["rule"])


def _recorded_baselines(op: str, case: Any, gpu: str) -> dict[str, float | None]:
    """Return the recorded times of eager and compile on this GPU."""
    from tilewright import record, settings

    wanted = {"kind": "timing", "op": op, "case": dict(case.point), "dtype": case.dtype, "direction": "forward"}
    found: dict[str, float | None] = {"eager_us": None, "compile_us": None}
    folder = settings.results_dir() / gpu
    for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else ():
        for one in record.read(path).records:
            if all(one.get(key) == value for key, value in wanted.items()) and not one.get("sized"):
                key = f"{one['kernel']}_us"
                if key in found and one["median_us"] and not record.is_stale(one):
                    found[key] = one["median_us"]
    return found


def _as_reported(value: Any) -> Any:
    """Return a result as its author reads it: without the folders of this machine, and None for infinity and NaN.

    JSON has neither of the two numbers.
    """
    if isinstance(value, dict):
        return {key: _as_reported(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_reported(one) for one in value]
    if isinstance(value, str):
        return re.sub(rf"\S*{SCRATCH}\w+/\w+/", "", value).replace("and run the command again", "and submit it again")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_of_machine(error: Exception) -> bool:
    """Return whether any other submission would have failed as well, here and now."""
    from torch import AcceleratorError

    return isinstance(error, (*MACHINE_FAULTS, AcceleratorError))


def serve() -> None:
    """Judge the jobs on the standard input, one JSON line each, and answer with states and a result."""
    from tilewright.worker.process import die_with_parent

    die_with_parent()  # its job goes to another worker, whose times it would disturb
    options = json.loads(sys.argv[1])
    judge = Judge(**options)
    for line in sys.stdin:
        try:
            say = lambda state: print(json.dumps({"state": state}), flush=True)
            answer = {"result": judge(json.loads(line), say)}
        except Exception as error:  # a fault in the judge itself: the job is given back
            answer = {"unable" if _is_of_machine(error) else "fault": first_line(error)}
        print(json.dumps(answer), flush=True)

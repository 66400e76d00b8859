"""Measure the records that are missing or stale in results/ for this GPU, or list the commands that would.

python scripts/records.py plan [GPU]         list the commands; needs no GPU
python scripts/records.py run                run them on this GPU: verdicts, timings, counters, sizes
python scripts/records.py run timings sizes --ops sum,gelu --minutes 25    only these; start no command after 25 minutes
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright import hardware, record, registry, settings, source
from tilewright.errors import TilewrightError
from tilewright.spec import Case, Op
from tilewright.workbench.bench.case_runner import cost_of
from tilewright.worker.memory import OTHERS

BASELINES = ["eager", "compile"]
OUR_LANGUAGES = ("triton", "cuda")
PARALLEL_CHECKS = 10  # a check that runs out of GPU memory is repeated alone
PARALLEL_COMPILES = 12  # with one thread each: starting torch's compile workers takes longer than they save
COMPILE_TIMEOUT = 150  # seconds per operation; some compilations do not terminate
OPS_PER_NCU_RUN = 10  # ncu takes seconds to start, and a failure should not affect all operations
SAMPLES = {"timings": "25", "sizes": "15"}  # per kernel; few, because there are hundreds of cases
STEPS = ("verdicts", "timings", "counters", "sizes")
Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """A command whose records go to `file` in results/, or to one file per operation if it is None."""

    words: tuple[str, ...]
    file: str | None = None

    def __str__(self) -> str:
        return " ".join(("tilewright", *self.words))


def missing(step: str, ops: Sequence[Op], found: Records) -> list[Step]:
    """Return the commands of one step that missing or stale records need."""
    fresh = [r for r in record.latest([*found]) if not record.is_stale(r)]
    return [*{"verdicts": _verdicts, "timings": _timings, "counters": _counters, "sizes": _sizes}[step](ops, fresh)]


def _verdicts(ops: Sequence[Op], fresh: Records) -> Iterator[Step]:
    """Yield checks of kernels without a fresh `right` verdict, or whose cases did not fit beside other processes."""
    right = [r for r in fresh if r["kind"] == "verdict" and r["verdict"] == "right"]
    proven = {(r["op"], r["kernel"]) for r in right if not _lacked_memory(r)}
    for op in ops:
        names = [k.name for k in op.kernels.values() if k.language in OUR_LANGUAGES and (op.name, k.name) not in proven]
        if names:
            yield Step(("check", op.name, *_options("-k", names)), "verdicts.jsonl")


def _timings(ops: Sequence[Op], fresh: Records) -> Iterator[Step]:
    """Yield few commands, because each measures the ceilings first, which takes longer than to time a kernel again.

    Operations of which only the public function is missing, the usual case after a change, have their own command.
    """
    groups: dict[tuple[str, bool, bool], dict[str, list[str]]] = defaultdict(dict)
    for op in ops:
        wanted = [*BASELINES, source.PUBLIC] if op.shipped else [*op.kernels]
        for direction in ["both"] if op.is_one_pass else _directions(op):
            timed = [r for r in fresh if r["kind"] == "timing" and not r.get("sized") and r["direction"] == direction]
            if names := [name for name in wanted if _is_missing(op.benched(), op, name, timed)]:
                groups[direction, op.shipped is not None, names == [source.PUBLIC]][op.name] = names
    for (direction, *_), group in groups.items():
        names = dict.fromkeys(name for names in group.values() for name in names)
        how = ("--direction", direction, "--samples", SAMPLES["timings"])
        yield Step(("bench", ",".join(group), *_options("-k", names), *how))


def _counters(ops: Sequence[Op], fresh: Records) -> Iterator[Step]:
    for direction in ("forward", "backward"):
        counted = [r for r in fresh if r["kind"] == "counters" and r.get("direction") == direction]
        of = [op for op in ops if op.shipped and direction in _directions(op)]
        names = [op.name for op in of if _is_missing(op.benched(op.bench_dtype), op, source.PUBLIC, counted)]
        for n in range(0, len(names), OPS_PER_NCU_RUN):
            some = ",".join(names[n : n + OPS_PER_NCU_RUN])
            yield Step(("profile", some, "-s", "ncu", "--direction", direction), "counters.jsonl")


def _sizes(ops: Sequence[Op], fresh: Records) -> Iterator[Step]:
    timed = [r for r in fresh if r["kind"] == "timing" and r.get("sized")]
    wanted = [*BASELINES, source.PUBLIC]
    for direction in ("forward", "both"):
        growing = [op for op in ops if op.shipped and op.sizes() and op.is_one_pass == (direction == "both")]
        names = [op.name for op in growing if any(_is_missing(op.sizes(), op, name, timed) for name in wanted)]
        if names:
            how = ("--direction", direction, "--samples", SAMPLES["sizes"])
            yield Step(("bench", ",".join(names), "--sizes", *how))


def _directions(op: Op) -> list[str]:
    """Return the directions to time: backward only if it moves bytes, because some gradients are views."""
    moves = any(cost_of(op, case, "backward").bytes for case in op.benched(op.bench_dtype))
    return ["forward", "backward"] if moves else ["forward"]


def _is_missing(cases: Iterable[Case], op: Op, kernel: str, found: Records) -> bool:
    recorded = [(r["case"], r["dtype"]) for r in found if r["op"] == op.name and r["kernel"] == kernel]
    return any((dict(case.point), case.dtype) not in recorded for case in cases)


def _options(flag: str, names: Iterable[str]) -> list[str]:
    return [word for name in names for word in (flag, name)]


def perform(step: Step, folder: Path) -> bool:
    """Run a step, file its records even if it is interrupted, and return whether it succeeded."""
    with tempfile.TemporaryDirectory() as folder_of_run:
        made = Path(folder_of_run) / "made.jsonl"
        command = [sys.executable, "-m", "tilewright", *step.words, "--record", str(made)]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        finally:
            for one in record.read(made).records if made.exists() else []:
                record.append(folder / (step.file or f"{one['op']}.jsonl"), [one])
    print(f"{time.monotonic() - begin:5.0f} s, exit {done.returncode}: {step}", flush=True)
    return done.returncode == 0


def warm(name: str, kind: str) -> None:
    """Fill the cache of torch.compile with what `bench` will compile; runs in its own process."""
    import torch
    import torch._dynamo  # unlimited_recompiles needs it loaded

    from tilewright.worker.execute import flatten, gradients, unlimited_recompiles

    op = registry.load(name)
    compiled = op.kernels["compile"].fn

    def compile(case: Case) -> None:
        args = op.make(case, "cuda")
        with torch.no_grad():
            compiled(*args)
        if op.backward_cost and kind == "timings":
            leaves = [a.requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
            returned = [r for r in flatten(compiled(*leaves)) if r.is_floating_point()]
            wanted = [a for a in leaves if torch.is_tensor(a) and a.requires_grad]
            gradients(returned, wanted, [torch.ones_like(r) for r in returned])

    with unlimited_recompiles():
        for case in op.sizes() if kind == "sizes" else op.benched():
            with contextlib.suppress(torch.cuda.OutOfMemoryError):  # `bench` compiles it then
                compile(case)
            torch.cuda.empty_cache()


def warm_all(kind: str, steps: Sequence[Step]) -> None:
    """Run `warm` for all operations that the steps compile, several at once."""
    compiling = [step for step in steps if kind == "sizes" or "compile" in step.words]
    names = sorted({name for step in compiling for name in step.words[1].split(",")})
    commands = [[sys.executable, __file__, "warm", name, kind] for name in names]

    one_thread = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def is_compiled(command: list[str]) -> bool:
        try:
            return subprocess.run(command, timeout=COMPILE_TIMEOUT, env=one_thread, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    with ThreadPoolExecutor(PARALLEL_COMPILES) as pool:
        for name, succeeded in zip(names, pool.map(is_compiled, commands), strict=True):
            if not succeeded:
                print(f"torch.compile of {name} failed or timed out; `bench` reports the reason", flush=True)


def run(kinds: Sequence[str], ops: Sequence[Op], minutes: float) -> bool:
    """Run the steps; return whether all succeeded within the time."""
    end, succeeded = time.monotonic() + 60 * minutes, True
    folder = settings.results_dir() / hardware.current_gpu()["gpu"]

    def perform_in_time(step: Step) -> bool:
        if time.monotonic() < end:
            return perform(step, folder)
        print(f"skipped, out of time: {step}", flush=True)
        return False

    with ThreadPoolExecutor(1) as aside:
        compiling = [  # beside the checks, which leave cores idle
            aside.submit(warm_all, kind, missing(kind, ops, _found(folder)))
            for kind in kinds
            if kind in ("timings", "sizes")
        ]
        for kind in kinds:
            steps = missing(kind, ops, _found(folder))
            if kind == "verdicts":
                with ThreadPoolExecutor(PARALLEL_CHECKS) as pool:
                    succeeded &= all([*pool.map(perform_in_time, steps)])
                steps = missing(kind, ops, _found(folder))
            for one in compiling if steps else ():  # not beside timings, or checks that need all memory
                one.result()
            succeeded &= all([*map(perform_in_time, steps)])
    return succeeded


def _lacked_memory(verdict: Mapping[str, Any]) -> bool:
    return any(OTHERS in label for label in verdict["labels"])


def _ops(names: str) -> list[Op]:
    """Load the named operations, or all of them."""
    return [registry.load(name) for name in (names.split(",") if names else source.op_files())]


def _found(folder: Path) -> Records:
    return [r for path in sorted(folder.glob("*.jsonl")) for r in record.read(path).records]


def _step(name: str) -> str:
    if name not in STEPS:
        raise argparse.ArgumentTypeError(f"unknown step '{name}'; choose from {', '.join(STEPS)}")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="list the commands for a GPU; needs none")
    planning.add_argument("gpu", nargs="?", default="h200", help="name of a GPU with a datasheet")
    running = commands.add_parser("run", help="run the commands on this GPU")
    running.add_argument("steps", nargs="*", type=_step, help=f"{', '.join(STEPS)} [default: all]")
    running.add_argument("--minutes", type=float, default=float("inf"), help="start no command after this time")
    for command in (planning, running):
        command.add_argument("--ops", default="", help="comma-separated operations [default: all]")
    warming = commands.add_parser("warm", help="internal: fill the cache of torch.compile for one operation")
    warming.add_argument("op")
    warming.add_argument("kind", choices=("timings", "sizes"))
    args = parser.parse_args()
    if args.command == "warm":
        warm(args.op, args.kind)
        return
    try:
        ops = _ops(args.ops)
        gpu = hardware.datasheet(args.gpu).name if args.command == "plan" else None
    except TilewrightError as error:
        parser.error(str(error))
    if gpu:
        found = _found(settings.results_dir() / gpu)
        for kind in STEPS:
            print(kind, *[f"  {step}" for step in missing(kind, ops, found)] or ["  nothing"], sep="\n")
        return
    if not hardware.has_gpu():
        parser.error("no GPU found; `plan` works without one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that the records made so far are filed
    if not run(args.steps or STEPS, ops, args.minutes):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Measure what results/ lacks for a GPU, or has of older code. On another machine: what that would be.

python scripts/records.py plan [GPU]         every step as a command; needs no GPU
python scripts/records.py run                all of it on the GPU in hand: verdicts, timings, counters, sizes
python scripts/records.py run timings sizes --ops sum,gelu --minutes 25    these alone; begins no command after so long
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
from tilewright.workbench.bench.runner import cost_of
from tilewright.worker.memory import OTHERS

BASELINES = ["eager", "compile"]
OWN = ("triton", "cuda")  # languages
CHECKS = 10  # at once; one whose cases found no room is done again, alone
COMPILES = 12  # at once, of one thread each: that torch starts others takes longer than what they would do
PATIENCE = 150  # seconds for torch.compile of an operation; some never end
COUNTED = 10  # operations a run of ncu: it takes seconds to begin, and what fails is not all
SAMPLES = {"timings": "25", "sizes": "15"}  # of each kernel: there are hundreds
STEPS = ("verdicts", "timings", "counters", "sizes")
Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """A command whose records go to a file of results/, or one for each operation."""

    words: tuple[str, ...]
    file: str | None = None

    def __str__(self) -> str:
        return " ".join(("tilewright", *self.words))


def lacking(step: str, ops: Sequence[Op], found: Records) -> list[Step]:
    """The commands of one kind that are needed."""
    fresh = [r for r in record.latest([*found]) if not record.is_stale(r)]
    return [*{"verdicts": _verdicts, "timings": _timings, "counters": _counters, "sizes": _sizes}[step](ops, fresh)]


def _verdicts(ops: Sequence[Op], fresh: Records) -> Iterator[Step]:
    """Also where cases were left out for want of memory, which others may have had."""
    right = [r for r in fresh if r["kind"] == "verdict" and r["verdict"] == "right"]
    proven = {(r["op"], r["kernel"]) for r in right if not _is_cramped(r)}
    for op in ops:
        names = [k.name for k in op.kernels.values() if k.language in OWN and (op.name, k.name) not in proven]
        if names:
            yield Step(("check", op.name, *_options("-k", names)), "verdicts.jsonl")


def _timings(ops: Sequence[Op], fresh: Records) -> Iterator[Step]:
    """Few processes: to measure the ceilings again takes longer than some kernels that are fresh. Where only the public
    function lacks, as after most changes, it alone."""
    groups: dict[tuple[str, bool, bool], dict[str, list[str]]] = defaultdict(dict)
    for op in ops:
        wanted = [*BASELINES, source.PUBLIC] if op.shipped else [*op.kernels]
        for direction in ["both"] if op.is_one_pass else _directions(op):
            timed = [r for r in fresh if r["kind"] == "timing" and not r.get("sized") and r["direction"] == direction]
            if names := [name for name in wanted if _misses(op.benched(), op, name, timed)]:
                groups[direction, op.shipped is not None, names == [source.PUBLIC]][op.name] = names
    for (direction, *_), lacks in groups.items():
        names = dict.fromkeys(name for names in lacks.values() for name in names)
        how = ("--direction", direction, "--samples", SAMPLES["timings"])
        yield Step(("bench", ",".join(lacks), *_options("-k", names), *how))


def _counters(ops: Sequence[Op], fresh: Records) -> Iterator[Step]:
    for direction in ("forward", "backward"):
        counted = [r for r in fresh if r["kind"] == "counters" and r.get("direction") == direction]
        of = [op for op in ops if op.shipped and direction in _directions(op)]
        names = [op.name for op in of if _misses(op.benched(op.bench_dtype), op, source.PUBLIC, counted)]
        for n in range(0, len(names), COUNTED):
            some = ",".join(names[n : n + COUNTED])
            yield Step(("profile", some, "-s", "ncu", "--direction", direction), "counters.jsonl")


def _sizes(ops: Sequence[Op], fresh: Records) -> Iterator[Step]:
    timed = [r for r in fresh if r["kind"] == "timing" and r.get("sized")]
    wanted = [*BASELINES, source.PUBLIC]
    for direction in ("forward", "both"):
        growing = [op for op in ops if op.shipped and op.sizes() and op.is_one_pass == (direction == "both")]
        names = [op.name for op in growing if any(_misses(op.sizes(), op, name, timed) for name in wanted)]
        if names:
            how = ("--direction", direction, "--samples", SAMPLES["sizes"])
            yield Step(("bench", ",".join(names), "--sizes", *how))


def _directions(op: Op) -> list[str]:
    """Backward where it moves anything: some gradients are the incoming one itself, looked at otherwise."""
    moves = any(cost_of(op, case, "backward").bytes for case in op.benched(op.bench_dtype))
    return ["forward", "backward"] if moves else ["forward"]


def _misses(cases: Iterable[Case], op: Op, kernel: str, found: Records) -> bool:
    there = [(r["case"], r["dtype"]) for r in found if r["op"] == op.name and r["kernel"] == kernel]
    return any((dict(case.point), case.dtype) not in there for case in cases)


def _options(flag: str, names: Iterable[str]) -> list[str]:
    return [word for name in names for word in (flag, name)]


def perform(step: Step, folder: Path) -> bool:
    """Run it, and put its records where they belong, also those until an interrupt. Whether it ended well."""
    with tempfile.TemporaryDirectory() as at:
        made = Path(at) / "made.jsonl"
        command = [sys.executable, "-m", "tilewright", *step.words, "--record", str(made)]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        finally:
            for one in record.read(made).records if made.exists() else []:
                record.append(folder / (step.file or f"{one['op']}.jsonl"), [one])
    print(f"{time.monotonic() - begin:5.0f} s, {done.returncode}: {step}", flush=True)
    return done.returncode == 0


def warm(name: str, kind: str) -> None:
    """In a process of its own: have torch.compile keep what `bench` will ask for."""
    import torch
    import torch._dynamo  # which unlimited_recompiles looks for

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
            with contextlib.suppress(torch.cuda.OutOfMemoryError):  # then `bench` compiles it
                compile(case)
            torch.cuda.empty_cache()


def warmed(kind: str, steps: Sequence[Step]) -> None:
    """All operations that are to be compiled, several at once."""
    asked = [step for step in steps if kind == "sizes" or "compile" in step.words]
    names = sorted({name for step in asked for name in step.words[1].split(",")})
    commands = [[sys.executable, __file__, "warm", name, kind] for name in names]

    alone = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def is_compiled(command: list[str]) -> bool:
        try:
            return subprocess.run(command, timeout=PATIENCE, env=alone, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    with ThreadPoolExecutor(COMPILES) as pool:
        for name, is_well in zip(names, pool.map(is_compiled, commands), strict=True):
            if not is_well:
                print(f"torch.compile of {name} failed or took too long; `bench` will say more", flush=True)


def run(kinds: Sequence[str], ops: Sequence[Op], minutes: float) -> bool:
    """Whether all went well, and in time."""
    end, is_well = time.monotonic() + 60 * minutes, True
    folder = settings.results_dir() / hardware.in_hand()["gpu"]

    def done_in_time(step: Step) -> bool:
        if time.monotonic() < end:
            return perform(step, folder)
        print(f"no time left for: {step}", flush=True)
        return False

    with ThreadPoolExecutor(1) as aside:
        compiling = [  # checks leave cores idle, if there are any to do
            aside.submit(warmed, kind, lacking(kind, ops, _found(folder)))
            for kind in kinds
            if kind in ("timings", "sizes")
        ]
        for kind in kinds:
            steps = lacking(kind, ops, _found(folder))
            if kind == "verdicts":
                with ThreadPoolExecutor(CHECKS) as pool:
                    is_well &= all([*pool.map(done_in_time, steps)])
                steps = lacking(kind, ops, _found(folder))
            for one in compiling if steps else ():  # not beside what is timed, or needs all memory
                one.result()
            is_well &= all([*map(done_in_time, steps)])
    return is_well


def _is_cramped(verdict: Mapping[str, Any]) -> bool:
    return any(OTHERS in label for label in verdict["labels"])


def _ops(names: str) -> list[Op]:
    """Those of these names, or all."""
    return [registry.load(name) for name in (names.split(",") if names else source.op_files())]


def _found(folder: Path) -> Records:
    return [r for path in sorted(folder.glob("*.jsonl")) for r in record.read(path).records]


def _step(name: str) -> str:
    if name not in STEPS:
        raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(STEPS)}")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan")
    planning.add_argument("gpu", nargs="?", default="h200")
    running = commands.add_parser("run")
    running.add_argument("steps", nargs="*", type=_step)
    running.add_argument("--minutes", type=float, default=float("inf"))
    for command in (planning, running):
        command.add_argument("--ops", default="", help="names with commas; all unless told")
    warming = commands.add_parser("warm", help="what `run` begins with, for each operation")
    warming.add_argument("op")
    warming.add_argument("kind", choices=("timings", "sizes"))
    asked = parser.parse_args()
    if asked.command == "warm":
        warm(asked.op, asked.kind)
        return
    try:
        ops = _ops(asked.ops)
        gpu = hardware.datasheet(asked.gpu).name if asked.command == "plan" else None
    except TilewrightError as error:
        parser.error(str(error))
    if gpu:
        found = _found(settings.results_dir() / gpu)
        for kind in STEPS:
            print(kind, *[f"  {step}" for step in lacking(kind, ops, found)] or ["  nothing"], sep="\n")
        return
    if not hardware.has_gpu():
        parser.error("this machine has no GPU; `plan` needs none")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what keeps the records made so far
    if not run(asked.steps or STEPS, ops, asked.minutes):
        sys.exit(1)


if __name__ == "__main__":
    main()

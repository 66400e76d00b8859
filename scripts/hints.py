"""What it is worth to a kernel, and to what runs next, that lines it has read stay in the L2. See docs/speed.md.

python scripts/hints.py results/h200/hints.jsonl     appends a record for each call

Two processes take turns on the GPU in hand: one has the package as it is, one a copy of it whose loads carry no hint.
What a call leaves in the cache is there when the next begins, as in a model.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tilewright
from tilewright import hardware, registry, source
from tilewright.record import append, stamp
from tilewright.spec import Case
from tilewright.timer import Clock, Lane, Timer

CALLS = (
    *(("silu", f"N={N}") for N in (2**24, 2**28)),
    ("swiglu", "M=16384,N=14336,packed=False"),
    *(("rms_norm", f"M={M},N={N},weight=same") for M, N in ((32768, 1024), (16384, 8192))),
    ("layer_norm", "M=4096,N=32768,affine=same"),
    *(("softmax", f"M={M},N={N}") for M, N in ((32768, 1024), (16384, 8192), (8192, 32768))),
)
WITHOUT = {".py": ('"evict_last"', '""'), ".cuh": ("L2::evict_last", "L2::evict_normal")}
DTYPE = "bfloat16"
SERVE = "--serve"
SIDE = 4096  # of the square matrices that are multiplied
TURNS, PAIRS = 9, 6
INPUTS = 3  # in turn, so that what is read is not still in the cache


def parsed(name: str, text: str) -> Case:
    return Case.parse(text, registry.load(name).benched(DTYPE)[0]).with_dtype(DTYPE)


def called(name: str, text: str) -> Callable[[], torch.Tensor]:
    op, case = registry.load(name), parsed(name, text)
    assert op.shipped
    fn, inputs = op.shipped.fn, cycle([op.make(case, "cuda", seed) for seed in range(INPUTS)])
    return lambda: fn(*next(inputs))


def paired(clock: Clock, call: Callable[[], torch.Tensor], following: Callable[[torch.Tensor], Any]) -> Lane:
    """A call and what follows it, one such pair after the other."""

    def pair() -> None:
        following(call())

    def before() -> None:
        for _ in range(INPUTS):
            pair()

    return Lane(clock, lambda: [pair] * PAIRS, before)


def pair_us(lane: Lane) -> float:
    taken = lane.sample()
    return taken.us if taken.is_queued else sys.exit("the GPU began before all was queued: is the host busy?")


def served() -> None:
    """Answers to each line, an operation and a case, with microseconds by what runs next."""
    clock = Timer(flush="none")
    a, b = torch.randn(2, SIDE, SIDE, device="cuda", dtype=getattr(torch, DTYPE))
    nexts: dict[str, Callable[[torch.Tensor], Any]] = {
        "nothing": lambda y: None,
        "sum of the result": torch.sum,
        "matrix product": lambda y: a @ b,
    }

    @functools.lru_cache(1)  # what is asked for again in the next turn
    def lanes(name: str, text: str) -> dict[str, Lane]:
        call = called(name, text)
        found = {what: paired(clock, call, following) for what, following in nexts.items()}
        for lane in found.values():
            lane.warm_up()
        return found

    for line in sys.stdin:
        print(json.dumps({what: pair_us(lane) for what, lane in lanes(*line.split()).items()}), flush=True)


def server(package: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    return subprocess.Popen([sys.executable, __file__, SERVE], env=os.environ | {"PYTHONPATH": path}, **pipes)


def asked(one: subprocess.Popen[str], name: str, text: str) -> dict[str, float]:
    assert one.stdin
    assert one.stdout
    print(name, text, file=one.stdin)
    return json.loads(one.stdout.readline() or sys.exit("a process ended; its error is above"))


def without_hints(package: Path, folder: Path) -> Path:
    copy = Path(shutil.copytree(package, folder / package.name))
    for path in (copy / "ops").rglob("*"):
        if path.suffix in WITHOUT:
            path.write_text(path.read_text().replace(*WITHOUT[path.suffix]))
    return copy


def main(record: Path) -> None:
    about = {"device": hardware.in_hand(), "versions": hardware.versions()}
    package = Path(tilewright.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        sides = {"kept": server(package), "plain": server(without_hints(package, Path(folder)))}
        for name, text in CALLS:
            for one in sides.values():
                asked(one, name, text)  # which compiles
            turns = [{side: asked(one, name, text) for side, one in sides.items()} for _ in range(TURNS)]
            taken = {what: {side: [turn[side][what] for turn in turns] for side in sides} for what in turns[0]["kept"]}
            content = {"case": dict(parsed(name, text).point), "dtype": DTYPE, "us": taken}
            code = source.kernel_hash(name, source.PUBLIC) or ""
            append(record, [stamp("hint", name, source.PUBLIC, code, **content, **about)])
            cells = [f"{what} {median(us['kept']):.1f} / {median(us['plain']):.1f}" for what, us in taken.items()]
            print(f"{name} {text}: {', '.join(cells)} us", flush=True)
        for one in sides.values():
            one.communicate()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/hints.py FILE.jsonl")
    if not hardware.has_gpu():
        sys.exit("this machine has no GPU to measure on")
    served() if sys.argv[1] == SERVE else main(Path(sys.argv[1]))

"""Measure L2 eviction hints: the time of a call, and of a kernel after it, with and without them.

python scripts/hints.py results/h200/hints.jsonl     append a record for each call

Two processes alternate on this GPU: one imports the package, the other a copy whose loads have no hint. Between a call
and the next one the L2 is not flushed, as in a model. See docs/lab-notes.md.
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
from tilewright.timer import Clock, Sampler, Timer

CALLS = (
    *(("silu", f"N={N}") for N in (2**24, 2**28)),
    ("swiglu", "M=16384,N=14336,packed=False"),
    *(("rms_norm", f"M={M},N={N},weight=same") for M, N in ((32768, 1024), (16384, 8192))),
    ("layer_norm", "M=4096,N=32768,affine=same"),
    *(("softmax", f"M={M},N={N}") for M, N in ((32768, 1024), (16384, 8192), (8192, 32768))),
)
REPLACED = {".py": ('"evict_last"', '""'), ".cuh": ("L2::evict_last", "L2::evict_normal")}
DTYPE = "bfloat16"
SERVE = "--serve"
GEMM_SIZE = 4096
TURNS, PAIRS = 9, 6
INPUTS = 3  # used in turn, so that the input of a call is no longer in the L2


def parse_case(name: str, text: str) -> Case:
    return Case.parse(text, registry.load(name).benched(DTYPE)[0]).with_dtype(DTYPE)


def make_call(name: str, text: str) -> Callable[[], torch.Tensor]:
    op, case = registry.load(name), parse_case(name, text)
    assert op.shipped
    fn, inputs = op.shipped.fn, cycle([op.make(case, "cuda", seed) for seed in range(INPUTS)])
    return lambda: fn(*next(inputs))


def pair_sampler(clock: Clock, call: Callable[[], torch.Tensor], follower: Callable[[torch.Tensor], Any]) -> Sampler:
    """Return a sampler that times pairs of the call and its follower, back to back."""

    def pair() -> None:
        follower(call())

    def before() -> None:
        for _ in range(INPUTS):
            pair()

    return Sampler(clock, lambda: [pair] * PAIRS, before)


def pair_us(sampler: Sampler) -> float:
    sample = sampler.sample()
    return (
        sample.us if sample.is_queued else sys.exit("the GPU started before all launches were queued; is the CPU busy?")
    )


def serve() -> None:
    """Answer every line of stdin, an operation and a case, with the microseconds per follower."""
    clock = Timer(flush="none")
    a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=getattr(torch, DTYPE))
    followers: dict[str, Callable[[torch.Tensor], Any]] = {
        "nothing": lambda y: None,
        "sum of the result": torch.sum,
        "matrix product": lambda y: a @ b,
    }

    @functools.lru_cache(1)
    def samplers(name: str, text: str) -> dict[str, Sampler]:
        call = make_call(name, text)
        found = {name: pair_sampler(clock, call, follower) for name, follower in followers.items()}
        for sampler in found.values():
            sampler.warm_up()
        return found

    for line in sys.stdin:
        print(json.dumps({name: pair_us(sampler) for name, sampler in samplers(*line.split()).items()}), flush=True)


def start_server(package: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    return subprocess.Popen([sys.executable, __file__, SERVE], env=os.environ | {"PYTHONPATH": path}, **pipes)


def query(one: subprocess.Popen[str], name: str, text: str) -> dict[str, float]:
    assert one.stdin
    assert one.stdout
    print(name, text, file=one.stdin)
    return json.loads(one.stdout.readline() or sys.exit("a process ended; see its error above"))


def without_hints(package: Path, folder: Path) -> Path:
    copy = Path(shutil.copytree(package, folder / package.name))
    for path in copy.rglob("*"):
        if path.suffix in REPLACED:
            path.write_text(path.read_text().replace(*REPLACED[path.suffix]))
    return copy


def main(record: Path) -> None:
    about = {"device": hardware.current_gpu(), "versions": hardware.versions()}
    package = Path(tilewright.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        sides = {"kept": start_server(package), "plain": start_server(without_hints(package, Path(folder)))}
        for name, text in CALLS:
            for one in sides.values():
                query(one, name, text)  # compiles
            turns = [{side: query(one, name, text) for side, one in sides.items()} for _ in range(TURNS)]
            times = {
                follower: {side: [turn[side][follower] for turn in turns] for side in sides}
                for follower in turns[0]["kept"]
            }
            content = {"case": dict(parse_case(name, text).point), "dtype": DTYPE, "us": times}
            code = source.kernel_hash(name, source.PUBLIC) or ""
            append(record, [stamp("hint", name, source.PUBLIC, code, **content, **about)])
            cells = [
                f"{follower} {median(us['kept']):.1f} / {median(us['plain']):.1f}" for follower, us in times.items()
            ]
            print(f"{name} {text}, hint / no hint: {', '.join(cells)} us", flush=True)
        for one in sides.values():
            one.communicate()


if __name__ == "__main__":
    if len(sys.argv) != 2 or (sys.argv[1].startswith("-") and sys.argv[1] != SERVE):
        sys.exit(__doc__)
    if not hardware.has_gpu():
        sys.exit("no GPU found; run this on a machine with one")
    serve() if sys.argv[1] == SERVE else main(Path(sys.argv[1]))

"""Ten slow kernels, each with one flaw, timed beside their mended twins on the GPU in hand. See docs/reading.md.

python scripts/flaws.py results/h200/flaws.jsonl     appends a record for each of examples/flaws
"""

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tilewright import hardware, registry, source
from tilewright.record import append, stamp
from tilewright.runtime.cuda import _core
from tilewright.timer import Timer
from tilewright.workbench.audit.inputs import make
from tilewright.workbench.bench import intervals
from tilewright.workbench.explain import Diagnosis, diagnosed
from tilewright.workbench.explain.evidence import of_cuda_file, of_function

FOLDER = Path("examples/flaws")
SIDES = ("slow", "mended")
SAMPLES = 51
THREADS = 256
ELEMENTS, SIDE, TILE = 2**26, 8192, 32

Calls = dict[str, Callable[[], Tensor]]


def of_python(path: Path) -> Calls:
    args = [make(text, "cuda") for text in registry.load_module(path).INPUTS]
    return {side: partial(registry.launcher(path, side), *args) for side in SIDES}


def of_cuda(path: Path) -> Calls:
    """A `.cu` file does not say how it is to be launched."""
    if path.stem == "divergent":
        x, size = torch.randn(ELEMENTS, device="cuda"), ctypes.c_int64(ELEMENTS)
        grids: dict[str, int] = {"slow": ELEMENTS // THREADS, "mended": ELEMENTS // 2 // THREADS}
    else:
        x, size = torch.randn(SIDE, SIDE, device="cuda"), ctypes.c_int32(SIDE)
        grids = dict.fromkeys(SIDES, (SIDE // TILE) ** 2)
    core, (major, minor) = _core(), torch.cuda.get_device_capability()
    options = core.ProgramOptions(arch=f"sm_{major}{minor}", std="c++17")
    here = core.Device(0)
    here.set_current()
    stream = here.create_stream(torch.cuda.current_stream())
    module = core.Program(path.read_text(), "c++", options).compile("cubin", name_expressions=SIDES)

    def call(side: str) -> Tensor:
        y = torch.empty_like(x)
        config = core.LaunchConfig(grid=grids[side], block=THREADS)
        core.launch(stream, config, module.get_kernel(side), x.data_ptr(), y.data_ptr(), size)
        return y

    return {side: partial(call, side) for side in SIDES}


def diagnoses(path: Path, gpu: hardware.GPU) -> dict[str, Diagnosis]:
    if path.suffix == ".cu":
        return {one.launches[0].name: diagnosed(one) for one in of_cuda_file(path, gpu, THREADS, 0, [])}
    given = registry.load_module(path).INPUTS
    known = [of_function(partial(registry.launcher, path, side), given, side, gpu, []) for side in SIDES]
    return dict(zip(SIDES, map(diagnosed, known), strict=True))


def measured(path: Path, timer: Timer) -> dict[str, Any]:
    calls = of_cuda(path) if path.suffix == ".cu" else of_python(path)
    results = [calls[side]() for side in SIDES]
    torch.testing.assert_close(*results, rtol=0.02, atol=0.1)
    taken = timer.interleave(calls, SAMPLES)
    ratio, *interval = intervals.of_ratio(taken["slow"], taken["mended"], paired=False)
    samples = {side: [round(us, 3) for us in taken[side]] for side in SIDES}
    return samples | {"ratio": round(ratio, 4), "interval": [round(edge, 4) for edge in interval]}


def main(record: Path) -> None:
    about = {"device": hardware.in_hand(), "versions": hardware.versions()}
    gpu, timer = hardware.datasheet(about["device"]["gpu"]), Timer()
    for path in sorted(p for p in FOLDER.iterdir() if p.suffix in (".py", ".cu")):
        said = diagnoses(path, gpu)
        named = [point.name for point in said["slow"].failed]
        times = {side: said[side].prediction for side in SIDES}
        predicted = {side: round(p.us, 3) for side, p in times.items() if p}
        content = {"file": str(path), "named": named, "predicted_us": predicted, **measured(path, timer), **about}
        append(record, [stamp("flaw", path.stem, "mended", source.file_hash(path), **content)])
        slow, mended = (median(content[side]) for side in SIDES)
        print(f"{path.stem:16} {slow:10.1f} us against {mended:8.1f} us: {content['ratio']:.2f}x; {named[0]}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/flaws.py FILE.jsonl")
    if not hardware.has_gpu():
        sys.exit("this machine has no GPU to measure on")
    main(Path(sys.argv[1]))

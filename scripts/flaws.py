"""Time the slow and the fixed version of every kernel in examples/flaws on this GPU. See docs/reading.md.

python scripts/flaws.py results/h200/flaws.jsonl     append a record for each file of examples/flaws
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
from tilewright.workbench.audit.inputs import make_input
from tilewright.workbench.bench import intervals
from tilewright.workbench.explain import Diagnosis, diagnose
from tilewright.workbench.explain.collect import TracedFunction, collect_cuda_file, collect_function

FOLDER = Path("examples/flaws")
VERSIONS = ("slow", "mended")  # function names in the files; "mended" is the fixed version
SAMPLES = 51
THREADS = 256
ELEMENTS, SIDE, TILE = 2**26, 8192, 32

Calls = dict[str, Callable[[], Tensor]]


def python_calls(path: Path) -> Calls:
    args = [make_input(text, "cuda") for text in registry.load_module(path).INPUTS]
    return {version: partial(registry.launcher(path, version), *args) for version in VERSIONS}


def cuda_calls(path: Path) -> Calls:
    """Return the calls of a `.cu` file; grids and inputs are defined here, because the file has none."""
    if path.stem == "divergent":
        x, size = torch.randn(ELEMENTS, device="cuda"), ctypes.c_int64(ELEMENTS)
        grids: dict[str, int] = {"slow": ELEMENTS // THREADS, "mended": ELEMENTS // 2 // THREADS}
    else:
        x, size = torch.randn(SIDE, SIDE, device="cuda"), ctypes.c_int32(SIDE)
        grids = dict.fromkeys(VERSIONS, (SIDE // TILE) ** 2)
    core, (major, minor) = _core(), torch.cuda.get_device_capability()
    options = core.ProgramOptions(arch=f"sm_{major}{minor}", std="c++17")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream(torch.cuda.current_stream())
    module = core.Program(path.read_text(), "c++", options).compile("cubin", name_expressions=VERSIONS)

    def call(version: str) -> Tensor:
        y = torch.empty_like(x)
        config = core.LaunchConfig(grid=grids[version], block=THREADS)
        core.launch(stream, config, module.get_kernel(version), x.data_ptr(), y.data_ptr(), size)
        return y

    return {version: partial(call, version) for version in VERSIONS}


def diagnoses(path: Path, gpu: hardware.GPU) -> dict[str, Diagnosis]:
    if path.suffix == ".cu":
        return {one.launches[0].name: diagnose(one) for one in collect_cuda_file(path, gpu, THREADS, 0, [])}
    given = registry.load_module(path).INPUTS
    calls = [
        collect_function(TracedFunction(partial(registry.launcher, path, version), given), version, gpu, [])
        for version in VERSIONS
    ]
    return dict(zip(VERSIONS, map(diagnose, calls), strict=True))


def measure(path: Path, timer: Timer) -> dict[str, Any]:
    calls = cuda_calls(path) if path.suffix == ".cu" else python_calls(path)
    results = [calls[version]() for version in VERSIONS]
    torch.testing.assert_close(*results, rtol=0.02, atol=0.1)
    times = timer.interleave(calls, SAMPLES)
    ratio, *interval = intervals.of_ratio(times["slow"], times["mended"], paired=False)
    samples = {version: [round(us, 3) for us in times[version]] for version in VERSIONS}
    return samples | {"ratio": round(ratio, 4), "interval": [round(edge, 4) for edge in interval]}


def main(record: Path) -> None:
    about = {"device": hardware.current_gpu(), "versions": hardware.versions()}
    gpu, timer = hardware.datasheet(about["device"]["gpu"]), Timer()
    for path in sorted(p for p in FOLDER.iterdir() if p.suffix in (".py", ".cu")):
        found = diagnoses(path, gpu)
        named = [check.name for check in found["slow"].failed]
        predictions = {version: found[version].prediction for version in VERSIONS}
        predicted = {version: round(p.us, 3) for version, p in predictions.items() if p}
        content = {"file": str(path), "named": named, "predicted_us": predicted, **measure(path, timer), **about}
        append(record, [stamp("flaw", path.stem, "mended", source.file_hash(path), **content)])
        slow, fixed = (median(content[version]) for version in VERSIONS)
        print(f"{path.stem:16} slow {slow:10.1f} us, fixed {fixed:8.1f} us: {content['ratio']:.2f}x; {named[0]}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if not hardware.has_gpu():
        sys.exit("no GPU found; run this on a machine with one")
    main(Path(sys.argv[1]))

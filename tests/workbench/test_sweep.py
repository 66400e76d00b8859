"""The intensity sweep: the number of multiplications, and the point at which the time grows."""

import subprocess
import sys

import pytest
import torch

from tilewright.workbench.bench.sweep import BLOCK, TIMES, Point, bend, multiply, sweep


@pytest.mark.parametrize("k", TIMES)
def test_every_element_is_multiplied_k_times(k, device):
    x = torch.randn(2 * BLOCK, device=device)
    y = torch.empty_like(x)
    multiply(x, y, k)
    assert torch.equal(y, 2 * x if k == 1 else x)


COUNT = """
import re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tilewright.workbench.bench.sweep import BLOCK, UNROLLED, _multiply

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SIGNATURE = {"x_ptr": "*fp32", "y_ptr": "*fp32", "up": "fp32", "down": "fp32"}
SIGNATURE |= dict.fromkeys(("K", "STEP", "BLOCK"), "constexpr")
for k in (1, 64, 512, 1024):
    constants = {"K": k, "STEP": min(k, UNROLLED), "BLOCK": BLOCK}
    made = triton.compile(ASTSource(_multiply, SIGNATURE, constants), target=GPUTarget("cuda", 90, 32))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        sass = subprocess.run([TOOLS / "cuobjdump", "-sass", file.name], capture_output=True, text=True, check=True)
    arithmetic = re.findall(r"\\bF(?:MUL|ADD|FMA)2?\\b", sass.stdout)
    # Code in a loop counts once, and the loop runs `trips` times; shorter loops are unrolled.
    trips = re.search(r"UMOV UR\\d+, 0x([0-9a-f]+)", sass.stdout) if re.search(r"@P0 BRA", sass.stdout) else None
    print(k, *sorted(set(arithmetic)), len(arithmetic) // (BLOCK // 128) * (int(trips[1], 16) if trips else 1))
"""


@pytest.mark.slow
def test_the_compiler_keeps_every_multiplication():
    """The H200 code has k multiplications per element, and no other arithmetic."""
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{k} FMUL {k}" for k in (1, 64, 512, 1024)]


class FakeTimer:
    """A timer that calls each kernel once and returns a fixed time per k."""

    def __init__(self, us):
        self._us = us

    def interleave(self, calls, samples):
        for call in calls.values():
            call()
        return {name: [self._us(int(name))] * samples for name in calls}


def test_a_sweep_has_a_point_for_every_k(device):
    elements = 2 * BLOCK
    points = sweep(FakeTimer(lambda k: max(32.0, k / 2)), 3, elements=elements, device=device)  # type: ignore[arg-type]
    assert [point.k for point in points] == list(TIMES)
    assert all(point.bytes == 8 * elements and point.flops == point.k * elements for point in points)
    assert points[-1] == Point(1024, 512.0, (512.0, 512.0), 8 * elements, 1024 * elements)
    assert bend(points) == 128


def points(*times: float, noise: float = 0.0) -> list[Point]:
    return [Point(2**n, us, (us - noise, us + noise), 8, 2**n) for n, us in enumerate(times)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (points(30, 30, 30, 33, 60, 120), 8),
        (points(31, 30, 30.5, 31, 60, 120), 16),  # below the threshold
        (points(30, 36, 30, 30, 60, 120), 16),  # an outlier
        (points(30, 30, 30, 33, 60, 120, noise=3), 16),  # within the noise
        (points(30, 60, 120), 2),
        (points(30, 30, 30), None),
    ],
)
def test_bend_is_where_the_time_begins_to_grow(found, expected):
    assert bend(found) == expected

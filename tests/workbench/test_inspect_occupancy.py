"""Occupancy, compared with NVIDIA's calculator, and each allocation rule."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
import triton

from tilewright.hardware import DATASHEETS
from tilewright.workbench.inspect.occupancy import occupancy
from tilewright.workbench.inspect.resources import Resources

HERE = Path(__file__).parent
HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"  # has cuda_occupancy.h of the toolkit
BY_ARCH = {gpu.arch: gpu for gpu in DATASHEETS.values() if not gpu.is_amd}


def occupancy_of(name, registers, threads, shared=0):
    return occupancy(DATASHEETS[name], Resources(registers, 0, 0, shared), threads)


def random_points(count: int, seed: int) -> list[tuple[str, int, int, int]]:
    """Draw architecture, registers, threads and shared memory, often near the limits."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        arch = draw.choice(sorted(BY_ARCH))
        most = BY_ARCH[arch].shared_per_block
        threads = draw.choice([32 * draw.randint(1, 33), draw.randint(1, 1024), 2 ** draw.randint(5, 10)])
        shared = draw.choice([0, draw.randint(0, 4096), draw.randint(0, most + 512), most // draw.randint(1, 40)])
        found.append((arch, draw.randint(1, 256), threads, shared))
    return found


def ours(arch: str, registers: int, threads: int, shared: int) -> int:
    return occupancy(BY_ARCH[arch], Resources(registers, 0, 0, shared), threads).blocks


def nvidia_blocks(points, tmp_path) -> list[int]:
    program = tmp_path / "occupancy"
    subprocess.run(["g++", "-O0", f"-I{HEADERS}", HERE / "occupancy.cpp", "-o", program], check=True)
    lines = []
    for arch, registers, threads, shared in points:
        gpu, number = BY_ARCH[arch], int(arch.removeprefix("sm_"))
        numbers = (*divmod(number, 10), gpu.warps_per_sm, gpu.shared_per_sm, gpu.shared_per_block)
        lines.append(" ".join(map(str, (*numbers, registers, threads, shared))))
    done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
    return [*map(int, done.stdout.split())]


@pytest.mark.skipif(not shutil.which("g++") or not HEADERS.exists(), reason="needs g++ and cuda_occupancy.h")
def test_matches_the_calculator_of_nvidia(tmp_path):
    points = random_points(6000, seed=1)
    found = nvidia_blocks(points, tmp_path)
    assert -1 not in found
    assert len(set(found)) > 15, "the points exercise different rules"
    wrong = [(p, theirs, ours(*p)) for p, theirs in zip(points, found, strict=True) if theirs != ours(*p)]
    assert not wrong, wrong[:5]


def test_matches_recorded_results_of_the_calculator():
    lines = (HERE / "occupancy.txt").read_text().splitlines()
    table = [line.split() for line in lines if not line.startswith("#")]
    assert {row[0] for row in table} == set(BY_ARCH)
    for arch, *numbers, blocks in table:
        assert ours(arch, *map(int, numbers)) == int(blocks), (arch, numbers)


@pytest.mark.parametrize(
    ("gpu", "registers", "threads", "shared", "blocks", "limiter"),
    [
        ("h200", 32, 128, 0, 16, ""),
        ("h200", 33, 128, 0, 12, "registers"),  # 40 per thread are allocated
        ("h200", 255, 256, 0, 1, "registers"),
        ("h200", 16, 32, 0, 32, "blocks"),
        ("h200", 16, 32, 8192, 25, "shared"),  # 228 KiB / 9 KiB: 1 KiB per block is reserved
        ("h200", 16, 768, 0, 2, "warps"),
        ("h200", 64, 1024, 232448, 1, "registers and shared"),
        ("h200", 64, 128, 232449, 0, "shared"),
        ("h200", 32, 1056, 0, 0, "warps"),
        ("rtx-4090", 32, 64, 0, 24, ""),
        ("rtx-4090", 32, 1024, 0, 1, "warps"),
        ("a100-80gb", 128, 128, 40960, 4, "registers and shared"),
        ("mi300x", 64, 256, 0, 8, ""),
        ("mi300x", 65, 256, 0, 7, "registers"),  # 72 per lane are allocated
        ("mi300x", 256, 512, 0, 1, "registers"),
        ("mi300x", 64, 256, 16385, 3, "shared"),
        ("mi300x", 64, 256, 65537, 0, "shared"),
        ("mi300x", 16, 64, 0, 32, ""),
        ("mi355x", 64, 256, 65537, 2, "shared"),
        ("mi355x", 64, 256, 81920, 2, "shared"),  # a multiple of 1280 bytes: two fit exactly
        ("mi355x", 64, 256, 81921, 1, "shared"),
    ],
)
def test_each_rule(gpu, registers, threads, shared, blocks, limiter):
    found = occupancy_of(gpu, registers, threads, shared)
    assert (found.blocks, found.limiter) == (blocks, limiter)
    warps = -(-threads // DATASHEETS[gpu].warp)
    assert found.share == pytest.approx(blocks * warps / DATASHEETS[gpu].warps_per_sm)

"""Occupancy against NVIDIA's own calculator and LLVM's, and the rules one by one."""

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
HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"  # the toolkit's cuda_occupancy.h lies there
ONE_OF_EACH = {gpu.arch: gpu for gpu in DATASHEETS.values() if not gpu.is_amd}


def of(name, registers, threads, shared=0):
    return occupancy(DATASHEETS[name], Resources(registers, 0, 0, shared), threads)


def drawn(count: int, seed: int) -> list[tuple[str, int, int, int]]:
    """Architecture, registers, threads and shared memory, near the edges as often as not."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        arch = draw.choice(sorted(ONE_OF_EACH))
        most = ONE_OF_EACH[arch].shared_per_block
        threads = draw.choice([32 * draw.randint(1, 33), draw.randint(1, 1024), 2 ** draw.randint(5, 10)])
        shared = draw.choice([0, draw.randint(0, 4096), draw.randint(0, most + 512), most // draw.randint(1, 40)])
        found.append((arch, draw.randint(1, 256), threads, shared))
    return found


def ours(arch: str, registers: int, threads: int, shared: int) -> int:
    return occupancy(ONE_OF_EACH[arch], Resources(registers, 0, 0, shared), threads).blocks


def by_nvidia(points, tmp_path) -> list[int]:
    program = tmp_path / "occupancy"
    subprocess.run(["g++", "-O0", f"-I{HEADERS}", HERE / "occupancy.cpp", "-o", program], check=True)
    lines = []
    for arch, registers, threads, shared in points:
        gpu, number = ONE_OF_EACH[arch], int(arch.removeprefix("sm_"))
        numbers = (*divmod(number, 10), gpu.warps_per_sm, gpu.shared_per_sm, gpu.shared_per_block)
        lines.append(" ".join(map(str, (*numbers, registers, threads, shared))))
    done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
    return [*map(int, done.stdout.split())]


@pytest.mark.skipif(not shutil.which("g++") or not HEADERS.exists(), reason="needs g++ and cuda_occupancy.h")
def test_the_same_as_nvidias_calculator(tmp_path):
    points = drawn(6000, seed=1)
    found = by_nvidia(points, tmp_path)
    assert -1 not in found
    assert len(set(found)) > 15, "the points tell rules apart"
    wrong = [(p, theirs, ours(*p)) for p, theirs in zip(points, found, strict=True) if theirs != ours(*p)]
    assert not wrong, wrong[:5]


def test_the_same_as_its_kept_answers():
    lines = (HERE / "occupancy.txt").read_text().splitlines()
    table = [line.split() for line in lines if not line.startswith("#")]
    assert {row[0] for row in table} == set(ONE_OF_EACH)
    for arch, *numbers, blocks in table:
        assert ours(arch, *map(int, numbers)) == int(blocks), (arch, numbers)


@pytest.mark.parametrize(
    ("gpu", "registers", "threads", "shared", "blocks", "limiter"),
    [
        ("h200", 32, 128, 0, 16, ""),
        ("h200", 33, 128, 0, 12, "registers"),  # 40 of each thread are given
        ("h200", 255, 256, 0, 1, "registers"),
        ("h200", 16, 32, 0, 32, "blocks"),
        ("h200", 16, 32, 8192, 25, "shared"),  # 228 KiB in parts of 9: 1 KiB of each block is the system's
        ("h200", 16, 768, 0, 2, "warps"),
        ("h200", 64, 1024, 232448, 1, "registers and shared"),
        ("h200", 64, 128, 232449, 0, "shared"),
        ("h200", 32, 1056, 0, 0, "warps"),
        ("rtx-4090", 32, 64, 0, 24, ""),
        ("rtx-4090", 32, 1024, 0, 1, "warps"),
        ("a100-80gb", 128, 128, 40960, 4, "registers and shared"),
        ("mi300x", 64, 256, 0, 8, ""),
        ("mi300x", 65, 256, 0, 7, "registers"),  # 72 of each lane are given
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
    found = of(gpu, registers, threads, shared)
    assert (found.blocks, found.limiter) == (blocks, limiter)
    warps = -(-threads // DATASHEETS[gpu].warp)
    assert found.share == pytest.approx(blocks * warps / DATASHEETS[gpu].warps_per_sm)

"""The advice of `explain`: why accesses are narrow, which lines cost most, and what is waited for."""

import re
from pathlib import Path

import pytest

from tilewright import record, registry, settings
from tilewright.hardware import datasheet
from tilewright.workbench.explain import diagnose
from tilewright.workbench.explain.access_width import narrow_access
from tilewright.workbench.explain.checklist import FAIL, PASS
from tilewright.workbench.explain.collect import TracedFunction, collect_function
from tilewright.workbench.explain.line_costs import line_costs
from tilewright.workbench.explain.prediction import launch_models

MEASURED = record.read(settings.results_dir() / "h200" / "gelu.jsonl").records  # for the ceilings

FILE = """
import torch, triton, triton.language as tl

@triton.jit
def _plain(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    tl.store(y_ptr + row + offs, 2 * tl.load(x_ptr + row + offs, mask=offs < N), mask=offs < N)

@triton.jit
def _rounded(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    N = N // 8 * 8
    row, offs = tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    tl.store(y_ptr + row + offs, 2 * tl.load(x_ptr + row + offs, mask=offs < N), mask=offs < N)

@triton.jit
def _hinted(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    N = tl.multiple_of(N, 8)
    row, offs = tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    tl.store(y_ptr + row + offs, 2 * tl.load(x_ptr + row + offs, mask=offs < N), mask=offs < N)

@triton.jit
def _constant(x_ptr, y_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0).to(tl.int64) * N, tl.arange(0, BLOCK)
    tl.store(y_ptr + row + offs, 2 * tl.load(x_ptr + row + offs, mask=offs < N), mask=offs < N)

@triton.jit
def _flat(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, 2 * tl.load(x_ptr + offs))

@triton.jit
def _heavy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs).to(tl.int32)
    for _ in tl.static_range(60):
        x = (x * 1664525 + 1013904223) ^ (x >> 7)
    tl.store(y_ptr + offs, x + tl.sum(x))

@triton.jit
def _chain(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(0, N, BLOCK):
        total += tl.load(x_ptr + tl.program_id(0).to(tl.int64) * N + n + offs)
    tl.store(y_ptr + tl.program_id(0) * BLOCK + offs, total)

def _by_rows(kernel, x, **options):
    y = torch.empty_like(x)
    kernel[(x.shape[0],)](x, y, x.shape[1], triton.next_power_of_2(x.shape[1]), **options)
    return y

def plain(x):
    return _by_rows(_plain, x)

def rounded(x):
    return _by_rows(_rounded, x)

def hinted(x):
    return _by_rows(_hinted, x)

def constant(x):
    return _by_rows(_constant, x)

def thin(x):
    return _by_rows(_plain, x, num_warps=32)

def unaligned(x):
    y = torch.empty_like(x)
    _flat[(x.numel() // 4096 - 1,)](x[1:], y[1:], 4096)
    return y

def heavy(x):
    y = torch.empty_like(x)
    _heavy[(x.numel() // 1024,)](x, y, 1024)
    return y

def chain(x):
    y = torch.empty(x.shape[0], 128, device=x.device)
    _chain[(x.shape[0],)](x, y, x.shape[1], 128)
    return y
"""


@pytest.fixture(autouse=True)
def interpreter():
    """No interpreter around the tests: `explain` starts its own."""


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    path = tmp_path_factory.mktemp("advice") / "kernels.py"
    path.write_text(FILE)

    def explain(name, *given, gpu="h200"):
        function = TracedFunction(lambda: registry.launcher(path, name), given)
        return diagnose(collect_function(function, name, datasheet(gpu), MEASURED))

    return explain


def coalescing(found):
    return found.checks[0]


@pytest.mark.parametrize("gpu", ["h200", "mi300x"])
def test_rows_of_a_multiple_of_8_but_not_16_elements(explained, gpu):
    found = explained("plain", "20000x3000:bf16", gpu=gpu)
    check = coalescing(found)
    text = "; ".join(fact.text for fact in check.facts)
    assert check.verdict == FAIL
    assert "2 B loads and 2 B stores per thread" in text
    assert "`N` = 3000 is divisible by 8 but not by 16, and Triton specialises on multiples of 16 only" in text
    assert "otherwise 16 B loads" in text
    assert "1.2 to 1.3 times as fast" in text
    assert "begin the kernel with `N = N // 8 * 8`" in check.advice
    assert "tl.load(x_ptr" in Path(check.source_line[0]).read_text().splitlines()[check.source_line[1] - 1]
    assert "the cost of accesses of less than 4 B per thread" in found.prediction.excludes


@pytest.mark.parametrize("name", ["rounded", "constant"])
def test_the_advice_helps(explained, name):
    check = coalescing(explained(name, "20000x3000:bf16"))
    assert check.verdict == PASS
    assert "16 B loads and 16 B stores" in check.facts[0].text


def test_a_hint_on_an_integer_argument_has_no_effect(explained):
    """As the advice says of tl.multiple_of."""
    assert coalescing(explained("hinted", "20000x3000:bf16")).verdict == FAIL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given", "cause"),
    [
        ("plain", "20000x3004:bf16", "`N` = 3004 is divisible by 4 but not by 16"),
        ("plain", "20000x3001:bf16", "`N` = 3001: rows of odd length start at any address"),
        ("unaligned", "8192000:bf16", "`x_ptr` and `y_ptr` do not start on a 16-byte boundary"),
        ("thin", "60000x1024:bf16", "the tile has too few elements for 32 warps"),
    ],
)
def test_other_causes_of_narrow_accesses(explained, name, given, cause):
    found = explained(name, given)
    (model,) = launch_models(found.call)
    assert cause in narrow_access(model).cause
    assert coalescing(found).verdict != PASS


@pytest.mark.parametrize("given", ["20000x3008:bf16", "20000x3000:fp32", "20000x3001:fp32"])
def test_a_word_per_thread_is_wide_enough(explained, given):
    assert coalescing(explained("plain", given)).verdict == PASS


def test_the_lines_with_the_most_instructions_are_named(explained):
    found = explained("heavy", "33554432:int32")
    assert found.bottleneck.name == "instruction issue"
    assert "`x = (x * 1664525 + 1013904223) ^ (x >> 7)` (mostly integer and other)" in found.advice
    assert "compute offsets and masks once" in found.advice.lower()
    (model,) = launch_models(found.call)
    first, *others = line_costs([model])
    assert first.share > 0.5
    assert all("standard.py" not in one.source_line[0] for one in others), (
        "a reduction counts for the line that calls it"
    )


def test_what_is_waited_for_is_named(explained):
    found = explained("chain", "132x131072:fp32")
    assert found.bottleneck.name == "latency"
    assert re.match(r"each block waits \d+ times for global loads \(100% kernels.py:\d+ `", found.advice)
    assert "total += tl.load(" in found.advice
    assert "would saturate DRAM" in found.advice


@pytest.mark.parametrize(
    ("name", "given"),
    [("rounded", "20000x3000:bf16"), ("rounded", "8x3000:bf16"), ("heavy", "1048576:int32"), ("plain", "64x3001:bf16")],
)
def test_explain_never_ends_without_advice(explained, name, given):
    found = explained(name, given)
    assert found.advice or any(check.advice for check in found.failed)

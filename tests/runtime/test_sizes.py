"""Grid and block sizes computed on the host."""

from pathlib import Path

import pytest
import triton

from tilewright import ops, registry
from tilewright.hardware import datasheet
from tilewright.runtime.sizes import (
    FEW_PROGRAMS,
    cdiv,
    next_power_of_2,
    quarter_octave,
    rows_per_program,
    vector_hint,
)
from tilewright.spec import Case
from tilewright.workbench.inspect.launches import kernel_launches


def test_they_equal_tritons_functions():
    for n in (*range(70), 2**20 - 1, 2**20, 2**20 + 1, 2**31 + 5):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert [cdiv(n, by) for by in (1, 3, 128)] == [triton.cdiv(n, by) for by in (1, 3, 128)]


def test_no_op_calls_tritons_slow_functions():
    for path in Path(ops.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert "triton.cdiv" not in text, path.name
        assert "triton.next_power_of_2" not in text, path.name


def test_a_quarter_octave_wastes_at_most_a_fifth():
    for n in range(1, 3000):
        bucket = quarter_octave(n)
        assert n <= bucket <= next_power_of_2(n)
        assert bucket < 1.25 * n or bucket == n
        assert quarter_octave(bucket) == bucket
    assert sorted({quarter_octave(n) for n in range(1025, 2049)}) == [1280, 1536, 1792, 2048]


def test_the_hint_is_what_triton_does_not_see():
    assert [vector_hint(n) for n in (1024, 1000, 1004, 1006, 1001)] == [1, 8, 4, 2, 1]
    assert vector_hint(1000, 1008) == 8
    assert vector_hint(1024, 1000) == 8
    assert vector_hint(1000, 0) == 8


def test_few_rows_are_spread_over_more_programs():
    config = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
    few = int(FEW_PROGRAMS[-1])
    assert rows_per_program(64 * few, config, -1) == 64, "as configured"
    assert rows_per_program(64 * few - 64, config, -1) == 32
    assert rows_per_program(8 * few, config, -1) == 8
    assert rows_per_program(1, config, -1) == 8, "every thread has work"
    assert rows_per_program(1, {"BLOCK_M": 4, "BLOCK_N": 1024, "num_warps": 4}, -1) == 1


@pytest.mark.parametrize(
    ("name", "point", "programs"),
    [("sum", {"M": 2048, "N": 64}, 128), ("add_rms_norm", {"M": 8, "N": 1024, "weight": "same"}, 8)],
)
def test_launches_of_small_inputs(name, point, programs):
    op = registry.load(name)
    case = Case(tuple(point.items()), "bfloat16")
    (launch,) = kernel_launches(op, op.kernels["triton"], case, datasheet("h200"), ("forward",))
    assert launch.programs == programs

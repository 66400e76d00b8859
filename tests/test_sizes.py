"""Sizes on the host are Triton's, without its cost."""

from pathlib import Path

import triton

from tilewright import ops
from tilewright.ops._sizes import cdiv, next_power_of_2


def test_they_are_tritons():
    for n in (*range(70), 2**20 - 1, 2**20, 2**20 + 1, 2**31 + 5):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert [cdiv(n, by) for by in (1, 3, 128)] == [triton.cdiv(n, by) for by in (1, 3, 128)]


def test_no_op_calls_tritons():
    for path in Path(ops.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert "triton.cdiv" not in text, path.name
        assert "triton.next_power_of_2" not in text, path.name

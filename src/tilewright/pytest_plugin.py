"""Pytest fixture that runs a test's Triton launches on CPU tensors, in any project.

    def test_softmax(interpreted):
        x = torch.randn(64, 1000)
        torch.testing.assert_close(my_softmax(x), x.softmax(-1))
        assert interpreted.launches[0].arguments["x_ptr"].reads_per_element == 1

A launch with a fault, such as an out-of-bounds access or a race, fails the test at the call that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tilewright.interpreter import Run


@pytest.fixture
def interpreted() -> Iterator[Run]:
    """Run Triton launches in Tilewright's interpreter; the value records them."""
    from tilewright.interpreter import interpret  # deferred, so that loading the plugin does not import torch

    with interpret() as run:
        yield run

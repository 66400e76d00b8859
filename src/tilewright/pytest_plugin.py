"""For the tests of any project: a fixture that runs a test's Triton launches here, on CPU tensors.

    def test_softmax(interpreted):
        x = torch.randn(64, 1000)
        torch.testing.assert_close(my_softmax(x), x.softmax(-1))
        assert interpreted.launches[0].arguments["x_ptr"].reads_per_element == 1

A launch in which something is wrong, an access out of bounds or a race, fails the test where it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tilewright.interpreter import Run


@pytest.fixture
def interpreted() -> Iterator[Run]:
    """Triton launches run in Tilewright's interpreter; gives what they did."""
    from tilewright.interpreter import interpret  # here, so that other projects' tests start without torch

    with interpret() as run:
        yield run

"""Ignores its input: it draws the input of seed 0 itself and returns the output for that."""

EXPECTED = "wrong"

from tilewright import registry
from tilewright.spec import Case


def softmax(x):
    op = registry.load("softmax")
    case = Case((("M", x.shape[0]), ("N", x.shape[1])), str(x.dtype).removeprefix("torch."))
    return op.reference(*op.make(case, x.device.type, 0))

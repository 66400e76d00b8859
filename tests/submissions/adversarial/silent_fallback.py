"""A Triton kernel that does not compile, in a `try` block that falls back to torch."""

EXPECTED = "right"
LABELS = ["falls back to torch"]

import torch
import triton


@triton.jit
def _softmax(x_ptr, y_ptr):
    this_name_is_not_defined(x_ptr, y_ptr)  # noqa: F821


def softmax(x):
    try:
        y = torch.empty_like(x)
        _softmax[(x.shape[0],)](x, y)
    except Exception:
        return torch.softmax(x, -1)
    return y

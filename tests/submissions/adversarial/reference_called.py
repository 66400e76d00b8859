"""Finds the reference of the operation in its own process and calls it: right, and not a kernel."""

EXPECTED = "right"
LABELS = ["falls back to torch"]

from tilewright import registry


def softmax(x):
    return registry.load("softmax").reference(x)

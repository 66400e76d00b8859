"""Reads from address 0."""

EXPECTED = "crashed"

import ctypes


def softmax(x):
    return ctypes.string_at(0)

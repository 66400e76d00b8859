"""Leaves by sys.exit(0), with a handler at the exit that prints success."""

EXPECTED = "crashed"

import atexit
import sys

atexit.register(print, '{"verdict": "right"}', flush=True)


def softmax(x):
    sys.exit(0)

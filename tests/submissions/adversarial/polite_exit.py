"""Calls sys.exit(0), with an exit handler that prints a forged verdict."""

EXPECTED = "crashed"

import atexit
import sys

atexit.register(print, '{"verdict": "right"}', flush=True)


def softmax(x):
    sys.exit(0)

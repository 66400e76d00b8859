"""Exits its process with code 0, which scripts take for success."""

EXPECTED = "crashed"

import os


def softmax(x):
    os._exit(0)

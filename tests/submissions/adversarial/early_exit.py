"""Ends its process with code 0, which a script takes for success."""

EXPECTED = "crashed"

import os


def softmax(x):
    os._exit(0)

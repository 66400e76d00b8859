"""Prints, warns and logs in every call, in several ways and without a final newline."""

import logging
import os
import sys
import warnings

import torch


def softmax(x):
    print("softmax of", tuple(x.shape))
    warnings.warn("rows are long", stacklevel=2)
    logging.getLogger(__name__).error("not an error")
    os.write(1, b"\x00\xff not text")
    print('{"verdict": "wrong"}', end="", file=sys.stderr)
    return torch.softmax(x, -1)

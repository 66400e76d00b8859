"""Keeps its dimension in a context variable and sets the locale."""

import contextvars
import locale

import torch

_dim = contextvars.ContextVar("dim", default=-1)


def softmax(x):
    locale.setlocale(locale.LC_ALL, "C")
    return contextvars.copy_context().run(lambda: torch.softmax(x, _dim.get()))

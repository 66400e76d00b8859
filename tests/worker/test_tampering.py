"""Replaced functions are named; functions that torch itself wraps are not."""

import functools
import time

import torch

from tilewright.worker import memory
from tilewright.worker.tampering import FunctionSnapshot


def test_ordinary_work_replaces_nothing():
    snapshot = FunctionSnapshot()
    torch.compile(lambda x: x * 2, backend="aot_eager")(torch.ones(3))
    torch.set_default_dtype(torch.float32)
    assert snapshot.replaced() == []


def test_replaced_functions_are_named(monkeypatch):
    snapshot = FunctionSnapshot()
    monkeypatch.setattr(torch, "allclose", lambda *_: True)
    monkeypatch.setattr(time, "perf_counter", functools.wraps(time.perf_counter)(lambda: 0.0))
    monkeypatch.setattr(torch.Tensor, "equal", lambda *_: True)
    monkeypatch.setattr(memory.GuardedTensor, "difference", lambda *_: None)
    monkeypatch.setattr(torch.testing.assert_close, "__code__", (lambda *_, **__: None).__code__)
    assert sorted(snapshot.replaced()) == [
        "GuardedTensor.difference",
        "Tensor.equal",
        "time.perf_counter",
        "torch.allclose",
        "torch.testing.assert_close",
    ]

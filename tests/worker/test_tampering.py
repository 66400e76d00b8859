"""Functions that are others than before are named; those that torch itself wraps are not."""

import functools
import time

import torch

from tilewright.worker import memory
from tilewright.worker.tampering import Fingerprint


def test_nothing_is_replaced_by_ordinary_work():
    fingerprint = Fingerprint()
    torch.compile(lambda x: x * 2, backend="aot_eager")(torch.ones(3))
    torch.set_default_dtype(torch.float32)
    assert fingerprint.replaced() == []


def test_replaced_functions_are_named(monkeypatch):
    fingerprint = Fingerprint()
    monkeypatch.setattr(torch, "allclose", lambda *_: True)
    monkeypatch.setattr(time, "perf_counter", functools.wraps(time.perf_counter)(lambda: 0.0))
    monkeypatch.setattr(torch.Tensor, "equal", lambda *_: True)
    monkeypatch.setattr(memory.Placed, "difference", lambda *_: None)
    monkeypatch.setattr(torch.testing.assert_close, "__code__", (lambda *_, **__: None).__code__)
    assert sorted(fingerprint.replaced()) == [
        "Placed.difference",
        "Tensor.equal",
        "time.perf_counter",
        "torch.allclose",
        "torch.testing.assert_close",
    ]

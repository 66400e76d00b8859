"""Shadow memory is several times as large as the tensors, so a launch must not keep it."""

import gc
import weakref

import torch

from interpreter.kernels import copy
from tilewright.interpreter import executor, interpret


def test_a_launch_frees_its_shadow_memory_without_the_garbage_collector(monkeypatch):
    logs = []

    class AccessLog(executor.AccessLog):
        def __init__(self, *args):
            super().__init__(*args)
            logs.append(weakref.ref(self))

    monkeypatch.setattr(executor, "AccessLog", AccessLog)
    gc.disable()
    try:
        with interpret():
            copy(torch.randn(100))
    finally:
        gc.enable()
    assert [log() for log in logs] == [None]

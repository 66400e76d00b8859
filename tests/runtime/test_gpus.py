"""Properties of GPUs by their number."""

import pytest
import torch

from tilewright.runtime import gpus

CAPABILITIES = {0: (8, 0), 1: (8, 9), 2: (9, 0)}


@pytest.fixture
def several_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", CAPABILITIES.__getitem__)
    gpus._compute_capability.cache_clear()
    yield
    gpus._compute_capability.cache_clear()


def test_ada_is_the_first_with_fp8(several_gpus):
    assert [gpus.has_fp8(device) for device in (-1, *CAPABILITIES)] == [True, False, True, True]


def test_a_gpu_of_another_vendor_has_no_fp8(several_gpus, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not gpus.has_fp8(1)


def test_torch_compile_takes_the_answer_as_a_constant(several_gpus):
    ada = torch.compile(lambda x: x * (1 + gpus.has_fp8(x.get_device() + 2)), fullgraph=True, backend="eager")
    assert ada(torch.ones(())) == 2  # get_device() of a CPU tensor is -1

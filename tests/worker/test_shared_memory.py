"""Shared memory between parent and child: tensors inside it pass, offsets outside it are refused."""

import os

import pytest
import torch

from tilewright.worker import framing
from tilewright.worker.shared_memory import ALIGNMENT, SharedMemory, aligned

TOKEN = b"t" * framing.TOKEN_BYTES


class HostMemory(SharedMemory):
    """The same bookkeeping on a CPU."""

    def __init__(self, size):
        self.size, self._bytes = size, torch.zeros(size, dtype=torch.uint8)


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return HostMemory(4096)


def test_tensors_pass_through_the_memory(memory):
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(7), torch.empty(0, 4), torch.randn(5).bfloat16()]
    out, into = os.pipe()
    with os.fdopen(out, "rb") as reader, os.fdopen(into, "wb") as writer:
        framing.send(writer, TOKEN, {"do": "call"}, tensors, None, memory)
        _, message, found = framing.receive(reader, None, TOKEN, 0, memory)
    assert message == {"do": "call"}
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, found, strict=True))
    start, end = memory._bytes.data_ptr(), memory._bytes.data_ptr() + memory.size
    assert all(start <= tensor.data_ptr() < end for tensor in found if tensor.numel())


def test_tensors_that_do_not_fit_are_sent_through_the_pipe(memory):
    tensor = torch.zeros(2000)
    out, into = os.pipe()
    with os.fdopen(out, "rb") as reader, os.fdopen(into, "wb") as writer:
        framing.send(writer, TOKEN, {}, [tensor], None, memory)
        _, _, (found,) = framing.receive(reader, None, TOKEN, 8000, memory)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("offset", "shape"),
    [(-ALIGNMENT, [4]), (8, [4]), (4096, [1]), (3840, [65]), (0, [-1, -4]), (0, [2**62, 4])],
    ids=["negative", "not aligned", "behind it", "across its end", "a negative size", "too many"],
)
def test_a_reply_cannot_name_other_memory(memory, offset, shape):
    with pytest.raises(ValueError, match="outside"):
        memory.view(offset, torch.float32, shape)
    spec = {"dtype": "float32", "shape": shape, "offset": offset}
    with pytest.raises((ValueError, RuntimeError)):
        framing._unpack(memoryview(b""), [spec], memory)


def test_without_shared_memory_an_offset_is_refused():
    with pytest.raises(ValueError, match="no shared memory"):
        framing._unpack(memoryview(b""), [{"dtype": "float32", "shape": [1], "offset": 0}], None)


def test_sizes_are_aligned():
    assert [aligned(n) for n in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]

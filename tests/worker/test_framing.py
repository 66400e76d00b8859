"""Only a well-formed reply with the token of its request is accepted."""

import os
import time

import pytest
import torch

from tilewright.worker import framing


@pytest.fixture
def pipe():
    reading, writing = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    yield reading, writing
    reading.close()
    writing.close()


TOKEN, OTHER_TOKEN = b"a" * framing.TOKEN_BYTES, b"b" * framing.TOKEN_BYTES


def soon():
    return time.monotonic() + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
def test_tensors_are_sent_bit_for_bit(pipe, dtype):
    sent = [torch.randint(0, 2, (3, 5)).to(dtype), torch.zeros(0, 4, dtype=dtype), torch.tensor(1).to(dtype)]
    framing.send(pipe[1], TOKEN, {"a": [1, None]}, sent, None)
    token, message, got = framing.receive(pipe[0], soon(), TOKEN, 10**6)
    assert (token, message) == (TOKEN, {"a": [1, None]})
    for a, b in zip(sent, got, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.float(), b.float())


def test_a_reply_with_another_token_is_invalid(pipe):
    framing.send(pipe[1], OTHER_TOKEN, {}, [], None)
    with pytest.raises(framing.InvalidReply):
        framing.receive(pipe[0], soon(), TOKEN, 10)


@pytest.mark.parametrize(
    "written",
    [
        b"right\n" * 100,
        framing.HEADER.pack(TOKEN, 2**62, 0),
        framing.HEADER.pack(TOKEN, 2, 2**40) + b"{}",
        framing.HEADER.pack(TOKEN, 2, 0) + b"{}",
        framing.HEADER.pack(TOKEN, 4, 0) + b"nope",
        framing.HEADER.pack(TOKEN, 71, 0) + b'{"message": {}, "tensors": [{"dtype": "float32", "shape": [1000000]}]}  ',
        framing.HEADER.pack(TOKEN, 59, 0) + b'{"message": {}, "tensors": [{"dtype": "save", "shape": []}]}',
    ],
)
def test_noise_is_an_invalid_reply(pipe, written):
    os.write(pipe[1].fileno(), written)
    with pytest.raises(framing.InvalidReply):
        framing.receive(pipe[0], soon(), TOKEN, 1000)


def test_sending_and_receiving_stop_at_the_deadline(pipe):
    os.set_blocking(pipe[1].fileno(), False)
    with pytest.raises(TimeoutError):
        framing.send(pipe[1], TOKEN, {}, [torch.zeros(2**20)], time.monotonic() + 0.05)
    os.read(pipe[0].fileno(), 2**20)
    with pytest.raises(TimeoutError):
        framing.receive(pipe[0], time.monotonic() + 0.05, TOKEN, 10)

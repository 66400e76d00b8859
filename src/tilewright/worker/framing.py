"""Messages between parent and child: JSON and raw bytes over pipes.

Nothing is unpickled, so nothing the child sends can run in the parent; and each reply must bear the token of its
request, so that none can be written in advance.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import struct
import time
from typing import IO, Any

import torch
from torch import Tensor

TOKEN = 16  # bytes
HEADER = struct.Struct(f"<{TOKEN}sQQ")  # token, bytes of JSON, bytes of tensors
LONGEST_TEXT = 2**24  # bytes of JSON


class NotAReply(Exception):
    """What came over the pipe was not written by our side of it."""


def send(pipe: IO[bytes], token: bytes, message: dict[str, Any], tensors: list[Tensor], deadline: float | None) -> None:
    blobs, described = [], []
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        blobs.append(flat.view(torch.uint8).numpy().data.cast("B") if flat.numel() else b"")
        described.append({"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)})
    text = json.dumps({"message": message, "tensors": described}).encode()
    for data in (HEADER.pack(token, len(text), sum(map(len, blobs))), text, *blobs):
        _write(pipe, memoryview(data), deadline)


def receive(
    pipe: IO[bytes], deadline: float | None, token: bytes | None = None, most: int | None = None
) -> tuple[bytes, Any, list[Tensor]]:
    """The next message; with `token`, only one that bears it and has at most `most` bytes of tensors."""
    bears, text_bytes, tensor_bytes = HEADER.unpack(_read(pipe, HEADER.size, deadline))
    too_long = text_bytes > LONGEST_TEXT or (most is not None and tensor_bytes > most)
    if token is not None and (bears != token or too_long):
        raise NotAReply
    text = _read(pipe, text_bytes, deadline)
    body = memoryview(_read(pipe, tensor_bytes, deadline))
    try:
        header = json.loads(text)
        return bears, header["message"], _unpack(body, header["tensors"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise NotAReply from error


def _unpack(body: memoryview, described: list[dict[str, Any]]) -> list[Tensor]:
    tensors, offset = [], 0
    for one in described:
        dtype = getattr(torch, one["dtype"])
        size = math.prod(one["shape"]) * dtype.itemsize
        if offset + size > len(body):
            raise ValueError("a tensor longer than the message")
        raw = torch.frombuffer(body[offset : offset + size], dtype=torch.uint8) if size else torch.empty(0, dtype=dtype)
        aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
        tensors.append(aligned.view(dtype).reshape(one["shape"]))
        offset += size
    return tensors


def _write(pipe: IO[bytes], data: memoryview, deadline: float | None) -> None:
    """All of it, unless the reader stops reading; one that is gone will be known by its silence. With a deadline the
    pipe must be one that does not block."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            if deadline is not None and not select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))[1]:
                raise TimeoutError
            data = data[os.write(pipe.fileno(), data[: 1 << 20]) :]


def _read(pipe: IO[bytes], size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        if deadline is not None and not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        count = os.readv(pipe.fileno(), [view[got : got + (1 << 20)]])
        if not count:
            raise EOFError
        got += count
    return data

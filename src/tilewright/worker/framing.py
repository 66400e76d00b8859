"""Frame messages between parent and child as JSON and raw bytes over pipes.

Nothing is unpickled, so a child cannot run code in the parent. Each reply must carry the random token of its request,
so that it cannot be written in advance. Tensors that fit into memory that both share on the GPU are passed there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import struct
import time
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewright.worker.memory import bits

if TYPE_CHECKING:
    from tilewright.worker.shared_memory import SharedMemory

TOKEN_BYTES = 16
HEADER = struct.Struct(f"<{TOKEN_BYTES}sQQ")  # token, bytes of JSON, bytes of tensors
MAX_JSON_BYTES = 2**24


class InvalidReply(Exception):
    """The bytes on the pipe are not a reply to the request."""


def send(
    pipe: IO[bytes],
    token: bytes,
    message: dict[str, Any],
    tensors: list[Tensor],
    deadline: float | None,
    shared: SharedMemory | None = None,
) -> None:
    """Send a message; with `shared`, its tensors through that memory if they fit."""
    blobs, specs = [], [{"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for t in tensors]
    if shared and tensors and (offsets := shared.write(tensors)) is not None:
        specs = [spec | {"offset": offset} for spec, offset in zip(specs, offsets, strict=True)]
    else:
        for tensor in tensors:
            blobs.append(bits(tensor.cpu()).numpy().data.cast("B") if tensor.numel() else b"")
    text = json.dumps({"message": message, "tensors": specs}).encode()
    for data in (HEADER.pack(token, len(text), sum(map(len, blobs))), text, *blobs):
        _write(pipe, memoryview(data), deadline)


def receive(
    pipe: IO[bytes],
    deadline: float | None,
    token: bytes | None = None,
    max_bytes: int | None = None,
    shared: SharedMemory | None = None,
) -> tuple[bytes, Any, list[Tensor]]:
    """Return the next message. With `token`, it must carry that token and at most `max_bytes` of tensors.

    Tensors in `shared` memory are returned where they are: the other process may still write to them.
    """
    found, text_bytes, tensor_bytes = HEADER.unpack(_read(pipe, HEADER.size, deadline))
    too_long = text_bytes > MAX_JSON_BYTES or (max_bytes is not None and tensor_bytes > max_bytes)
    if token is not None and (found != token or too_long):
        raise InvalidReply
    text = _read(pipe, text_bytes, deadline)
    body = memoryview(_read(pipe, tensor_bytes, deadline))
    try:
        header = json.loads(text)
        return found, header["message"], _unpack(body, header["tensors"], shared)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidReply from error


def _unpack(body: memoryview, specs: list[dict[str, Any]], shared: SharedMemory | None) -> list[Tensor]:
    tensors, offset = [], 0
    for spec in specs:
        dtype = getattr(torch, spec["dtype"])
        if "offset" in spec:
            if shared is None:
                raise ValueError("there is no shared memory")
            tensors.append(shared.view(spec["offset"], dtype, spec["shape"]))
            continue
        size = math.prod(spec["shape"]) * dtype.itemsize
        if offset + size > len(body):
            raise ValueError("a tensor is longer than the message")
        raw = torch.frombuffer(body[offset : offset + size], dtype=torch.uint8) if size else torch.empty(0, dtype=dtype)
        aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
        tensors.append(aligned.view(dtype).reshape(spec["shape"]))
        offset += size
    return tensors


def _write(pipe: IO[bytes], data: memoryview, deadline: float | None) -> None:
    """Write all of `data`. If the reader is gone, return: the missing reply reports it.

    With a deadline, the pipe must be non-blocking.
    """
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

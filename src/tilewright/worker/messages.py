"""Encode requests and replies as JSON and tensors, and decode them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tilewright.worker.execute import OutputSpec, Reply, Request
from tilewright.worker.memory import GuardedTensor


def encode_request(request: Request) -> tuple[dict[str, Any], list[Tensor]]:
    tensors: list[Tensor] = []

    def encode(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return {"dtype": _name(value)}
        if isinstance(value, tuple):  # JSON has lists only
            return {"tuple": [encode(item) for item in value]}
        if not isinstance(value, GuardedTensor):
            return value
        tensors.append(value.memory)
        content = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "memory"}
        return {"tensor": content | {"dtype": _name(value.dtype)}}

    encoded = {f.name: getattr(request, f.name) for f in fields(request)}
    encoded["output_specs"] = [
        [list(spec.shape), _name(spec.dtype), [[list(shape), _name(dtype)] for shape, dtype in spec.others]]
        for spec in request.output_specs
    ]
    encoded["args"] = [encode(a) for a in request.args]
    encoded["grads"] = [encode(g) for g in request.grads]
    return encoded, tensors


def decode_request(encoded: dict[str, Any], supplied: Iterator[Tensor]) -> Request:
    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "dtype" in value:
            return getattr(torch, value["dtype"])
        if "tuple" in value:
            return tuple(decode(item) for item in value["tuple"])
        tensor = value["tensor"]
        return GuardedTensor(
            next(supplied),
            getattr(torch, tensor["dtype"]),
            tuple(tensor["shape"]),
            tuple(tensor["stride"]),
            tensor["offset"],
        )

    request = Request(**encoded)
    request.args = [decode(a) for a in request.args]
    request.grads = [decode(g) for g in request.grads]
    request.output_specs = [
        OutputSpec(tuple(s), getattr(torch, dtype), tuple((tuple(o), getattr(torch, d)) for o, d in others))
        for s, dtype, others in encoded["output_specs"]
    ]
    return request


def encode_reply(reply: Reply, with_tensors: bool) -> tuple[dict[str, Any], list[Tensor]]:
    """Encode a reply; without its tensors, they stay in the child, which returns blocks of them on request."""
    outputs = reply.outputs if with_tensors else []
    gradients = reply.gradients if with_tensors else []
    encoded = {
        "outputs": len(outputs),
        "gradients": [g is not None for g in gradients],
        "calls": reply.calls,
        "forward_only": reply.forward_only,
        "shared": reply.shared,
    }
    return encoded, [*outputs, *(g for g in gradients if g is not None), *(reply.memory if with_tensors else [])]


def decode_reply(encoded: dict[str, Any], tensors: list[Tensor]) -> Reply:
    count, present = encoded["outputs"], encoded["gradients"]
    gradients = iter(tensors[count : count + sum(present)])
    return Reply(
        tensors[:count],
        [next(gradients) if there else None for there in present],
        tensors[count + sum(present) :],
        [(str(name), int(elements)) for name, elements in encoded["calls"]],
        str(encoded["forward_only"]),
        [str(pair) for pair in encoded["shared"]],
    )


def encode_results(results: list[Tensor | None]) -> tuple[dict[str, Any], list[Tensor]]:
    return {"results": [r is not None for r in results]}, [r for r in results if r is not None]


def decode_results(encoded: dict[str, Any], tensors: list[Tensor]) -> list[Tensor | None]:
    supplied = iter(tensors)
    return [next(supplied) if there else None for there in encoded["results"]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

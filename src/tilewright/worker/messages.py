"""Requests and replies as JSON and tensors, for the wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tilewright.worker.execute import Like, Reply, Request
from tilewright.worker.memory import Placed


def of_request(request: Request) -> tuple[dict[str, Any], list[Tensor]]:
    tensors: list[Tensor] = []

    def described(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return {"dtype": _name(value)}
        if not isinstance(value, Placed):
            return value
        tensors.append(value.memory)
        content = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "memory"}
        return {"placed": content | {"dtype": _name(value.dtype)}}

    plain = {f.name: getattr(request, f.name) for f in fields(request)}
    plain["wanted"] = [[list(like.shape), _name(like.dtype)] for like in request.wanted]
    plain["args"] = [described(a) for a in request.args]
    plain["grads"] = [described(g) for g in request.grads]
    return plain, tensors


def request(plain: dict[str, Any], supplied: Iterator[Tensor]) -> Request:

    def value(described: Any) -> Any:
        if not isinstance(described, dict):
            return described
        if "dtype" in described:
            return getattr(torch, described["dtype"])
        placed = described["placed"]
        return Placed(
            next(supplied),
            getattr(torch, placed["dtype"]),
            tuple(placed["shape"]),
            tuple(placed["stride"]),
            placed["offset"],
        )

    made = Request(**plain)
    made.args = [value(a) for a in made.args]
    made.grads = [value(g) for g in made.grads]
    made.wanted = [Like(tuple(shape), getattr(torch, dtype)) for shape, dtype in plain["wanted"]]
    return made


def of_reply(reply: Reply, whole: bool) -> tuple[dict[str, Any], list[Tensor]]:
    """Not `whole`: the results stay where they are, to be asked for in parts."""
    outputs = reply.outputs if whole else []
    gradients = [g for g in reply.gradients if g is not None] if whole else []
    plain = {
        "outputs": len(outputs),
        "gradients": [g is not None for g in reply.gradients] if whole else [],
        "calls": reply.calls,
    }
    return plain, [*outputs, *gradients, *(reply.memory if whole else [])]


def reply(plain: dict[str, Any], tensors: list[Tensor]) -> Reply:
    count, present = plain["outputs"], plain["gradients"]
    gradients = iter(tensors[count : count + sum(present)])
    return Reply(
        tensors[:count],
        [next(gradients) if there else None for there in present],
        tensors[count + sum(present) :],
        [(str(name), int(elements)) for name, elements in plain["calls"]],
    )


def of_results(results: list[Tensor | None]) -> tuple[dict[str, Any], list[Tensor]]:
    return {"results": [r is not None for r in results]}, [r for r in results if r is not None]


def results(plain: dict[str, Any], tensors: list[Tensor]) -> list[Tensor | None]:
    given = iter(tensors)
    return [next(given) if there else None for there in plain["results"]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

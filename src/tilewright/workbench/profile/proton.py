"""Kernel times by Proton, Triton's profiler, in scopes with the bytes and FLOPs of a call."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright.errors import MissingPackage, first_line
from tilewright.workbench.profile import child_process
from tilewright.workbench.profile.calls import Call, min_cost, prepare, profiler_range, title

NAME = "proton"
TIMES = 10  # runs per call, each with a flushed cache
FLUSH = 2**28  # bytes


@dataclass(frozen=True)
class Scope:
    """The mean kernel time of a call, with its minimum bytes and FLOPs."""

    us: float
    bytes: float
    flops: float
    kernels: Mapping[str, float]  # microseconds by name

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.us / 1e3

    @property
    def teraflops(self) -> float:
        return self.flops / self.us / 1e6


def measure(calls: Sequence[Call]) -> list[Any]:
    """Return the Scope of each call, or the reason why it has none."""
    if not importlib.util.find_spec("triton.profiler"):
        raise MissingPackage("Proton", "triton")
    found = child_process.run(NAME, calls)
    return [Scope(**one) if isinstance(one, dict) else one for one in found]


def run_in_child(calls: Sequence[Call], _: str | None) -> list[dict[str, Any] | str]:
    """Return the fields of the Scope of each call, or its error."""
    import triton.profiler as proton

    flush = torch.ones(FLUSH // 4, device="cuda")
    failed: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        name = Path(folder) / "scopes"
        proton.start(str(name), hook="triton")
        for number, call in enumerate(calls):
            try:
                run = prepare(call, "cuda")
                run()
            except (Exception, SystemExit) as error:
                failed[number] = first_line(error)
                continue
            cost = min_cost(call)
            amounts = {"bytes": cost.bytes, "flops": sum(cost.flops.values())} if cost else None
            for _turn in range(TIMES):
                flush.sum()
                with profiler_range(title(call)), proton.scope(_scope(number), amounts):
                    run()
            torch.cuda.synchronize()
            del run
            torch.cuda.empty_cache()
        proton.finalize()
        tree = json.loads(name.with_suffix(".hatchet").read_text())
    return [failed.get(n) or read(tree, _scope(n)) or "Proton saw none of its kernels" for n in range(len(calls))]


def _scope(number: int) -> str:
    return f"tilewright {number}"


def read(tree: Any, name: str) -> dict[str, Any] | None:
    """Read a scope from Proton's output, a tree of nodes with a frame, metrics and children."""
    for node in _nodes(tree[0]):
        if node["frame"]["name"] == name:
            kernels: dict[str, float] = {}
            for inner in _nodes(node):
                if "time (ns)" in inner["metrics"]:
                    kernel = inner["frame"]["name"]
                    kernels[kernel] = kernels.get(kernel, 0.0) + inner["metrics"]["time (ns)"] / 1e3 / TIMES
            amounts = {key: node["metrics"].get(key, 0.0) / TIMES for key in ("bytes", "flops")}
            return {"us": sum(kernels.values()), **amounts, "kernels": kernels} if kernels else None
    return None


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for inner in node.get("children", []):
        yield from _nodes(inner)

"""Differences between two compiled kernels, or between two configurations of one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.errors import NothingLaunched
from tilewright.workbench.inspect import CompileFailure, Inspection, inspect_launch
from tilewright.workbench.inspect.launches import with_config
from tilewright.workbench.inspect.line_info import code_lines


@dataclass(frozen=True)
class Variant:
    """A kernel with changed settings, written as triton:BLOCK_N=512,num_warps=8."""

    kernel: str
    settings: dict[str, Any]

    @staticmethod
    def parse(text: str) -> Variant:
        kernel, _, settings = text.partition(":")
        pairs = [part.partition("=") for part in settings.split(",") if part]
        return Variant(kernel, {name.strip(): _value(value.strip()) for name, _, value in pairs})

    def apply(self, inspections: Sequence[Inspection | CompileFailure]) -> Inspection:
        """Return the first launch, compiled with these settings."""
        if not inspections:
            raise NothingLaunched(self.kernel)
        first = inspections[0]
        if isinstance(first, Inspection) and first.launch and self.settings:
            first = inspect_launch(with_config(first.launch, self.settings), first.title)
        if isinstance(first, CompileFailure):
            raise first.error
        return first


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdecimal() else text


@dataclass(frozen=True)
class KernelDiff:
    a: Inspection
    b: Inspection

    @property
    def numbers(self) -> dict[str, tuple[Any, Any]]:
        """Every figure of both kernels; None where a kernel does not have it."""
        left, right = _figures(self.a), _figures(self.b)
        figures = {name: (left.get(name), right.get(name)) for name in dict.fromkeys([*left, *right])}
        left, right = _counts(self.a), _counts(self.b)
        return figures | {name: (left.get(name, 0), right.get(name, 0)) for name in dict.fromkeys([*left, *right])}

    def code(self, form: str, names: tuple[str, str]) -> list[str]:
        """Return the code as a unified diff."""
        a, b = ([line.code for line in code_lines(one.compiled, form)] for one in (self.a, self.b))
        return list(difflib.unified_diff(a, b, *names, lineterm="", n=2))

    def as_json(self) -> dict[str, Any]:
        return {"numbers": {name: list(pair) for name, pair in self.numbers.items()}}


def _figures(kernel: Inspection) -> dict[str, Any]:
    config = kernel.launch.code.config if kernel.launch else {}
    return {
        **{name: str(value) for name, value in config.items()},
        "threads": kernel.compiled.threads,
        "grid": "x".join(map(str, kernel.launch.grid)) if kernel.launch else "",
        "registers": kernel.resources.registers,
        "spilled bytes": kernel.resources.spills,
        "stack bytes": kernel.resources.stack,
        "shared bytes": kernel.resources.shared,
        "blocks per SM": kernel.occupancy.blocks,
        "warps per SM": kernel.occupancy.warps,
        "limited by": kernel.occupancy.limiter,
    }


def _counts(kernel: Inspection) -> dict[str, int]:
    """Return instruction counts by kind and detail."""
    kinds = kernel.mix.as_json()
    each = {f"  {kind} {detail}": count for kind, details in kinds.items() for detail, count in details.items()}
    return {"instructions": len(kernel.mix.instructions)} | each

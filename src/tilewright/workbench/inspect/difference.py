"""What changes between two kernels, or between two configurations of one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.errors import NothingLaunched
from tilewright.workbench.inspect import Inspection, Refused, inspect_launch
from tilewright.workbench.inspect.launches import with_config
from tilewright.workbench.inspect.listing import listing


@dataclass(frozen=True)
class Variant:
    """A kernel, with settings of its own: triton:BLOCK_N=512,num_warps=8."""

    kernel: str
    settings: dict[str, Any]

    @staticmethod
    def parse(text: str) -> Variant:
        kernel, _, settings = text.partition(":")
        pairs = [part.partition("=") for part in settings.split(",") if part]
        return Variant(kernel, {name.strip(): _value(value.strip()) for name, _, value in pairs})

    def applied(self, found: Sequence[Inspection | Refused]) -> Inspection:
        """The first launch, with these settings."""
        if not found:
            raise NothingLaunched(self.kernel)
        first = found[0]
        if isinstance(first, Inspection) and first.launch and self.settings:
            first = inspect_launch(with_config(first.launch, self.settings), first.title)
        if isinstance(first, Refused):
            raise first.error
        return first


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdecimal() else text


@dataclass(frozen=True)
class Difference:
    a: Inspection
    b: Inspection

    @property
    def numbers(self) -> dict[str, tuple[Any, Any]]:
        """Every figure of both, by name; None where one has no such figure."""
        left, right = _figures(self.a), _figures(self.b)
        figures = {name: (left.get(name), right.get(name)) for name in dict.fromkeys([*left, *right])}
        left, right = _counts(self.a), _counts(self.b)
        return figures | {name: (left.get(name, 0), right.get(name, 0)) for name in dict.fromkeys([*left, *right])}

    def code(self, form: str, names: tuple[str, str]) -> list[str]:
        """As `diff -u` shows it."""
        a, b = ([line.code for line in listing(one.made, form)] for one in (self.a, self.b))
        return list(difflib.unified_diff(a, b, *names, lineterm="", n=2))

    def as_json(self) -> dict[str, Any]:
        return {"numbers": {name: list(pair) for name, pair in self.numbers.items()}}


def _figures(found: Inspection) -> dict[str, Any]:
    config = found.launch.code.config if found.launch else {}
    return {
        **{name: str(value) for name, value in config.items()},
        "threads": found.made.threads,
        "grid": "x".join(map(str, found.launch.grid)) if found.launch else "",
        "registers": found.resources.registers,
        "spilled bytes": found.resources.spills,
        "stack bytes": found.resources.stack,
        "shared bytes": found.resources.shared,
        "blocks an SM": found.occupancy.blocks,
        "warps an SM": found.occupancy.warps,
        "limited by": found.occupancy.limiter,
    }


def _counts(found: Inspection) -> dict[str, int]:
    """Of instructions."""
    kinds = found.mix.as_json()
    each = {f"  {kind} {detail}": count for kind, details in kinds.items() for detail, count in details.items()}
    return {"instructions": len(found.mix.instructions)} | each

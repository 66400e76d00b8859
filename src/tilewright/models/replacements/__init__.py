"""The parts of a model that can be replaced, one file per kind.

A file has a function `find(module)`, which returns a Replacement, the reason why a candidate must be left alone, or
None for everything else. Its name is the name of its kind in `apply(include=…)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Replacement:
    """A forward function for one module: `forward(module, *args, **kwargs)`.

    It must be picklable, so it is a module-level function or a partial of one.
    """

    forward: Callable[..., Any]
    kernel: str
    covers: tuple[str, ...] = ()  # children that it never calls, which need no replacement
    fuses: tuple[str, ...] = ()  # children that it calls only if they have hooks or unusual inputs

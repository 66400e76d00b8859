"""Proven, fast GPU kernels for PyTorch, and the workbench they were proven on."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# The public names of the workbench and of `models`; those of the operations are in the `__all__` of their files.
_WORKBENCH = {
    "apply": "tilewright.models",
    "audit": "tilewright.workbench.audit",
    "benchmark": "tilewright.notebook",
    "check": "tilewright.testing",
    "diff": "tilewright.models",
    "do_bench": "tilewright.notebook",
    "interpret": "tilewright.interpreter",
    "job": "tilewright.workbench.train",
    "kernel": "tilewright.spec",
    "revert": "tilewright.models",
    "trace": "tilewright.runtime.trace",
}


def _public_names() -> dict[str, str]:
    """Return every public name and its module. Read from text, so that importing the package loads no torch."""
    from tilewright.source import public_names

    return public_names() | _WORKBENCH


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_public_names())
    if name.startswith("_") or name not in (known := _public_names()):
        raise AttributeError(f"module 'tilewright' has no attribute '{name}'")
    found = getattr(importlib.import_module(known[name]), name)
    globals()[name] = found  # later look-ups do not come here
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_names()})

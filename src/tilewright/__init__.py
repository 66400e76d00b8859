"""Proven, fast GPU kernels for PyTorch, and the workbench they were proven on."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tilewright.interpreter import interpret as interpret
    from tilewright.notebook import benchmark as benchmark
    from tilewright.notebook import do_bench as do_bench
    from tilewright.ops.add import add as add
    from tilewright.ops.attention import scaled_dot_product_attention as scaled_dot_product_attention
    from tilewright.ops.dot import dot as dot
    from tilewright.ops.gelu import gelu as gelu
    from tilewright.ops.linear import linear as linear
    from tilewright.ops.softmax import softmax as softmax
    from tilewright.ops.sum import sum as sum
    from tilewright.spec import kernel as kernel
    from tilewright.testing import check as check
    from tilewright.tools.audit import audit as audit

# Each public name and where it lives; loaded on first use, so that the command line starts without torch.
_HOMES = {
    "add": "ops.add",
    "dot": "ops.dot",
    "gelu": "ops.gelu",
    "linear": "ops.linear",
    "scaled_dot_product_attention": "ops.attention",
    "softmax": "ops.softmax",
    "sum": "ops.sum",
    "audit": "tools.audit",
    "benchmark": "notebook",
    "check": "testing",
    "do_bench": "notebook",
    "interpret": "interpreter",
    "kernel": "spec",
}
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tilewright' has no attribute '{name}'")
    return getattr(importlib.import_module(f"tilewright.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

"""Proven, fast GPU kernels for PyTorch, and the workbench they were proven on."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tilewright.interpreter import interpret as interpret
    from tilewright.notebook import benchmark as benchmark
    from tilewright.notebook import do_bench as do_bench
    from tilewright.ops.adamw import AdamW as AdamW
    from tilewright.ops.add import add as add
    from tilewright.ops.add_layer_norm import add_layer_norm as add_layer_norm
    from tilewright.ops.add_rms_norm import add_rms_norm as add_rms_norm
    from tilewright.ops.amax import amax as amax
    from tilewright.ops.amax import max as max
    from tilewright.ops.amin import amin as amin
    from tilewright.ops.amin import min as min
    from tilewright.ops.argmax import argmax as argmax
    from tilewright.ops.argmin import argmin as argmin
    from tilewright.ops.attention import scaled_dot_product_attention as scaled_dot_product_attention
    from tilewright.ops.cross_entropy import cross_entropy as cross_entropy
    from tilewright.ops.cumsum import cumsum as cumsum
    from tilewright.ops.dot import dot as dot
    from tilewright.ops.geglu import geglu as geglu
    from tilewright.ops.gelu import gelu as gelu
    from tilewright.ops.layer_norm import layer_norm as layer_norm
    from tilewright.ops.linear import linear as linear
    from tilewright.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from tilewright.ops.log_softmax import log_softmax as log_softmax
    from tilewright.ops.logsumexp import logsumexp as logsumexp
    from tilewright.ops.masked_softmax import masked_softmax as masked_softmax
    from tilewright.ops.mean import mean as mean
    from tilewright.ops.prod import prod as prod
    from tilewright.ops.reglu import reglu as reglu
    from tilewright.ops.relu import relu as relu
    from tilewright.ops.relu_squared import relu_squared as relu_squared
    from tilewright.ops.rms_norm import rms_norm as rms_norm
    from tilewright.ops.rope import rope as rope
    from tilewright.ops.silu import silu as silu
    from tilewright.ops.softmax import softmax as softmax
    from tilewright.ops.sum import sum as sum
    from tilewright.ops.swiglu import swiglu as swiglu
    from tilewright.ops.unique import unique as unique
    from tilewright.ops.var import var as var
    from tilewright.ops.vector_norm import vector_norm as vector_norm
    from tilewright.spec import kernel as kernel
    from tilewright.testing import check as check
    from tilewright.tools.audit import audit as audit

# Each public name and where it lives; loaded on first use, so that the command line starts without torch.
_HOMES = {
    "AdamW": "ops.adamw",
    "add": "ops.add",
    "add_layer_norm": "ops.add_layer_norm",
    "add_rms_norm": "ops.add_rms_norm",
    "cross_entropy": "ops.cross_entropy",
    "dot": "ops.dot",
    "geglu": "ops.geglu",
    "gelu": "ops.gelu",
    "layer_norm": "ops.layer_norm",
    "linear": "ops.linear",
    "log_softmax": "ops.log_softmax",
    "masked_softmax": "ops.masked_softmax",
    "linear_cross_entropy": "ops.linear_cross_entropy",
    "reglu": "ops.reglu",
    "relu": "ops.relu",
    "relu_squared": "ops.relu_squared",
    "rms_norm": "ops.rms_norm",
    "rope": "ops.rope",
    "scaled_dot_product_attention": "ops.attention",
    "silu": "ops.silu",
    "softmax": "ops.softmax",
    "sum": "ops.sum",
    "swiglu": "ops.swiglu",
    "amax": "ops.amax",
    "amin": "ops.amin",
    "argmax": "ops.argmax",
    "argmin": "ops.argmin",
    "logsumexp": "ops.logsumexp",
    "max": "ops.amax",
    "mean": "ops.mean",
    "min": "ops.amin",
    "prod": "ops.prod",
    "unique": "ops.unique",
    "var": "ops.var",
    "vector_norm": "ops.vector_norm",
    "cumsum": "ops.cumsum",
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
    found = getattr(importlib.import_module(f"tilewright.{_HOMES[name]}"), name)
    globals()[name] = found  # the next look-up costs what that of any name costs
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

"""Proven, fast GPU kernels for PyTorch, and the workbench they were proven on."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tilewright.interpreter import interpret as interpret
    from tilewright.notebook import benchmark as benchmark
    from tilewright.notebook import do_bench as do_bench
    from tilewright.ops.activation.geglu import geglu as geglu
    from tilewright.ops.activation.gelu import gelu as gelu
    from tilewright.ops.activation.reglu import reglu as reglu
    from tilewright.ops.activation.relu import relu as relu
    from tilewright.ops.activation.relu_squared import relu_squared as relu_squared
    from tilewright.ops.activation.silu import silu as silu
    from tilewright.ops.activation.swiglu import swiglu as swiglu
    from tilewright.ops.add import add as add
    from tilewright.ops.attention.attention import scaled_dot_product_attention as scaled_dot_product_attention
    from tilewright.ops.linear.linear import linear as linear
    from tilewright.ops.loss.cross_entropy import cross_entropy as cross_entropy
    from tilewright.ops.loss.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from tilewright.ops.norm.add_layer_norm import add_layer_norm as add_layer_norm
    from tilewright.ops.norm.add_rms_norm import add_rms_norm as add_rms_norm
    from tilewright.ops.norm.layer_norm import layer_norm as layer_norm
    from tilewright.ops.norm.rms_norm import rms_norm as rms_norm
    from tilewright.ops.optim.adamw import AdamW as AdamW
    from tilewright.ops.reduce.amax import amax as amax
    from tilewright.ops.reduce.amax import max as max
    from tilewright.ops.reduce.amin import amin as amin
    from tilewright.ops.reduce.amin import min as min
    from tilewright.ops.reduce.argmax import argmax as argmax
    from tilewright.ops.reduce.argmin import argmin as argmin
    from tilewright.ops.reduce.cumsum import cumsum as cumsum
    from tilewright.ops.reduce.dot import dot as dot
    from tilewright.ops.reduce.logsumexp import logsumexp as logsumexp
    from tilewright.ops.reduce.mean import mean as mean
    from tilewright.ops.reduce.prod import prod as prod
    from tilewright.ops.reduce.sum import sum as sum
    from tilewright.ops.reduce.unique import unique as unique
    from tilewright.ops.reduce.var import var as var
    from tilewright.ops.reduce.vector_norm import vector_norm as vector_norm
    from tilewright.ops.rope import rope as rope
    from tilewright.ops.softmax.log_softmax import log_softmax as log_softmax
    from tilewright.ops.softmax.masked_softmax import masked_softmax as masked_softmax
    from tilewright.ops.softmax.softmax import softmax as softmax
    from tilewright.spec import kernel as kernel
    from tilewright.testing import check as check
    from tilewright.workbench.audit import audit as audit

# Each public name and where it lives; loaded on first use, so that the command line starts without torch.
_HOMES = {
    "AdamW": "ops.optim.adamw",
    "add": "ops.add",
    "add_layer_norm": "ops.norm.add_layer_norm",
    "add_rms_norm": "ops.norm.add_rms_norm",
    "cross_entropy": "ops.loss.cross_entropy",
    "dot": "ops.reduce.dot",
    "geglu": "ops.activation.geglu",
    "gelu": "ops.activation.gelu",
    "layer_norm": "ops.norm.layer_norm",
    "linear": "ops.linear.linear",
    "log_softmax": "ops.softmax.log_softmax",
    "masked_softmax": "ops.softmax.masked_softmax",
    "linear_cross_entropy": "ops.loss.linear_cross_entropy",
    "reglu": "ops.activation.reglu",
    "relu": "ops.activation.relu",
    "relu_squared": "ops.activation.relu_squared",
    "rms_norm": "ops.norm.rms_norm",
    "rope": "ops.rope",
    "scaled_dot_product_attention": "ops.attention.attention",
    "silu": "ops.activation.silu",
    "softmax": "ops.softmax.softmax",
    "sum": "ops.reduce.sum",
    "swiglu": "ops.activation.swiglu",
    "amax": "ops.reduce.amax",
    "amin": "ops.reduce.amin",
    "argmax": "ops.reduce.argmax",
    "argmin": "ops.reduce.argmin",
    "logsumexp": "ops.reduce.logsumexp",
    "max": "ops.reduce.amax",
    "mean": "ops.reduce.mean",
    "min": "ops.reduce.amin",
    "prod": "ops.reduce.prod",
    "unique": "ops.reduce.unique",
    "var": "ops.reduce.var",
    "vector_norm": "ops.reduce.vector_norm",
    "cumsum": "ops.reduce.cumsum",
    "audit": "workbench.audit",
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

"""Attention layers of transformers that look their attention function up by name, and that name for others to use.

Layers call `ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, default)`. In a patched layer, the
answer for "sdpa" is our function: the configuration, which several models may share, does not change. Models that are
created with `attn_implementation="tilewright"` find the same function by that name.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch import Tensor, nn

from tilewright.models.probe import Stub, agree, is_plain, random
from tilewright.models.rebound import Rebound, called_global
from tilewright.models.replacements import Replacement
from tilewright.ops.attention.attention import scaled_dot_product_attention

TABLE = "ALL_ATTENTION_FUNCTIONS"
NAME, THEIRS = "tilewright", "sdpa"


class Functions:
    """The attention functions of transformers, with ours under the name of torch's."""

    def __init__(self, original: Any):
        self.original = original

    def get_interface(self, name: Any, default: Any) -> Any:
        return _ours(name, self.original.get_interface(name, default))

    def __getitem__(self, name: Any) -> Any:
        return _ours(name, self.original[name])

    def __contains__(self, name: Any) -> bool:
        return name in self.original

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name)


def _ours(name: Any, found: Any) -> Any:
    return partial(attend, original=found) if name == THEIRS else found


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    original: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Return the attention of query [B, heads, S, D] as [B, S, heads, D]; with a mask or dropout, transformers' own."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and query.shape[2] > 1
    takes = attention_mask is None and not dropout and is_plain(query, key, value)
    takes = takes and options.get("position_bias") is None and not options.get("output_attentions")
    if not takes or (causal and query.shape[2] != key.shape[2]):
        own = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return original(module, query, key, value, attention_mask, **own, **options)
    gqa = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2).contiguous(), None


def named(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Compute attention for `attn_implementation="tilewright"`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return attend(*args, original=sdpa_attention_forward, **kwargs)


def register() -> None:
    """Register our attention with transformers under its name, if transformers is imported."""
    if "transformers" not in sys.modules:
        return
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:  # a version without these tables
        return
    AttentionInterface.register(NAME, named)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def find(module: Any) -> Replacement | str | None:
    table = called_global(module, TABLE)
    if table is None or not hasattr(table, "get_interface"):
        return None
    register()
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name == NAME:
        return f'it uses attn_implementation="{NAME}" already'
    if name != THEIRS:
        return f'its attention is that of attn_implementation="{name}"'
    if not _computes(table.get_interface(THEIRS, None)):
        return "its attention function is not scaled_dot_product_attention"
    return Replacement(Rebound(type(module), {TABLE: Functions}), "scaled_dot_product_attention")


def _computes(theirs: Any) -> bool:
    """Return whether a function computes attention as ours does, with fewer heads of keys and with causal masks."""
    layer = Stub(lambda x: x)
    layer.num_key_value_groups = 2  # type: ignore[assignment]
    q, k, v = random(1, 4, 5, 8), random(1, 2, 5, 8), random(1, 2, 5, 8).flip(0)

    def same(**options: Any) -> bool:
        ours = partial(attend, layer, q, k, v, None, original=None, **options)
        return agree(lambda: theirs(layer, q, k, v, None, **options)[0], lambda: ours()[0])

    return same(is_causal=True, scaling=0.3) and same(is_causal=False)

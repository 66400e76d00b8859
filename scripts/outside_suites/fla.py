"""flash-linear-attention: every operation that has a naive reference of its own, forward and backward."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from outside_suites.cases import Case, Missing, compare

SUITE = "fla"
SAMPLE = {"chunk_delta_rule", "fused_recurrent_hgrn", "parallel_attn"}
B, T, H, D, SLOTS = 2, 70, 2, 16, 16
HOUSEHOLDER = 2
GROUP = 16  # query heads per key head
BLOCKS = torch.stack([torch.zeros(B, T, 1).long(), torch.arange(T).view(1, T, 1).expand(B, T, 1) // 32], -1)
TOLERANCE = 5e-3  # of fla's own tests: matrix products in tf32


def _keys(*shape: int) -> Tensor:
    return F.normalize(torch.randn(shape), dim=-1)


def _decay(*shape: int) -> Tensor:
    return F.logsigmoid(torch.randn(shape))


def _share(*shape: int) -> Tensor:
    return torch.rand(shape).sigmoid()


# Arguments by name. `+` separates the kinds of argument that have one name in several operations.
DRAWS: dict[str, Callable[[], Any]] = {
    "q": lambda: torch.randn(B, T, H, D),
    "k": lambda: torch.randn(B, T, H, D),
    "k+unit": lambda: _keys(B, T, H, D),
    "v": lambda: torch.randn(B, T, H, D),
    "s": lambda: torch.randn(B, T, H, SLOTS),
    "g": lambda: _decay(B, T, H),
    "g+slot": lambda: _decay(B, T, H, SLOTS),
    "g+key": lambda: _decay(B, T, H, D),
    "gk": lambda: _decay(B, T, H, D),
    "beta": lambda: _share(B, T, H),
    "p": lambda: _keys(B, T, H, D),
    "a": lambda: -_keys(B, T, H, D),
    "b": lambda: _keys(B, T, H, D),
    "b+gate": lambda: _share(B, T, H, D),
    "w": lambda: _keys(B, T, H, D),
    "w+gate": lambda: _share(B, T, H, D),
    "r": lambda: torch.randn(B, T, H, D),
    "x": lambda: torch.randn(B, T, D),
    "g+flat": lambda: _decay(B, T, D),
    "lamb": lambda: _share(H, D) * 0.75 + 0.25,
    "g_atk": lambda: _decay(B, T, H),
    "beta_atk": lambda: _share(B, T, H),
    "log_atk_scale": lambda: torch.full((H,), -0.2),
    "level_scales": lambda: torch.randn(B, T, H, math.ceil(math.log2(T)) + 1),
    "query": lambda: torch.randn(D),
    "residuals": lambda: torch.randn(4, B, T, D),
    "rms_weight": lambda: torch.rand(D) + 0.5,
    "q+wide": lambda: torch.randn(B, T, H, 64),
    "k+wide": lambda: torch.randn(B, T, H, 64),
    "v+wide": lambda: torch.randn(B, T, H, 64),
    "k+long": lambda: _keys(B, T * HOUSEHOLDER, H, D),
    "v+long": lambda: torch.randn(B, T * HOUSEHOLDER, H, D),
    "beta+long": lambda: _share(B, T * HOUSEHOLDER, H),
    "q+group": lambda: torch.randn(B, T, GROUP, D),
    "k+one": lambda: torch.randn(B, T, 1, D),
    "v+one": lambda: torch.randn(B, T, 1, D),
    "g_cmp": lambda: _share(B, T, GROUP),
    "g_slc": lambda: _share(B, T, GROUP),
    "w+row": lambda: torch.randn(H, D),
    "b+row": lambda: torch.randn(H, D),
    "eta+step": lambda: torch.randn(B, T, H, 1) * 5e-3,
}


@functools.cache
def _import(module: str, name: str) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla warns that there is no GPU
        return getattr(importlib.import_module(f"fla.ops.{module}"), name)


def _heads_first(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reference that takes [B, H, T, D] as a function of [B, T, H, D]."""

    def call(**inputs: Any) -> Any:
        turned = {k: v.transpose(1, 2) if isinstance(v, Tensor) and v.ndim > 2 else v for k, v in inputs.items()}
        out = fn(**turned)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2)

    return call


def _first(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns only the output, not the final state."""

    def call(**inputs: Any) -> Any:
        out = fn(**inputs)
        return out[0] if isinstance(out, tuple) else out

    return call


def _normalized(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, **inputs: fn(q=F.normalize(q, dim=-1), k=F.normalize(k, dim=-1), **inputs)


def _renamed(fn: Callable[..., Any], **names: str) -> Callable[..., Any]:
    return lambda **inputs: fn(**{names.get(k, k): v for k, v in inputs.items()})


def _extended(fn: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return lambda **inputs: fn(**inputs, **more)


# Family, operations, reference, arguments, and whether the reference takes [B, H, T, D].
FAMILIES: list[tuple[str, str, str, str, bool]] = [
    ("abc", "chunk_abc", "naive_recurrent_abc", "q k v s", True),
    ("attn", "parallel_attn", "naive_parallel_attn", "q k v", False),
    ("based", "parallel_based fused_chunk_based", "naive_parallel_based", "q k v", True),
    ("comba", "chunk_comba fused_recurrent_comba", "naive_chunk_comba", "q k+unit v p g beta", False),
    ("delta_rule", "chunk_delta_rule fused_recurrent_delta_rule", "delta_rule_recurrence", "q k+unit v beta", True),
    ("forgetting_attn", "parallel_forgetting_attn", "naive_forgetting_attn", "q k v g", False),
    (
        "gated_delta_rule",
        "chunk_gated_delta_rule fused_recurrent_gated_delta_rule",
        "naive_recurrent_gated_delta_rule",
        "q k+unit v g beta",
        False,
    ),
    ("gdn2", "chunk_gdn2 fused_recurrent_gdn2", "naive_recurrent_gdn2", "q k+unit v g+key b+gate w+gate", False),
    (
        "generalized_delta_rule.iplr",
        "chunk_iplr_delta_rule fused_recurrent_iplr_delta_rule",
        "iplr_recurrence",
        "q k+unit v a b",
        True,
    ),
    (
        "generalized_delta_rule.dplr",
        "chunk_dplr_delta_rule fused_recurrent_dplr_delta_rule",
        "dplr_recurrence",
        "q k+unit v a b gk",
        True,
    ),
    ("gla", "chunk_gla", "naive_recurrent_gla", "q k v g+key", False),
    ("gla", "fused_recurrent_gla", "naive_recurrent_gla", "q k v gk", False),
    ("gsa", "chunk_gsa fused_recurrent_gsa", "naive_recurrent_gsa", "q k v s g+slot", False),
    ("hgrn", "chunk_hgrn fused_recurrent_hgrn", "naive_recurrent_hgrn", "x g+flat", False),
    ("kda", "chunk_kda fused_recurrent_kda", "naive_recurrent_kda", "q k+unit v g+key beta", False),
    (
        "linear_attn",
        "chunk_linear_attn fused_chunk_linear_attn fused_recurrent_linear_attn",
        "naive_recurrent_linear_attn",
        "q k v",
        False,
    ),
    ("log_linear_attn", "chunk_log_linear_attn", "naive_log_linear_attn", "q+wide k+wide v+wide g level_scales", False),
    ("mesa_net", "chunk_mesa_net", "naive_mesa_net_exact", "q k+unit v g beta lamb", False),
    ("parallax", "parallel_parallax", "naive_parallax", "q r k v", False),
    ("path_attn", "parallel_path_attn", "naive_path_attn", "q k v w beta g", False),
    (
        "precond_gated_delta_rule",
        "chunk_precond_gated_delta_rule fused_recurrent_precond_gated_delta_rule",
        "naive_recurrent_precond_gated_delta_rule",
        "q k+unit v g_atk g beta_atk beta log_atk_scale",
        False,
    ),
    (
        "precond_kda",
        "chunk_precond_kda fused_recurrent_precond_kda",
        "naive_recurrent_precond_kda",
        "q k+unit v g+key g_atk beta_atk beta log_atk_scale",
        False,
    ),
    ("rebased", "parallel_rebased", "naive_parallel_rebased", "q k v", True),
    (
        "retention",
        "chunk_retention fused_chunk_retention fused_recurrent_retention parallel_retention",
        "naive_retention",
        "q k v",
        True,
    ),
    (
        "simple_gla",
        "chunk_simple_gla fused_chunk_simple_gla fused_recurrent_simple_gla parallel_simple_gla",
        "naive_recurrent_simple_gla",
        "q k v g",
        False,
    ),
    ("stickbreaking_attn", "parallel_stickbreaking_attn", "naive_stickbreaking_attn", "q k v", False),
    ("wall_attn", "parallel_wall_attn", "naive_wall_attn", "q k v g+key", False),
    (
        "gated_delta_product",
        "chunk_gated_delta_product",
        "naive_recurrent_gated_delta_product",
        "q k+long v+long g beta+long",
        False,
    ),
    ("nsa", "parallel_nsa", "naive_nsa", "q+group k+one v+one g_cmp g_slc", False),
    (
        "ttt",
        "chunk_ttt_linear fused_chunk_ttt_linear",
        "chunk_ttt_linear_ref",
        "q k+unit v w+row b+row eta+step",
        False,
    ),
    ("attnres", "fused_attnres", "naive_attnres", "query residuals rms_weight", False),
]
# Options that an operation needs to compute what its reference computes, and arguments with other names there.
OPTIONS: dict[str, dict[str, Any]] = {
    "chunk_linear_attn": {"normalize": False},
    "fused_chunk_linear_attn": {"normalize": False},
    "chunk_mesa_net": {"max_CG_iteration": D},
    "chunk_gated_delta_product": {"num_householder": HOUSEHOLDER},
    "parallel_nsa": {"block_indices": BLOCKS, "block_counts": 2, "block_size": 32},
    "chunk_ttt_linear": {"chunk_size": 16},
    "fused_chunk_ttt_linear": {"chunk_size": 16},
}
REFERENCE_OPTIONS: dict[str, dict[str, Any]] = {
    "naive_path_attn": {"scale": D**-0.5},
    "naive_wall_attn": {"scale": D**-0.5},
    "naive_recurrent_gated_delta_product": {"scale": D**-0.5, "num_householder": HOUSEHOLDER},
    "naive_nsa": {"block_indices": BLOCKS, "block_counts": 2, "block_size": 32},
}
REFERENCE_NAMES = {
    "naive_recurrent_gla": {"g": "gk"},
    "iplr_recurrence": {"a": "alpha", "b": "beta"},
    "dplr_recurrence": {"a": "alpha", "b": "beta"},
}
NORMALIZED = {"naive_recurrent_precond_gated_delta_rule", "naive_recurrent_precond_kda"}  # the operation does it itself
FP16 = {"chunk_delta_rule", "chunk_gated_delta_product", "parallel_parallax"}  # refuse fp32
FORWARD_ONLY = {
    "chunk_iplr_delta_rule",
    "fused_recurrent_comba",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
    "fused_recurrent_precond_gated_delta_rule",
    "fused_recurrent_precond_kda",
}


def cases(path: Path | None) -> Iterator[Case]:
    if path is not None:
        sys.path.insert(0, str(path))
    if importlib.util.find_spec("fla") is None:
        raise Missing("fla: pip install --no-deps fla-core==0.6.0 einops==0.8.2, or name a checkout with --fla PATH")
    _import("utils", "chunk_local_cumsum")  # loads all operations once, before the cases are forked
    for family, operations, reference, arguments, heads_first in FAMILIES:
        for name in operations.split():
            args = (family, name, reference, arguments.split(), heads_first)
            yield Case(SUITE, name, functools.partial(_check, *args))


def _check(family: str, name: str, reference: str, arguments: list[str], heads_first: bool) -> None:
    torch.manual_seed(0)
    naive: Callable[..., Any] = _import(f"{family}.naive", reference)
    if names := REFERENCE_NAMES.get(reference):
        naive = _renamed(naive, **names)
    naive = _heads_first(naive) if heads_first else _first(naive)
    naive = _normalized(naive) if reference in NORMALIZED else naive
    naive = _extended(naive, **REFERENCE_OPTIONS.get(reference, {}))
    operation = _extended(_first(_import(family, name)), **OPTIONS.get(name, {}))
    inputs = {argument.split("+")[0]: DRAWS[argument]() for argument in arguments}
    if name in FP16:
        inputs = {k: v.half() for k, v in inputs.items()}
    compare(operation, naive, inputs, tolerance=TOLERANCE, backward=name not in FORWARD_ONLY)

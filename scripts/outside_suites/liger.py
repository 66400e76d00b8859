"""Liger: every operation forward and backward, in fp32 and bf16, against plain PyTorch."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from outside_suites.cases import Case, Missing, compare

SUITE = "liger"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
B, T, H, V = 2, 9, 32, 67  # batch, sequence, hidden size, vocabulary
M, N = 6, 77  # rows and columns
TOLERANCE = {torch.float32: 1e-5, "tf32": 4e-3, torch.bfloat16: 2e-2}
TF32 = {"fused_moe", "fused_neighborhood_attention", "mhc_coefficients", "mlp"}  # use tl.dot with its default precision
SAMPLE = {"softmax bf16", "rms_norm_llama fp32", "cross_entropy bf16", "rope fp32"}

OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {}


def operation(reference: Callable[..., Any], *inputs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a call of Liger: its reference, and its inputs, in which a tuple of integers is a random tensor."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS[fn.__name__] = (fn, reference, lambda: tuple(_drawn(i) for i in inputs))
        return fn

    return register


def _drawn(value: Any) -> Any:
    if isinstance(value, tuple):
        return torch.randn(value)
    return value() if callable(value) else value


def cases(path: Path | None) -> Iterator[Case]:
    if path is not None:
        source = path / "src"
        sys.path.insert(0, str(source if source.is_dir() else path))
    if importlib.util.find_spec("liger_kernel") is None:
        raise Missing("liger: pip install --no-deps liger-kernel==0.8.5, or name a checkout with --liger PATH")
    importlib.import_module("liger_kernel.transformers.functional")  # once, before the cases are forked
    for name, (fn, reference, inputs) in OPERATIONS.items():
        for label, dtype in DTYPES.items():
            yield Case(SUITE, f"{name} {label}", lambda f=fn, r=reference, i=inputs, d=dtype: _check(f, r, i, d))


def _check(fn: Callable[..., Any], reference: Callable[..., Any], inputs: Callable[..., Any], dtype: Any) -> None:
    torch.manual_seed(0)
    made = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in inputs()]
    names = list(inspect.signature(fn).parameters)

    def call(**args: Any) -> Any:  # Liger writes gradients over its inputs
        return fn(*[a.clone() if isinstance(a, Tensor) else a for a in args.values()])

    tolerance = TOLERANCE["tf32" if dtype == torch.float32 and fn.__name__ in TF32 else dtype]
    named = dict(zip(names, made, strict=True))
    compare(call, lambda **args: reference(*args.values()), named, tolerance=tolerance, exact=torch.float64)


def _labels(count: int, classes: int, ignored: int = 0) -> Callable[[], Tensor]:
    def make() -> Tensor:
        labels = torch.randint(classes, (count,))
        labels[:ignored] = -100
        return labels

    return make


def _log_probabilities() -> Tensor:
    return torch.randn(M, N).log_softmax(-1)


def _probabilities() -> Tensor:
    return torch.randn(M, N).softmax(-1)


# Activations


@operation(lambda x: x.softmax(-1), (M, N))
def softmax(x):
    from liger_kernel.ops import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def _sparsemax(x: Tensor) -> Tensor:
    ordered = x.sort(-1, descending=True).values
    rank = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    total = ordered.cumsum(-1) - 1
    count = (ordered * rank > total).sum(-1, keepdim=True)
    return (x - total.gather(-1, count - 1) / count).clamp(min=0)


@operation(_sparsemax, (M, N))
def sparsemax(x):
    from liger_kernel.ops import LigerSparsemaxFunction

    return LigerSparsemaxFunction.apply(x, -1)


@operation(lambda x: F.relu(x).square(), (M, N))
def relu_squared(x):
    from liger_kernel.ops import LigerReLUSquaredFunction

    return LigerReLUSquaredFunction.apply(x)


@operation(lambda a, b: F.gelu(a, approximate="tanh") * b, (M, N), (M, N))
def geglu(a, b):
    from liger_kernel.ops import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(a, b)


@operation(lambda a, b: F.silu(a) * b, (M, N), (M, N))
def swiglu(a, b):
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(a, b)


@operation(lambda a, b: F.silu(a * 0.5) * b * 2.0, (M, N), (M, N))
def swiglu_with_multipliers(a, b):
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(a, b, 0.5, 2.0)


@operation(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (M, 2 * N))
def swiglu_packed(x):
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply(x)


@operation(lambda x, a, g, b: g * torch.tanh(a * x) + b, (M, N), (1,), (N,), (N,))
def dyt(x, alpha, gamma, beta):
    from liger_kernel.ops import LigerDyTFunction

    return LigerDyTFunction.apply(x, alpha, gamma, beta)


# Normalisation


def _rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@operation(lambda x, w, b: F.layer_norm(x, (N,), w, b, 1e-6), (M, N), (N,), (N,))
def layer_norm(x, w, b):
    from liger_kernel.ops import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, w, b, 1e-6)


@operation(lambda x, w: _rms(x) * w, (M, N), (N,))
def rms_norm_llama(x, w):
    from liger_kernel.ops import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", True)


@operation(lambda x, w: _rms(x) * (1 + w), (M, N), (N,))
def rms_norm_gemma(x, w):
    from liger_kernel.ops import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma", False)


@operation(_rms, (M, N))
def rms_norm_without_weight(x):
    from liger_kernel.ops import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, None, 1e-6, 0.0, "none", False)


@operation(lambda x, w, s, t: _rms(x) * w * (1 + s) + t, (M, N), (N,), (M, N), (M, N))
def modulated_rms_norm(x, w, scale, shift):
    from liger_kernel.ops import LigerModulatedRMSNormFunction

    return LigerModulatedRMSNormFunction.apply(x, w, scale, shift, 1e-6, 0.0, "llama", False)


@operation(lambda x, r, w: (_rms(x + r) * w, x + r), (M, N), (M, N), (N,))
def fused_add_rms_norm(x, r, w):
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False)


@operation(
    lambda x, w, b: sum(w[i] * _rms(x ** (3 - i)) for i in range(3)) + b, (M, N), (3,), lambda: torch.tensor(0.3)
)
def poly_norm(x, w, b):
    from liger_kernel.ops import LigerPolyNormFunction

    return LigerPolyNormFunction.apply(x, w, b, 1e-6, False)


@operation(lambda x, w, b: F.group_norm(x, 2, w, b, 1e-6), (B, 6, 33), (6,), (6,))
def group_norm(x, w, b):
    from liger_kernel.ops import LigerGroupNormFunction

    return LigerGroupNormFunction.apply(x, w, b, 6, 2, 1e-6)


# Embeddings


@operation(lambda w, i: F.embedding(i, w), (V, H), _labels(11, V))
def embedding(w, indices):
    from liger_kernel.ops import LigerEmbeddingFunction

    return LigerEmbeddingFunction.apply(w, indices)


def _angles(*shape: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(math.prod(shape)).reshape(*shape, 1) * torch.arange(1, H // 2 + 1) / H
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


@operation(
    lambda q, k: tuple(_rotated(x, *(a[:, None].to(x.dtype) for a in _angles(1, T))) for x in (q, k)),
    (B, 4, T, H),
    (B, 2, T, H),
)
def rope(q, k):
    from liger_kernel.ops import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, *(a.to(q.dtype) for a in _angles(1, T)))


SECTIONS = [4, 6, 6]  # of the frequencies: time, height, width


def _multimodal(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    mixed = []
    for angle in _angles(3, B, T):
        parts = angle.to(q.dtype).split(SECTIONS * 2, -1)
        mixed.append(torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)[:, None])
    return tuple(_rotated(x, *mixed) for x in (q, k))


@operation(_multimodal, (B, 4, T, H), (B, 2, T, H))
def qwen2vl_mrope(q, k):
    from liger_kernel.ops import LigerQwen2VLMRopeFunction

    return LigerQwen2VLMRopeFunction.apply(q, k, *(a.to(q.dtype) for a in _angles(3, B, T)), SECTIONS, 1)


def _interleaved(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    cos, sin = (a[:, None, : H // 2].to(q.dtype) for a in _angles(T))
    out = []
    for x in (q, k):
        even, odd = x[..., ::2], x[..., 1::2]
        out.append(torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2))
    return tuple(out)


@operation(_interleaved, (B, T, 4, H), (B, T, 2, H))
def llama4_rope(q, k):
    from liger_kernel.ops import LigerLlama4RopeFunction

    cos, sin = (a[:, : H // 2] for a in _angles(T))
    return LigerLlama4RopeFunction.apply(q, k, torch.complex(cos.float(), sin.float()))


# Losses


@operation(lambda x, t: F.cross_entropy(x, t), (M, V), _labels(M, V, ignored=2))
def cross_entropy(x, target):
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(x, target)


@operation(
    lambda x, t: F.cross_entropy(torch.tanh(x / 5) * 5, t, label_smoothing=0.1, reduction="sum"),
    (M, V),
    _labels(M, V, ignored=1),
)
def cross_entropy_smoothed_and_capped(x, target):
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(x, target, label_smoothing=0.1, softcap=5.0, reduction="sum")


@operation(lambda x, t: F.cross_entropy(x.flatten(0, 1), t, reduction="none"), (3, B, V), _labels(3 * B, V))
def vocab_parallel_cross_entropy(x, target):
    from liger_kernel.ops import LigerVocabParallelCEFunction

    return LigerVocabParallelCEFunction.apply(x, target.view(3, B), None, -100, 0.0, "pytorch", "global").flatten()


@operation(lambda x, w, t: F.cross_entropy(x @ w.T, t), (T, H), (V, H), _labels(T, V, ignored=2))
def fused_linear_cross_entropy(x, w, target):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(x, w, target)


@operation(
    lambda x, w, b, t: F.cross_entropy(x @ w.T + b, t, label_smoothing=0.1),
    (T, H),
    (V, H),
    (V,),
    _labels(T, V),
)
def fused_linear_cross_entropy_with_bias(x, w, b, target):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(x, w, target, b, label_smoothing=0.1)


def _jsd(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Return the Jensen-Shannon divergence of two log-distributions, per row."""
    p, q = student.exp(), teacher.detach().exp()
    mean = torch.log((1 - beta) * p + beta * q)
    return (beta * q * (teacher.detach() - mean) + (1 - beta) * p * (student - mean)).sum() / student.shape[0]


@operation(lambda x, y: _jsd(x.log_softmax(-1), y.log_softmax(-1)), (M, N), (M, N))
def jsd(x, y):
    from liger_kernel.transformers.functional import liger_jsd

    return liger_jsd(x.log_softmax(-1), y.detach().log_softmax(-1))


@operation(
    lambda x, w, y, u: _jsd((x @ w.T).log_softmax(-1), (y @ u.T).log_softmax(-1)), (T, H), (V, H), (T, H), (V, H)
)
def fused_linear_jsd(x, w, y, u):
    from liger_kernel.transformers.functional import liger_fused_linear_jsd

    return liger_fused_linear_jsd(x, w, y.detach(), u.detach())


@operation(lambda x, y: F.kl_div(x.log_softmax(-1), y.detach().softmax(-1), reduction="batchmean"), (M, N), (M, N))
def kl_div(x, y):
    from liger_kernel.transformers.functional import liger_kl_div

    return liger_kl_div(x.log_softmax(-1), y.detach().softmax(-1), reduction="batchmean")


@operation(
    lambda x, w, y: F.kl_div((x @ w.T / 2).log_softmax(-1), y.detach().softmax(-1), reduction="batchmean"),
    (T, H),
    (V, H),
    (T, V),
)
def fused_linear_kl_div(x, w, y):
    from liger_kernel.transformers.functional import liger_fused_linear_kl_div

    return liger_fused_linear_kl_div(x, w, y.detach().softmax(-1), temperature=2.0)


@operation(
    lambda x, y: 0.5 * (x.softmax(-1) - y.detach().softmax(-1)).abs().sum() / M,
    (M, N),
    (M, N),
)
def tvd(x, y):
    from liger_kernel.transformers.functional import liger_tvd

    return liger_tvd(x.softmax(-1), y.detach().softmax(-1), reduction="batchmean")


@operation(
    lambda x, y, t: (
        F.cross_entropy(x, t, reduction="none"),
        0.5 * (x.softmax(-1) - y.detach().softmax(-1)).abs().sum(-1),
    ),
    (M, V),
    (M, V),
    _labels(M, V),
)
def fused_ce_tvd(x, y, target):
    from liger_kernel.ops import LigerFusedCETVDFunction

    return LigerFusedCETVDFunction.apply(x, y.detach(), target, -100)


def _grpo(logits: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss per token with the current policy as the old one: the ratio is 1, its gradient is not."""
    log_p = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratio = (log_p - log_p.detach()).exp()
    return -torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * advantages.detach()[:, None]


@operation(_grpo, (B, T + 1, V), lambda: torch.randint(V, (B, T)), (B,))
def grpo_loss(logits, ids, advantages):
    from liger_kernel.ops import GrpoLossFunction

    args = (None, None, ids, advantages.detach(), None, 0.9, 0.0, 0.2, 0.2, False)
    return GrpoLossFunction.apply(logits, *args, "grpo", None, False)[0]


# Attention and layers


def _multi_token(scores: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, -1e9).softmax(-1)
    return F.conv2d(probabilities, weight, bias, padding=1).masked_fill(future, 0)


@operation(_multi_token, (B, 3, T, T), (4, 3, 3, 3), (4,))
def multi_token_attention(scores, weight, bias):
    from liger_kernel.ops import LigerMultiTokenAttentionFunction

    return LigerMultiTokenAttentionFunction.apply(scores, weight, bias, 1, 1, 1, 1, False)


def _neighborhood(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = (q @ k.mT / math.sqrt(H)).masked_fill(distance.abs() > 2, -math.inf)
    return scores.softmax(-1) @ v


@operation(_neighborhood, (B, 2, T, H), (B, 2, T, H), (B, 2, T, H))
def fused_neighborhood_attention(q, k, v):
    from liger_kernel.ops import LigerFusedNeighborhoodAttentionFunction

    return LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 5, 1, None)


STREAMS = 4


def _coefficients(x: Tensor, phi: Tensor, b: Tensor, pre: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor, ...]:
    flat = x.flatten(-2)
    mix = flat @ phi * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    h_pre, h_post, h_res = mix.split([STREAMS, STREAMS, STREAMS**2], -1)
    b_pre, b_post, b_res = b.split([STREAMS, STREAMS, STREAMS**2])
    h_res = h_res * res + b_res
    h_res = h_res.unflatten(-1, (STREAMS, STREAMS)).softmax(-1) + 1e-6
    h_res = h_res / (h_res.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        h_res = h_res / (h_res.sum(-1, keepdim=True) + 1e-6)
        h_res = h_res / (h_res.sum(-2, keepdim=True) + 1e-6)
    return torch.sigmoid(h_pre * pre + b_pre), 2 * torch.sigmoid(h_post * post + b_post), h_res


def _scaled(factor: float, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape) * factor


@operation(
    _coefficients,
    (M, STREAMS, H),
    _scaled(0.05, STREAMS * H, 2 * STREAMS + STREAMS**2),
    _scaled(0.1, 2 * STREAMS + STREAMS**2),
    *[lambda: torch.tensor(0.5)] * 3,
)
def mhc_coefficients(x, phi, b, pre, post, res):
    from liger_kernel.transformers.functional import liger_mhc_coeffs

    return liger_mhc_coeffs(x, phi, b, pre, post, res, allow_fp32=True)


@operation(lambda x, h: (h[..., None] * x).sum(-2), (M, STREAMS, H), (M, STREAMS))
def mhc_pre(x, h):
    from liger_kernel.ops import LigerMHCPreFunction

    return LigerMHCPreFunction.apply(x, h)


@operation(
    lambda x, f, post, res: res @ x + post[..., None] * f[..., None, :],
    (M, STREAMS, H),
    (M, H),
    (M, STREAMS),
    (M, STREAMS, STREAMS),
)
def mhc_post_res(x, f, post, res):
    from liger_kernel.ops import LigerMHCPostResFunction

    return LigerMHCPostResFunction.apply(x, f, post, res)


def _depth_attention(v: Tensor, query: Tensor, norm: Tensor) -> Tensor:
    weights = ((_rms(v) * norm) @ query).softmax(0)
    return (weights[..., None] * v).sum(0)


@operation(_depth_attention, (5, B, T, H), (H,), (H,))
def attn_res(v, query, norm):
    from liger_kernel.ops import LigerAttnResFunction

    return LigerAttnResFunction.apply(v, query, norm, 1e-6)


EXPERTS, CHOSEN = 4, 2


def _routes() -> Tensor:
    return torch.rand(T, EXPERTS).topk(CHOSEN).indices.to(torch.int32)


def _moe(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    hidden = torch.einsum("th,tkih->tki", x, gate_up[chosen.long()])
    gate, up = hidden.chunk(2, -1)
    return torch.einsum("tki,tkhi,tk->th", F.silu(gate) * up, down[chosen.long()], weights)


@operation(
    _moe, (T, H), _scaled(0.2, EXPERTS, 2 * H, H), _scaled(0.2, EXPERTS, H, H), _routes, lambda: torch.rand(T, CHOSEN)
)
def fused_moe(x, gate_up, down, chosen, weights):
    from liger_kernel.ops import LigerFusedMoEFunction

    return LigerFusedMoEFunction.apply(x, gate_up, down, chosen, weights)


@operation(
    lambda x, g, u, d: (F.silu(x @ g.T) * (x @ u.T)) @ d.T,
    (B, T, H),
    _scaled(0.2, 64, H),
    _scaled(0.2, 64, H),
    _scaled(0.2, H, 64),
)
def mlp(x, gate, up, down):
    from liger_kernel.ops import LigerMLPFunction

    return LigerMLPFunction.apply(x, gate, up, down)

"""The minimum work of a training step, counted operator by operator on the meta device, where nothing is computed.

FLOPs are those of torch's formulas (`torch.utils.flop_counter`) for matrix multiplications and convolutions, and of
scaled_dot_product_attention for attention: half of all pairs if it is causal, and a backward pass of twice the forward
pass. Bytes are the inputs and outputs of each operator that is not a view, as if each were one kernel, and one pass of
the optimizer over parameters, gradients and moments. The model's FLOPs leave out everything that is recomputed; the
hardware's FLOPs include gradient checkpointing and the scores that a fused attention backward computes again. Where
the model asks for a condition on values, which the meta device does not have, the condition counts as true.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tilewright.cost import Cost
from tilewright.errors import TilewrightError, first_line
from tilewright.spec import matrix_unit
from tilewright.workbench.train.kinds import MATRIX, classify
from tilewright.workbench.train.workloads import Workload, build, loss_of

MOMENT_BYTES = 4  # per element and moment, in fp32
RECOMPUTED = 0.5  # a fused backward repeats half of the forward FLOPs: the scores, not their sum over values


@dataclass(frozen=True)
class Step:
    """The work of one step: costs by kind, how often each occurs, and FLOPs by unit."""

    costs: tuple[tuple[str, Cost, int], ...]
    model_flops: Mapping[str, float]
    hardware_flops: Mapping[str, float]
    parameters: int
    units: int
    unit: str

    def predict(self, rates: Mapping[str, float]) -> Prediction:
        """Return the time of a step at the given rates, if every operator is a kernel that reaches its ceiling."""
        by_kind: dict[str, float] = defaultdict(float)
        for kind, cost, count in self.costs:
            by_kind[kind] += cost.floor(rates)[1] * count
        return Prediction(dict(by_kind), sum(us for kind, us in by_kind.items() if kind in MATRIX))

    def share_of_peak(self, flops: Mapping[str, float], seconds: float, rates: Mapping[str, float]) -> float | None:
        """Return FLOPs over the time, as a share of the peak: MFU for the model's, HFU for the hardware's."""
        if not flops or not all(rates.get(unit) for unit in flops):
            return None
        return sum(amount / rates[unit] for unit, amount in flops.items()) / seconds


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step by kind, and those of GEMMs and attention alone, which no fusion can save."""

    by_kind: dict[str, float]
    matrix_s: float

    @property
    def seconds(self) -> float:
        return sum(self.by_kind.values())


def count(work: Workload) -> Step | str:
    """Return the work of a step, or why it cannot be counted."""
    try:
        plain = _count(replace(work, checkpointing=False))
        return replace(plain, hardware_flops=_count(work).hardware_flops) if work.checkpointing else plain
    except TilewrightError:
        raise
    except Exception as error:  # a user's model may use operators that have no meta kernel
        return f"the step does not run on the meta device ({first_line(error)})"


def _count(work: Workload) -> Step:
    job = build(work, "meta")
    counter = _Counter()
    with counter, _attention_as_one_kernel(counter):
        loss_of(job.model, next(job)).backward()
    counter.add("optimizer", _optimizer_cost(job.model))
    hardware = _flops(counter.costs, counter.recomputed)
    costs = tuple((kind, cost, times) for (kind, cost), times in _grouped(counter.costs).items())
    parameters = sum(p.numel() for p in job.model.parameters())
    return Step(costs, _flops(counter.costs, {}), hardware, parameters, job.units, job.unit)


def _flops(costs: list[tuple[str, Cost]], more: Mapping[str, float]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float, more)
    for _, cost in costs:
        for unit, amount in cost.flops.items():
            total[unit] += amount
    return dict(total)


def _grouped(costs: list[tuple[str, Cost]]) -> dict[tuple[str, Cost], int]:
    counted = Counter((kind, cost.read, cost.written, tuple(cost.flops.items())) for kind, cost in costs)
    return {(kind, Cost(read, written, _Flops(flops))): n for (kind, read, written, flops), n in counted.items()}


class _Flops(dict[str, float]):
    """FLOPs by unit that can be a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def _optimizer_cost(model: nn.Module) -> Cost:
    """Return the bytes of AdamW: it reads parameters, gradients and two moments, and writes all but the gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    weights, moments = sum(p.nbytes for p in trained), sum(2 * MOMENT_BYTES * p.numel() for p in trained)
    return Cost(read=2 * weights + moments, written=weights + moments)


class _Counter(TorchDispatchMode):
    """Adds up the cost of every operator that runs while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[tuple[str, Cost]] = []
        self.recomputed: dict[str, float] = defaultdict(float)

    def add(self, kind: str, cost: Cost) -> None:
        self.costs.append((kind, cost))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # a condition on values, such as "no token is masked"
        out = func(*args, **kwargs)
        name = str(func)
        if _is_view(func):
            return out
        read, written = _bytes((args, kwargs)), _bytes(out)
        formula = flop_registry.get(func.overloadpacket)
        flops = formula(*args, **kwargs, out_val=out) if formula else 0
        first = next((t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)), None)
        if flops and first is not None:
            self.add(classify((name,)), Cost(read, written, {matrix_unit(first.dtype): flops}))
        elif written:
            self.add(classify((name,)), Cost(read, written))
        return out


def _is_view(func: Any) -> bool:
    """Return whether an operator moves no data: its outputs are views of its inputs, or nothing is written."""
    returns = func._schema.returns
    is_alias = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return is_alias or func.overloadpacket in EMPTY


EMPTY = tuple(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view")
)


def _bytes(tree: Any) -> int:
    return sum(t.nbytes for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))


@contextlib.contextmanager
def _attention_as_one_kernel(counter: _Counter) -> Iterator[None]:
    """Count scaled_dot_product_attention as one kernel, which is what runs on a GPU.

    The function is replaced, because a mode for functions is not active where a backward pass recomputes layers.
    """
    original = nn.functional.scaled_dot_product_attention

    def counted(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        return _Attention.apply(query, key, value, is_causal, counter)

    nn.functional.scaled_dot_product_attention = counted  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, counter: _Counter) -> Tensor:
        ctx.save_for_backward(q, k, v)
        pairs = q.shape[-2] * k.shape[-2] * (0.5 if is_causal else 1.0)
        ctx.flops = 2 * q.shape[:-2].numel() * pairs * (q.shape[-1] + v.shape[-1])
        ctx.unit, ctx.counter = matrix_unit(q.dtype), counter
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        counter.add("attention", Cost(q.nbytes + k.nbytes + v.nbytes, out.nbytes, {ctx.unit: ctx.flops}))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        moved = q.nbytes + k.nbytes + v.nbytes
        ctx.counter.add("attention", Cost(moved + 2 * grads[0].nbytes, moved, {ctx.unit: 2 * ctx.flops}))
        ctx.counter.recomputed[ctx.unit] += RECOMPUTED * ctx.flops
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None

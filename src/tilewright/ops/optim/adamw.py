"""AdamW over many tensors: p <- p - lr (m / (sqrt(v) + eps) + weight_decay p), m and v means of g and g^2.

The means are exponential moving averages, divided by 1 - beta^step. The gradients may first be clipped to a norm. The
update is memory-bound: every tensor is read once, and all but the gradients are written once.

As an Op it takes one flat tensor of each kind and the number of tensors: `split` splits them, at odd offsets where they
are small, so that some are not aligned to 16 bytes. Kernels change their arguments, as an optimizer does. 8-bit codes
are not compared, since stochastic rounding has no single correct result; their scales are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter, not_
from typing import Any

import torch
from torch import Tensor

from tilewright.ops.optim._triton import (
    Batch,
    Step,
    clip_factor,
    decode,
    encode,
    group_scales,
    is_capturing,
    make_batches,
    num_groups,
    torch_adamw,
)
from tilewright.runtime.eligibility import FLOATS, eligible, is_interpreted
from tilewright.runtime.operator import operator
from tilewright.spec import Case, Cost, Draw, Op, points

__all__ = ["AdamW"]

MAX_NORM = 1.0  # to which the Op clips gradients
STEP = Step.of(10, 1e-3, (0.9, 0.999), 1e-8, 1e-2)
GRAIN, LARGE = 512, 2**22  # elements: the tensors of a large case are aligned to cache lines, as torch allocates them


def split_sizes(total: int, tensors: int) -> list[int]:
    """Return that many sizes, the largest 64 times the smallest, that add up to the total."""
    weights = [(1 + 5 * n % 8) ** 2 for n in range(tensors)]
    grain = GRAIN if total >= LARGE else 1
    found = [total * weight // sum(weights) // grain * grain for weight in weights]
    return [*found[:-1], total - sum(found[:-1])]


def split(tensors: int, *flat: Tensor | None) -> list[tuple[Tensor, ...]]:
    """Split flat tensors; return param, grad, moments and, for codes, scales of each tensor."""
    sizes = split_sizes(flat[0].numel(), tensors)  # type: ignore[union-attr]
    scales = [num_groups(size) for size in sizes]
    parts = [f.split(sizes if n < 4 else scales) for n, f in enumerate(flat) if f is not None]
    return list(zip(*parts, strict=True))


def reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None,
    tensors: int,
    clips: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = param.to(torch.promote_types(param.dtype, torch.float32))
    g = grad.to(wide.dtype)
    if clips:
        g = g * (MAX_NORM / (torch.linalg.vector_norm(g) + 1e-6)).clamp(max=1.0)
    if exp_avg_scale is None:
        p, m, v = torch_adamw(wide, g, exp_avg, exp_avg_sq, STEP)
        return p.to(param.dtype), m, v
    results = []
    for p, part, *state in split(tensors, wide, g, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale):
        p, m, v = torch_adamw(p, part, *decode(*state), STEP)  # type: ignore[arg-type]
        results.append((p.to(param.dtype), group_scales(m), group_scales(v.sqrt())))
    p, m, v = (torch.cat(parts) for parts in zip(*results, strict=True))
    return p, m, v


def _bytes(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


def cost(param: Tensor, grad: Tensor, *states_and_modes: Any) -> Cost:
    *states, _, clips = states_and_modes
    both = _bytes(param, *states)
    read = both + grad.nbytes * (2 if clips else 1)  # the norm needs all gradients first
    return Cost(read=read, written=both, flops={"fp32": 12 * param.numel(), "special": 2 * param.numel()})


def _inputs(draw: Draw) -> tuple[Any, ...]:
    param, grad, N = draw.randn("N"), draw.randn("N"), draw["N"]
    if not draw["coded"]:
        states = (draw.randn("N").float(), draw.randn("N").float().abs(), None, None)
    else:
        blocks = sum(num_groups(size) for size in split_sizes(N, draw["tensors"]))
        mean, root = draw.randint("N", high=254), draw.randint("N", high=256)
        mean += mean >= 127  # 127 and 255 are NaN
        scales = (draw.randn(blocks).float().abs() for _ in range(2))
        states = (mean.to(torch.uint8), root.to(torch.uint8), *scales)
    return param, grad, *states, draw["tensors"], draw["clips"]


def _is_valid(case: Case) -> bool:
    return 1 <= case["tensors"] <= 7 or case["N"] >= LARGE  # type: ignore[operator]


op = Op(
    "adamw",
    reference,
    cost,
    inputs=_inputs,
    check=points(
        N=(1, 7, 781, 5000, 9001),
        tensors=(1, 9, 3, 5, 7),
        coded=(False, False, True, False, True),
        clips=(True, False, False, True, True),
    ),
    bench=points(
        N=(2**26, 2**26, 2**26, 2**26, 2**22),
        tensors=(64, 64, 64, 300, 300),
        coded=(False, False, True, False, False),
        clips=(False, True, False, False, False),
    ),
    bench_dtypes=("bfloat16", "float32"),
    takes=_is_valid,
    mutates=lambda *_: (0, 1, 2, 3, 4, 5),
)


@op.kernel("fused", origin="baseline", fits=lambda param, *rest: param.dtype == rest[1].dtype and param.is_contiguous())
def fused(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """torch's fused kernel, after clipping by torch."""
    *_, tensors, clips = rest
    kinds = [[*kind] for kind in zip(*split(tensors, param, grad, exp_avg, exp_avg_sq), strict=True)]
    if clips:
        norm = torch.nn.utils.get_total_norm(kinds[1])
        torch._foreach_mul_(kinds[1], (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    steps = [torch.full((), 10.0, device=param.device) for _ in range(tensors)]
    torch._fused_adamw_(
        *kinds, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=1e-2, eps=1e-8, amsgrad=False, maximize=False
    )
    return param, exp_avg, exp_avg_sq


MUTATED = ("param", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


@operator("adamw", fake=lambda *_: None, mutates=MUTATED)
def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None,
    tensors: int,
    clips: bool,
) -> None:
    """One step of the tensors that these are split into."""
    parts = split(tensors, param, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale)
    grads = [part[1] for part in parts]
    batches = make_batches([part[0] for part in parts], grads, [part[2:] for part in parts])
    work = [(batch, [grads[n] for n in indices]) for batch, indices in batches]
    clip = clip_factor(work, MAX_NORM) if clips and work else None
    for batch, batch_grads in work:
        batch.update(batch_grads, clip, STEP, False)


@op.kernel("triton", language="triton")
def triton_adamw(*args: Any) -> tuple[Tensor, ...]:
    *tensors, count, clips = [a.contiguous() if isinstance(a, Tensor) else a for a in args]
    adamw_(*tensors, count, clips)
    param, _, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale = tensors
    if exp_avg_scale is not None:
        return param, exp_avg_scale, exp_avg_sq_scale
    return param, exp_avg, exp_avg_sq


SMALLEST = 4096  # elements of a tensor, below which 8-bit moments save too little
PLAIN = {Tensor, torch.nn.Parameter}
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


class AdamW(torch.optim.AdamW):
    """AdamW, with the arguments of `torch.optim.AdamW`: one launch per parameter group and dtype.

    The moments of bf16 and fp16 parameters are fp32. With max_grad_norm the update uses gradients as clipped by
    `torch.nn.utils.clip_grad_norm_`; the gradients themselves do not change, and `grad_norm` holds their norm. With
    state_bits=8 the moments of tensors of 4096 elements and more take one byte per element; `state_dict` has them in
    fp32, so that torch's optimizer can load it, and the other way round.

    With capturable=True steps are counted on the GPU, and `step()` can be captured in a CUDA graph after a step outside
    with gradients at the same addresses. A learning rate that is a tensor on the GPU is read at every replay.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        state_bits: int = 32,
        maximize: bool = False,
        capturable: bool = False,
    ):
        if state_bits not in (8, 32):
            raise ValueError(f"state_bits must be 8 or 32, not {state_bits!r}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive or None, not {max_grad_norm!r}")
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, capturable=capturable)
        self.max_grad_norm = max_grad_norm
        self.state_bits = state_bits
        self.grad_norm: Tensor | None = None  # in the last step that clipped
        self._plan: _Plan | None = None
        self._captured: tuple[_Plan, ...] = ()  # whose tables CUDA graphs read

    @property
    def _is_capturable(self) -> bool:
        return any(group["capturable"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. A closure computes the loss and its gradients; its result is returned."""
        if is_capturing() and not self._is_capturable:
            raise RuntimeError(
                "tilewright.AdamW counts steps on the host: create it with capturable=True to capture its step"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    @torch._disable_dynamo  # as torch's own: there is nothing to compile
    def _step_all(self) -> None:
        params = [*chain.from_iterable(group["params"] for group in self.param_groups)]
        grads: list[Any] = [p.grad for p in params]
        has_grad = [g is not None for g in grads]
        members = [len(group["params"]) for group in self.param_groups], [*map(id, params)], has_grad
        if not all(has_grad):
            params, grads = [*compress(params, has_grad)], [*compress(grads, has_grad)]
        if not grads:
            return
        key = _PlanKey.of(members, params, grads)
        if is_capturing():
            if self._plan is None or not self._plan.is_prepared(key):
                raise RuntimeError(
                    "a step is captured after one with gradients at the same addresses: call step() once"
                )
            self._captured += (self._plan,)
        elif self._plan is None or not self._plan.accepts(key):
            self._plan = _Plan(self, grads, key)
        self._plan.step(self, grads)

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter; create it if there is none."""
        state = self.state[p]
        if not state:
            is_coded = self.state_bits == 8 and _may_be_coded(p)
            wide = p.dtype if p.is_complex() else torch.promote_types(p.dtype, torch.float32)
            state["step"] = torch.zeros((), device=p.device if self._is_capturable else "cpu")
            for name in MOMENTS:
                state[name] = torch.zeros_like(p, dtype=torch.uint8 if is_coded else wide)
            for name in SCALES if is_coded else ():
                state[name] = torch.zeros(num_groups(p.numel()), device=p.device)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return the state that torch's AdamW would have, with moments in fp32."""
        found = super().state_dict()
        found["state"] = {key: _torch_state(state) for key, state in found["state"].items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of tilewright.AdamW or of torch's."""
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise ValueError("tilewright.AdamW does not support amsgrad, with which this state was saved")
        capturable = [group["capturable"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        self._plan = None
        for group, mine in zip(self.param_groups, capturable, strict=True):  # which of its implementations torch used
            group.update(foreach=None, fused=None, capturable=mine, differentiable=False)
        theirs = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(theirs, ours, strict=True):
            if saved := state_dict["state"].get(key):  # torch's loader rounded the moments to the parameter's dtype
                self.state[p] = {}
                _fill(self._state_of(p), saved)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan, self._captured = None, ()

    def __getstate__(self) -> dict[str, Any]:
        ours = {"max_grad_norm": self.max_grad_norm, "state_bits": self.state_bits, "grad_norm": self.grad_norm}
        return super().__getstate__() | ours


def _may_be_coded(p: Tensor) -> bool:
    return p.numel() >= SMALLEST and p.dtype in FLOATS and type(p) in PLAIN and _is_dense(p)


def _is_dense(t: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlap, in any order."""
    if t.is_contiguous():
        return True
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True


def _has_same_layout(p: Tensor, t: Tensor) -> bool:
    return t.stride() == p.stride() or (t.is_contiguous() and p.is_contiguous())


def _flat(t: Tensor) -> Tensor:
    """Return the elements of a dense tensor in memory order."""
    return t.as_strided((t.numel(),), (1,))


def _codes(state: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return *(_flat(state[name]) for name in MOMENTS), *(state[name] for name in SCALES)


def _torch_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as torch has it; what differs from ours is copied."""
    found = {name: value for name, value in state.items() if name not in SCALES}
    if "step" in found:
        found["step"] = found["step"].clone()  # a view of the plan's tensor
    if SCALES[0] in state:
        for name, value in zip(MOMENTS, decode(*_codes(state)), strict=True):  # type: ignore[arg-type]
            found[name] = value.as_strided(state[name].shape, state[name].stride())
    return found


def _fill(state: dict[str, Tensor], saved: dict[str, Any]) -> None:
    state["step"].fill_(float(saved["step"]))
    if SCALES[0] not in state:
        for name in MOMENTS:
            state[name].copy_(saved[name])
        return
    wide = [torch.empty_like(state[name], dtype=torch.float32).copy_(saved[name]) for name in MOMENTS]
    for old, new in zip(_codes(state), encode(*map(_flat, wide)), strict=True):
        old.copy_(new)


_dtype = attrgetter("dtype")
_version = attrgetter("_version")


def _versions(tensors: list[Tensor]) -> list[int]:
    return [*map(_version, tensors)]


Members = tuple[list[int], list[int], list[bool]]  # sizes of the groups; for all parameters: id, has a gradient


@dataclass
class _PlanKey:
    """The cache key of a plan. Computed at every step, so without a Python loop over the tensors."""

    members: Members
    dtypes: list[torch.dtype]
    params: list[int]  # addresses
    is_contiguous: list[bool]  # for gradients
    strides: list[tuple[int, ...]]  # for gradients that are not contiguous
    grads: list[int] = field(compare=False)  # addresses

    @staticmethod
    def of(members: Members, params: list[Tensor], grads: list[Tensor]) -> _PlanKey | None:
        """Return None where a tensor has no address: for a subclass or a sparse tensor."""
        if {*map(type, params)} - PLAIN or {*map(type, grads)} - PLAIN:
            return None
        try:
            addresses = [*map(Tensor.data_ptr, params)], [*map(Tensor.data_ptr, grads)]
        except RuntimeError:
            return None
        is_contiguous = [*map(Tensor.is_contiguous, grads)]
        strides = [*map(Tensor.stride, compress(grads, map(not_, is_contiguous)))]
        dtypes = [*map(_dtype, params), *map(_dtype, grads)]
        return _PlanKey(members, dtypes, addresses[0], is_contiguous, strides, addresses[1])

    def aligned_grads(self) -> list[bool]:
        return [address % 16 == 0 for address in self.grads]


class _Plan:
    """The launches of a step.

    A new plan is needed when parameters or gradients change, but not when only the addresses of gradients do. Gradients
    are not kept alive.
    """

    def __init__(self, optimizer: AdamW, grads: list[Tensor], key: _PlanKey | None):
        if any(g.layout is not torch.strided for g in grads):
            raise RuntimeError("tilewright.AdamW does not support sparse gradients. Use torch.optim.SparseAdam.")
        self._key = key
        members = [(n, p) for n, group in enumerate(optimizer.param_groups) for p in group["params"]]
        members = [(n, p) for n, p in members if p.grad is not None]
        states = [optimizer._state_of(p) for _, p in members]
        counts = [float(state["step"]) for state in states]
        self._is_capturable = optimizer._is_capturable
        if self._is_capturable:  # tensors of their own, to which graphs that were captured add
            for state, (_, p) in zip(states, members, strict=True):
                state["step"] = state["step"].to(p.device, torch.float32)
            self._device_steps = [state["step"] for state in states]
            self._versions = _versions(self._device_steps)
        else:
            self._steps = torch.tensor(counts)
            self._counts = self._steps.clone()
            for state, step in zip(states, self._steps.unbind(), strict=True):
                state["step"] = step  # views of one tensor, which one operation increments
        self._states = states
        self._params = [p for _, p in members]
        self._batches: list[tuple[int, Batch, list[int]]] = []  # group, and the indices of its tensors
        self._others: list[tuple[int, int]] = []  # group and index of the tensors that torch updates
        kinds: dict[Any, list[int]] = {}
        with torch.autocast(self._params[0].device.type, enabled=False):
            for n, (group, p) in enumerate(members):
                if self._is_eligible(n, grads[n]):
                    is_coded = SCALES[0] in states[n]
                    kinds.setdefault((group, p.device, p.dtype, is_coded, counts[n]), []).append(n)
                else:
                    self._others.append((group, n))
        for (group, *_), indices in kinds.items():
            moments = [tuple(states[n][name] for name in (*MOMENTS, *SCALES) if name in states[n]) for n in indices]
            params, their_grads = [self._params[n] for n in indices], [grads[n] for n in indices]
            for batch, chosen in make_batches(params, their_grads, moments):
                self._batches.append((group, batch, [indices[n] for n in chosen]))

    def _is_eligible(self, n: int, g: Tensor) -> bool:
        p, state = self._params[n], self._states[n]
        return (
            (p.is_cuda or is_interpreted(p))
            and eligible(p, g)
            and _is_dense(p)
            and all(_has_same_layout(p, t) for t in (g, state["exp_avg"], state["exp_avg_sq"]))
            and state["exp_avg"].dtype in (torch.float32, torch.uint8)
        )

    def accepts(self, key: _PlanKey | None) -> bool:
        """Return whether the plan is still valid; adopt new addresses of gradients."""
        known = self._key
        if key is None or known is None or key != known or self._counts_changed():
            return False
        if key.grads != known.grads:
            if key.aligned_grads() != known.aligned_grads():
                return False
            for _, batch, indices in self._batches:
                batch.set_gradients([*map(key.grads.__getitem__, indices)])
            self._key = key
        return True

    def is_prepared(self, key: _PlanKey | None) -> bool:
        """Return whether a step needs no table that it does not have."""
        known = self._key
        return key is not None and known is not None and key == known and key.grads == known.grads

    def _counts_changed(self) -> bool:
        """Return whether something else changed the counts of steps; without waiting for a device."""
        if self._is_capturable:
            return _versions(self._device_steps) != self._versions
        return not torch.equal(self._steps, self._counts)

    def _count(self) -> None:
        if self._is_capturable:
            torch._foreach_add_(self._device_steps, 1)
            self._versions = _versions(self._device_steps)
        else:
            self._steps += 1
            self._counts += 1

    def step(self, optimizer: AdamW, grads: list[Tensor]) -> None:
        self._count()
        work = [(batch, [*map(grads.__getitem__, indices)]) for _, batch, indices in self._batches]
        clip = self._clip(optimizer, work, grads)
        for (group, batch, indices), (_, batch_grads) in zip(self._batches, work, strict=True):
            step, maximize = self._step_of(optimizer, group, indices[0])
            batch.update(batch_grads, None if clip is None else clip.to(batch.device, torch.float32), step, maximize)
            torch.autograd.graph.increment_version(batch.params)
        for group, n in self._others:
            step, maximize = self._step_of(optimizer, group, n)
            g = -grads[n] if maximize else grads[n]
            if clip is not None:
                g = g * clip[0].to(g.device)
            _update_by_torch(self._params[n], g, self._states[n], step)

    def _step_of(self, optimizer: AdamW, group: int, n: int) -> tuple[Step, bool]:
        options = optimizer.param_groups[group]
        if self._is_capturable:
            numbers = options["lr"], options["betas"], options["eps"], options["weight_decay"]
            return Step.on_device(self._device_steps[n], *numbers), options["maximize"]
        beta1, beta2 = map(float, options["betas"])
        numbers = float(options["lr"]), (beta1, beta2), options["eps"], options["weight_decay"]
        return Step.of(self._counts[n].item(), *numbers), options["maximize"]

    def _clip(self, optimizer: AdamW, work: list[tuple[Batch, list[Tensor]]], grads: list[Tensor]) -> Tensor | None:
        """Return the factor that clips the gradients, and their norm; None without a limit."""
        max_norm = optimizer.max_grad_norm
        if max_norm is None:
            return None
        if work and not self._others and len({batch.device for batch, _ in work}) == 1:
            clip = clip_factor(work, max_norm)
        else:
            norm = torch.nn.utils.get_total_norm(grads)
            clip = torch.stack([(max_norm / (norm + 1e-6)).clamp(max=1.0), norm])
        optimizer.grad_norm = clip[1]
        return clip


def _update_by_torch(p: Tensor, g: Tensor, state: dict[str, Tensor], step: Step) -> None:
    if SCALES[0] in state:
        m, v = decode(*_codes(state))  # type: ignore[arg-type]
        grad = torch.empty_like(p, dtype=torch.float32).copy_(g)
        new, m, v = torch_adamw(_flat(p), _flat(grad), m, v, step)
        for old, code in zip(_codes(state), encode(m, v, step.seed), strict=True):
            old.copy_(code)
        _flat(p).copy_(new)
        return
    tensors: Iterable[Tensor] = (p, g, state["exp_avg"], state["exp_avg_sq"])
    p, g, m, v = (torch.view_as_real(t) if t.is_complex() else t for t in tensors)
    for old, new in zip((p, m, v), torch_adamw(p, g, m, v, step), strict=True):
        old.copy_(new)

"""AdamW over many tensors: p <- p - lr (m / (sqrt(v) + eps) + weight_decay p), m and v means of g and g^2.

The means are moving ones, over 1 - beta^step. The gradients may first be scaled so that the norm of all of them is at
most a limit. Memory binds it: every tensor is read once, and all but the gradients are written once.

As an Op it is given tensors in one run of memory each, and how many they are: `split` cuts them, at odd places where
they are small, so that some do not begin on 16 bytes. Kernels change their arguments, as an optimizer does. Codes of 8
bits are no results here, since a random rounding has no nearest truth; their scales are.
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
    Numbers,
    batched,
    clipping,
    decoded,
    encoded,
    groups,
    scale_of,
    stepped,
)
from tilewright.runtime.eligibility import FLOATS, eligible, is_interpreted
from tilewright.runtime.operator import operator
from tilewright.spec import Case, Cost, Draw, Op, points

LIMIT = 1.0  # of the norm, where the Op clips
STEP = Numbers.of(10, 1e-3, (0.9, 0.999), 1e-8, 1e-2)
GRAIN, LARGE = 512, 2**22  # elements: tensors of a large case begin on whole lines, as torch allocates them


def sizes(total: int, tensors: int) -> list[int]:
    """So many sizes, the largest 64 times the smallest, that add up to the total."""
    weights = [(1 + 5 * number % 8) ** 2 for number in range(tensors)]
    grain = GRAIN if total >= LARGE else 1
    found = [total * weight // sum(weights) // grain * grain for weight in weights]
    return [*found[:-1], total - sum(found[:-1])]


def split(tensors: int, *flat: Tensor | None) -> list[tuple[Tensor, ...]]:
    """The tensors that lie in these: for each its param, grad, moments and, of codes, scales."""
    parts = sizes(flat[0].numel(), tensors)  # type: ignore[union-attr]
    coded = [groups(size) for size in parts]
    cuts = [f.split(parts if n < 4 else coded) for n, f in enumerate(flat) if f is not None]
    return list(zip(*cuts, strict=True))


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
        g = g * (LIMIT / (torch.linalg.vector_norm(g) + 1e-6)).clamp(max=1.0)
    if exp_avg_scale is None:
        p, m, v = stepped(wide, g, exp_avg, exp_avg_sq, STEP)
        return p.to(param.dtype), m, v
    results = []
    for p, part, *state in split(tensors, wide, g, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale):
        p, m, v = stepped(p, part, *decoded(*state), STEP)  # type: ignore[arg-type]
        results.append((p.to(param.dtype), scale_of(m), scale_of(v.sqrt())))
    p, m, v = (torch.cat(parts) for parts in zip(*results, strict=True))
    return p, m, v


def _bytes(*tensors: Tensor | None) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


def cost(param: Tensor, grad: Tensor, *states_and_modes: Any) -> Cost:
    *states, _, clips = states_and_modes
    both = _bytes(param, *states)
    read = both + grad.nbytes * (2 if clips else 1)  # the norm is known when all gradients have been read
    return Cost(read=read, written=both, flops={"fp32": 12 * param.numel(), "special": 2 * param.numel()})


def _inputs(draw: Draw) -> tuple[Any, ...]:
    param, grad, N = draw.randn("N"), draw.randn("N"), draw["N"]
    if not draw["coded"]:
        states = (draw.randn("N").float(), draw.randn("N").float().abs_(), None, None)
    else:
        blocks = sum(groups(size) for size in sizes(N, draw["tensors"]))
        mean, root = draw.randint("N", high=254), draw.randint("N", high=256)
        mean += mean >= 127  # which is not a number, as 255 is
        scales = (draw.randn(blocks).float().abs() for _ in range(2))
        states = (mean.to(torch.uint8), root.to(torch.uint8), *scales)
    return param, grad, *states, draw["tensors"], draw["clips"]


def _takes(case: Case) -> bool:
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
    takes=_takes,
    mutates=lambda *_: (0, 1, 2, 3, 4, 5),
)


@op.kernel("fused", is_baseline=True, fits=lambda param, *rest: param.dtype == rest[1].dtype and param.is_contiguous())
def fused(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """torch's fused kernel, after torch's clipping."""
    *_, tensors, clips = rest
    kinds = [[*kind] for kind in zip(*split(tensors, param, grad, exp_avg, exp_avg_sq), strict=True)]
    if clips:
        norm = torch.nn.utils.get_total_norm(kinds[1])
        torch._foreach_mul_(kinds[1], (LIMIT / (norm + 1e-6)).clamp(max=1.0))
    steps = [torch.full((), 10.0, device=param.device) for _ in range(tensors)]
    torch._fused_adamw_(
        *kinds, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=1e-2, eps=1e-8, amsgrad=False, maximize=False
    )
    return param, exp_avg, exp_avg_sq


def _nothing(*_: object) -> None:
    pass


@operator(
    "adamw",
    fake=_nothing,
    mutates=("param", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"),
)
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
    """A step of the tensors that lie in these."""
    parts = split(tensors, param, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale)
    grads = [part[1] for part in parts]
    batches = batched([part[0] for part in parts], grads, [part[2:] for part in parts])
    work = [(batch, [grads[n] for n in numbers]) for batch, numbers in batches]
    clip = clipping(work, LIMIT) if clips and work else None
    for batch, some in work:
        batch.update(some, clip, STEP, False)


@op.kernel("triton", language="triton")
def triton_adamw(*args: Any) -> tuple[Tensor, ...]:
    *tensors, count, clips = [a.contiguous() if isinstance(a, Tensor) else a for a in args]
    adamw_(*tensors, count, clips)
    param, _, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale = tensors
    if exp_avg_scale is not None:
        return param, exp_avg_scale, exp_avg_sq_scale
    return param, exp_avg, exp_avg_sq


SMALLEST = 4096  # elements of a tensor whose moments are kept in 8 bits; below it nothing is saved
PLAIN = {Tensor, torch.nn.Parameter}
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


class AdamW(torch.optim.AdamW):
    """As `torch.optim.AdamW`: a launch for all tensors of a group and dtype where our kernel fits, a formula in torch
    elsewhere.

    The moments of bf16 and fp16 parameters are fp32. With max_grad_norm the gradients count as if
    `torch.nn.utils.clip_grad_norm_` had been called on all of them; they stay as they are, and `grad_norm` holds their
    norm. With state_bits=8 the moments of tensors of 4096 elements and more take a byte an element; `state_dict` has
    them in fp32, as torch's has, so that either loads the other's.
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
    ):
        if state_bits not in (8, 32):
            raise ValueError(f"state_bits is 8 or 32, not {state_bits!r}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is a positive number or None, not {max_grad_norm!r}")
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)
        self.max_grad_norm = max_grad_norm
        self.state_bits = state_bits
        self.grad_norm: Tensor | None = None  # of the last step that clipped
        self._plan: _Plan | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; a closure computes the loss, and its value is returned."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("tilewright.AdamW cannot be captured in a CUDA graph: it counts its steps on the host")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    @torch._disable_dynamo  # as torch's own: nothing here is worth a graph
    def _step_all(self) -> None:
        params = [*chain.from_iterable(group["params"] for group in self.param_groups)]
        grads: list[Any] = [p.grad for p in params]
        given = [g is not None for g in grads]
        whose = [len(group["params"]) for group in self.param_groups], [*map(id, params)], given
        if not all(given):
            params, grads = [*compress(params, given)], [*compress(grads, given)]
        if not grads:
            return
        facts = _Facts.of(whose, params, grads)
        if self._plan is None or not self._plan.follows(facts):
            self._plan = _Plan(self, grads, facts)
        self._plan.step(self, grads)

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, made where there is none."""
        state = self.state[p]
        if not state:
            is_coded = self.state_bits == 8 and _may_be_coded(p)
            wide = p.dtype if p.is_complex() else torch.promote_types(p.dtype, torch.float32)
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = torch.zeros_like(p, dtype=torch.uint8 if is_coded else wide)
            for name in SCALES if is_coded else ():
                state[name] = torch.zeros(groups(p.numel()), device=p.device)
        return state

    def state_dict(self) -> dict[str, Any]:
        """As torch's AdamW has it: moments in fp32."""
        made = super().state_dict()
        made["state"] = {key: _plain(state) for key, state in made["state"].items()}
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A state of ours or of torch's AdamW."""
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise ValueError("tilewright.AdamW has no amsgrad, and this state was made with it")
        super().load_state_dict(state_dict)
        self._plan = None
        for group in self.param_groups:  # ways of torch's own to compute it
            group.update(foreach=None, fused=None, capturable=False, differentiable=False)
        theirs = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(theirs, ours, strict=True):
            if saved := state_dict["state"].get(key):  # torch has rounded the moments to the parameter's dtype
                self.state[p] = {}
                _fill(self._state_of(p), saved)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan = None

    def __getstate__(self) -> dict[str, Any]:
        ours = {"max_grad_norm": self.max_grad_norm, "state_bits": self.state_bits, "grad_norm": self.grad_norm}
        return super().__getstate__() | ours


def _may_be_coded(p: Tensor) -> bool:
    return p.numel() >= SMALLEST and p.dtype in FLOATS and type(p) in PLAIN and _is_run(p)


def _is_run(t: Tensor) -> bool:
    """Whether its elements fill a run of memory, in whatever order."""
    if t.is_contiguous():
        return True
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True


def _lies_like(p: Tensor, t: Tensor) -> bool:
    return t.stride() == p.stride() or (t.is_contiguous() and p.is_contiguous())


def _in_memory(t: Tensor) -> Tensor:
    """Its elements in the order in which they lie."""
    return t.as_strided((t.numel(),), (1,))


def _codes(state: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return *(_in_memory(state[name]) for name in MOMENTS), *(state[name] for name in SCALES)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state as torch's, of tensors that are no one else's where ours are not as torch's."""
    found = {name: value for name, value in state.items() if name not in SCALES}
    if "step" in found:
        found["step"] = found["step"].clone()  # it is an element of a plan's
    if SCALES[0] in state:
        for name, value in zip(MOMENTS, decoded(*_codes(state)), strict=True):  # type: ignore[arg-type]
            found[name] = value.as_strided(state[name].shape, state[name].stride())
    return found


def _fill(state: dict[str, Tensor], saved: dict[str, Any]) -> None:
    state["step"] = torch.tensor(float(saved["step"]))
    if SCALES[0] not in state:
        for name in MOMENTS:
            state[name].copy_(saved[name])
        return
    wide = [torch.empty_like(state[name], dtype=torch.float32).copy_(saved[name]) for name in MOMENTS]
    for mine, new in zip(_codes(state), encoded(*map(_in_memory, wide)), strict=True):
        mine.copy_(new)


_dtype = attrgetter("dtype")


@dataclass
class _Facts:
    """What a plan depends on. It is found at every step, so no line of Python is spent on a tensor."""

    whose: tuple[list[int], list[int], list[bool]]  # how many parameters groups have, which ones, and if with gradients
    dtypes: list[torch.dtype]
    param_places: list[int]
    contiguous: list[bool]  # gradients
    strides: list[tuple[int, ...]]  # of those that are not
    places: list[int] = field(compare=False)  # of gradients

    @staticmethod
    def of(whose: tuple[list[int], list[int], list[bool]], params: list[Tensor], grads: list[Tensor]) -> _Facts | None:
        """Nothing where a tensor has no address: a subclass, or a sparse one."""
        if {*map(type, params)} - PLAIN or {*map(type, grads)} - PLAIN:
            return None
        try:
            param_places, places = [*map(Tensor.data_ptr, params)], [*map(Tensor.data_ptr, grads)]
        except RuntimeError:
            return None
        contiguous = [*map(Tensor.is_contiguous, grads)]
        strides = [*map(Tensor.stride, compress(grads, map(not_, contiguous)))]
        return _Facts(whose, [*map(_dtype, params), *map(_dtype, grads)], param_places, contiguous, strides, places)

    def are_aligned(self) -> list[bool]:
        return [place % 16 == 0 for place in self.places]


class _Plan:
    """What a step launches: settled when parameters or gradients change, but not when gradients only move. Gradients
    are not kept alive."""

    def __init__(self, optimizer: AdamW, grads: list[Tensor], facts: _Facts | None):
        if any(g.layout is not torch.strided for g in grads):
            raise RuntimeError("tilewright.AdamW does not take sparse gradients")
        self._facts = facts
        members = [(n, p) for n, group in enumerate(optimizer.param_groups) for p in group["params"]]
        members = [(n, p) for n, p in members if p.grad is not None]
        states = [optimizer._state_of(p) for _, p in members]
        self._steps = torch.tensor([float(state["step"]) for state in states])
        self._counts, counts = self._steps.clone(), self._steps.tolist()
        for state, step in zip(states, self._steps.unbind(), strict=True):
            state["step"] = step  # elements of one tensor, which count together
        self._states = states
        self._params = [p for _, p in members]
        self._jobs: list[tuple[int, Batch, list[int]]] = []  # group, and which tensors
        self._others: list[tuple[int, int]] = []  # group and tensor
        kinds: dict[Any, list[int]] = {}
        with torch.autocast(self._params[0].device.type, enabled=False):
            for number, (group, p) in enumerate(members):
                if self._fits(number, grads[number]):
                    is_coded = SCALES[0] in states[number]
                    kinds.setdefault((group, p.device, p.dtype, is_coded, counts[number]), []).append(number)
                else:
                    self._others.append((group, number))
        for (group, *_), numbers in kinds.items():
            kept = [tuple(states[n][name] for name in (*MOMENTS, *SCALES) if name in states[n]) for n in numbers]
            for batch, some in batched([self._params[n] for n in numbers], [grads[n] for n in numbers], kept):
                self._jobs.append((group, batch, [numbers[n] for n in some]))

    def _fits(self, number: int, g: Tensor) -> bool:
        p, state = self._params[number], self._states[number]
        return (
            (p.is_cuda or is_interpreted(p))
            and eligible(p, g)
            and _is_run(p)
            and all(_lies_like(p, t) for t in (g, state["exp_avg"], state["exp_avg_sq"]))
            and state["exp_avg"].dtype in (torch.float32, torch.uint8)
        )

    def follows(self, facts: _Facts | None) -> bool:
        """Whether it holds still, now with gradients in these places."""
        known = self._facts
        if facts is None or known is None or facts != known or not torch.equal(self._steps, self._counts):
            return False
        if facts.places != known.places:
            if facts.are_aligned() != known.are_aligned():
                return False
            for _, batch, numbers in self._jobs:
                batch.follow([*map(facts.places.__getitem__, numbers)])
            self._facts = facts
        return True

    def step(self, optimizer: AdamW, grads: list[Tensor]) -> None:
        self._steps += 1
        self._counts += 1
        work = [(batch, [*map(grads.__getitem__, numbers)]) for _, batch, numbers in self._jobs]
        clip = self._clip(optimizer, work, grads)
        for (group, batch, numbers), (_, some) in zip(self._jobs, work, strict=True):
            by, maximize = self._numbers(optimizer, group, numbers[0])
            batch.update(some, None if clip is None else clip.to(batch.device, torch.float32), by, maximize)
            torch.autograd.graph.increment_version(batch.params)
        for group, number in self._others:
            by, maximize = self._numbers(optimizer, group, number)
            g = -grads[number] if maximize else grads[number]
            if clip is not None:
                g = g * clip[0].to(g.device)
            _step_by_torch(self._params[number], g, self._states[number], by)

    def _numbers(self, optimizer: AdamW, group: int, number: int) -> tuple[Numbers, bool]:
        of = optimizer.param_groups[group]
        beta1, beta2 = map(float, of["betas"])
        by = Numbers.of(self._counts[number].item(), float(of["lr"]), (beta1, beta2), of["eps"], of["weight_decay"])
        return by, of["maximize"]

    def _clip(self, optimizer: AdamW, work: list[tuple[Batch, list[Tensor]]], grads: list[Tensor]) -> Tensor | None:
        """What gradients are multiplied by, and their norm."""
        limit = optimizer.max_grad_norm
        if limit is None:
            return None
        if work and not self._others and len({batch.device for batch, _ in work}) == 1:
            clip = clipping(work, limit)
        else:
            norm = torch.nn.utils.get_total_norm(grads)
            clip = torch.stack([(limit / (norm + 1e-6)).clamp(max=1.0), norm])
        optimizer.grad_norm = clip[1]
        return clip


def _step_by_torch(p: Tensor, g: Tensor, state: dict[str, Tensor], by: Numbers) -> None:
    if SCALES[0] in state:
        m, v = decoded(*_codes(state))  # type: ignore[arg-type]
        flat = torch.empty_like(p, dtype=torch.float32).copy_(g)
        new, m, v = stepped(_in_memory(p), _in_memory(flat), m, v, by)
        for mine, code in zip(_codes(state), encoded(m, v, by.seed), strict=True):
            mine.copy_(code)
        _in_memory(p).copy_(new)
        return
    tensors: Iterable[Tensor] = (p, g, state["exp_avg"], state["exp_avg_sq"])
    p, g, m, v = (torch.view_as_real(t) if t.is_complex() else t for t in tensors)
    for mine, new in zip((p, m, v), stepped(p, g, m, v, by), strict=True):
        mine.copy_(new)

"""Turn an AdamW optimizer into ours in place, so that training loops keep their reference to it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tilewright.ops.optim.adamw import AdamW

OURS: dict[str, Any] = {"max_grad_norm": None, "state_bits": 32, "grad_norm": None, "_plan": None, "_captured": ()}
FLAGS = ("foreach", "fused")  # which of its implementations torch uses
SCALES = "_step_supports_amp_scaling"  # torch's fused step unscales gradients itself, ours leaves that to GradScaler
SCHEDULED = "_wrapped_by_lr_sched"  # marks the wrapper with which a scheduler notices steps


class SwappedOptimizer:
    """An optimizer of torch's whose class is now ours, with its state."""

    def __init__(self, optimizer: torch.optim.Optimizer, state_bits: int = 32):
        if state_bits not in (8, 32):
            raise ValueError(f"state_bits must be 8 or 32, not {state_bits!r}")
        if type(optimizer) is AdamW:
            raise ValueError("the optimizer is a tilewright.AdamW already: leave it out")
        if type(optimizer) is not torch.optim.AdamW:
            raise ValueError(f"the optimizer must be a torch.optim.AdamW, not {type(optimizer).__name__}")
        self._step = vars(optimizer).get("step")
        if self._step is not None and not hasattr(self._step, SCHEDULED):
            raise ValueError("something wraps the optimizer's step: call apply() before")
        for flag in ("amsgrad", "differentiable"):
            if any(group[flag] for group in optimizer.param_groups):
                raise ValueError(f"the optimizer has {flag}=True, which tilewright.AdamW does not support")
        self.optimizer = optimizer
        self._flags = [{flag: group[flag] for flag in FLAGS} for group in optimizer.param_groups]
        self._scales = vars(optimizer).get(SCALES)
        before, state, groups = dict(vars(optimizer)), optimizer.state_dict(), [*optimizer.param_groups]
        contents = [dict(group) for group in groups]
        try:
            optimizer.__class__ = AdamW
            vars(optimizer).update(OURS, state_bits=state_bits)
            vars(optimizer).pop(SCALES, None)
            self._load(state)
            if self._step is not None:
                vars(optimizer)["step"] = _counted(optimizer)
        except BaseException:  # such as too little memory for the moments
            optimizer.__class__ = torch.optim.AdamW
            vars(optimizer).clear()
            vars(optimizer).update(before)
            for group, content in zip(groups, contents, strict=True):
                group.clear()
                group.update(content)
            raise

    def revert(self) -> None:
        """Restore the class. The moments stay as they are, in the parameters' dtype. A second call does nothing."""
        optimizer = self.optimizer
        if type(optimizer) is not AdamW:
            return
        state = optimizer.state_dict()
        for group, flags in zip(state["param_groups"], self._flags, strict=False):  # first: they place the step counts
            group.update(flags)
        optimizer.__class__ = torch.optim.AdamW  # type: ignore[assignment]
        for name in OURS:
            del vars(optimizer)[name]
        if self._scales is not None:
            vars(optimizer)[SCALES] = self._scales
        if self._step is not None:
            vars(optimizer)["step"] = self._step
        self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        """Load a state into the same groups: others may hold them, to change their learning rates."""
        groups = [*self.optimizer.param_groups]
        self.optimizer.load_state_dict(state)
        loaded = [*self.optimizer.param_groups]
        for group, new in zip(groups, loaded, strict=True):
            group.clear()
            group.update(new)
        self.optimizer.param_groups = groups


def _counted(optimizer: Any) -> Any:
    """Return a step that tells the scheduler that it was called, as the scheduler's own wrapper does."""
    found = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        stepped: Any = found()
        stepped._opt_called = True
        return type(stepped).step(stepped, *args, **kwargs)

    setattr(step, SCHEDULED, True)
    return step

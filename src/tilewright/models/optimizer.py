"""Turn an AdamW optimizer into ours in place, so that training loops keep their reference to it."""

from __future__ import annotations

import torch

from tilewright.ops.optim.adamw import AdamW

OURS = {"max_grad_norm": None, "state_bits": 32, "grad_norm": None, "_plan": None}
FLAGS = ("foreach", "fused")  # which of its implementations torch uses


class SwappedOptimizer:
    """An optimizer of torch's whose class is now ours, with its state."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        if type(optimizer) is not torch.optim.AdamW:
            raise ValueError(f"the optimizer must be a torch.optim.AdamW, not {type(optimizer).__name__}")
        if "step" in vars(optimizer):
            raise ValueError("something wraps the optimizer's step: call apply() before creating a scheduler")
        for flag in ("amsgrad", "capturable", "differentiable"):
            if any(group[flag] for group in optimizer.param_groups):
                raise ValueError(f"the optimizer has {flag}=True, which tilewright.AdamW does not support")
        self.optimizer = optimizer
        self._flags = [{flag: group[flag] for flag in FLAGS} for group in optimizer.param_groups]
        state = optimizer.state_dict()
        optimizer.__class__ = AdamW
        vars(optimizer).update(OURS)
        optimizer.load_state_dict(state)

    def revert(self) -> None:
        """Restore the class. The moments stay as they are, in the parameters' dtype. A second call does nothing."""
        if type(self.optimizer) is not AdamW:
            return
        state = self.optimizer.state_dict()
        self.optimizer.__class__ = torch.optim.AdamW  # type: ignore[assignment]
        for name in OURS:
            del vars(self.optimizer)[name]
        self.optimizer.load_state_dict(state)
        for group, flags in zip(self.optimizer.param_groups, self._flags, strict=False):
            group.update(flags)

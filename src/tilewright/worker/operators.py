"""Record the torch operators that a kernel calls, and run torch's opcheck on the operators it has registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.errors import MissingPackage, first_line

TORCH_NAMESPACES = {"aten", "prim", "prims", "profiler", "inductor", "rngprims", "_c10d_functional", "c10d"}
TORCH_NAMESPACES |= {"debugprims"}


class Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import torch._dynamo to skip it, which takes seconds."""
        return False


class _CustomOperatorRecorder(Mode):
    """Records the arguments of the first call of every operator that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in TORCH_NAMESPACES and func not in self.found:
            copies = pytree.tree_map(lambda a: a.detach().clone() if isinstance(a, Tensor) else a, (args, kwargs or {}))
            self.found[func] = copies
        return func(*args, **(kwargs or {}))


class TorchCallRecorder(Mode):
    """Records the calls of torch's own operators, including those inside custom operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            if func.namespace not in TORCH_NAMESPACES:
                # Call its kernel directly: a normal call would come back here.
                return func.redispatch(_backend(args), *args, **kwargs)
            # torch decomposes before it calls a mode, but not inside a custom operator.
            decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        sizes = [a.numel() for a in pytree.tree_leaves(args) if isinstance(a, Tensor)]
        self.calls.append((func.name(), max(sizes, default=0)))
        return func(*args, **kwargs)


def _backend(args: Any) -> Any:
    is_cuda = any(a.device.type == "cuda" for a in pytree.tree_leaves(args) if isinstance(a, Tensor))
    return torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA if is_cuda else torch._C.DispatchKey.CPU)


def opcheck_custom_operators(
    fn: Callable[..., Any], args: Sequence[Any], needs: Sequence[int], grads: Sequence[Tensor | None]
) -> tuple[list[str], str | None]:
    """Return the custom operators that a call uses, and the first failure that torch.library.opcheck reports."""
    leaves = [a.detach().requires_grad_() if number in needs else a for number, a in enumerate(args)]
    forward, backward = _CustomOperatorRecorder(), _CustomOperatorRecorder()
    try:
        with forward, torch.set_grad_enabled(bool(grads)):
            outputs = pytree.tree_leaves(fn(*leaves))
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=False) if g is not None and o.requires_grad]
        if pairs:
            inputs = [leaves[number] for number in needs]
            with backward:
                torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
    except MissingPackage:
        raise
    except Exception:  # some kernels run plainly but not under a dispatch mode
        return [], None
    for operator, (positional, named) in {**backward.found, **forward.found}.items():
        if operator in forward.found and grads:
            positional = [
                a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in positional
            ]
        try:
            torch.library.opcheck(operator, tuple(positional), named)
        except Exception as error:
            return [operator.name()], f"{operator.name()} fails torch's opcheck: {first_line(error.__cause__ or error)}"
    return [operator.name() for operator in {**backward.found, **forward.found}], None

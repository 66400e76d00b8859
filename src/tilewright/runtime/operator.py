"""Operators of ours: registered with torch, yet called past its dispatcher where nothing listens there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

NAMESPACE = "tilewright"


class Operator:
    """`tilewright::<name>`: a function of tensors, with gradients where they are given.

    torch.compile, export, fake tensors and dispatch modes see one registered operator. A plain call goes straight to
    the function, or through an autograd node of its own: the way through the dispatcher costs the host more than a
    small kernel takes to run.
    """

    def __init__(self, name: str, function: Callable[..., Any], fake: Callable[..., Any], mutates: tuple[str, ...]):
        self.function = function
        self._name = f"{NAMESPACE}::{name}"
        self._apply: Callable[..., Any] | None = None  # with an autograd node
        torch.library.define(self._name, torch.library.infer_schema(function, mutates_args=mutates))
        torch.library.impl(self._name, ("CPU", "CUDA"))(function)
        torch.library.register_fake(self._name)(fake)
        self.registered = getattr(getattr(torch.ops, NAMESPACE), name).default
        arguments = self.registered._schema.arguments
        self._tensors = [n for n, arg in enumerate(arguments) if str(arg.type) in ("Tensor", "Optional[Tensor]")]

    def differentiate(self, save: Callable[..., None], backward: Callable[..., Any]) -> None:
        """Give it gradients: `save(ctx, inputs, output)` after a call, `backward(ctx, *grads)` later."""
        function = self.function

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                output = function(*args)
                save(ctx, args, output)
                return output

        Node.backward = staticmethod(backward)
        self._apply = applying(Node, self._tensors)
        torch.library.register_autograd(self._name, backward, setup_context=save)

    def __call__(self, *args: Any) -> Any:
        if is_seen():
            return self.registered(*args)
        if self._apply is not None and torch.is_grad_enabled():
            for n in self._tensors:
                arg = args[n]
                if arg is not None and arg.requires_grad:
                    return self._apply(*args)
        return self.function(*args)


def applying(node: type[torch.autograd.Function], tensors: Sequence[int]) -> Callable[..., Any]:
    """`node.apply`, which asks every argument whether it is a tensor that has left a functional transform: here only
    those are asked, by their numbers, that can be tensors."""
    apply = super(torch.autograd.Function, node).apply  # type: ignore[misc]

    def applied(*args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return node.apply(*args)
        unwrapped = [*args]
        for n in tensors:
            if args[n] is not None:
                unwrapped[n] = unwrap_if_dead(args[n])
        return apply(*unwrapped)

    return applied


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether gradients of a call with these will be wanted."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def spread(values: Iterable[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """One after the other where it is wanted, nothing elsewhere."""
    rest = iter(values)
    return [next(rest) if is_wanted else None for is_wanted in wanted]


def is_seen() -> bool:
    """Whether a call is traced, or somebody listens to torch's dispatcher: then it must go there."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def operator(
    name: str, fake: Callable[..., Any], *, mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Operator]:
    """Make an Operator of a function. `fake` tells shapes and dtypes; `mutates` names the arguments it changes."""
    return lambda function: Operator(name, function, fake, mutates)


def contiguous_like(x: Tensor, *_: object) -> Tensor:
    """The result of an operator that keeps the shape and dtype of its first argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)

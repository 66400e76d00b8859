"""Operators registered with torch, called past its dispatcher where nothing observes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

NAMESPACE = "tilewright"


class Operator:
    """`tilewright::<name>`: a function of tensors and options, differentiable if given a backward.

    torch.compile, export, fake tensors and dispatch modes see one registered operator. A plain call goes straight to
    the function, or through an autograd node of its own: the dispatcher costs the host more than a small kernel takes.
    Tensors are the first parameters. The last one may be a NamedTuple of options, whose fields the registered operator
    takes one by one, since a torch schema knows no structures.
    """

    def __init__(self, name: str, function: Callable[..., Any], fake: Callable[..., Any], mutates: tuple[str, ...]):
        self.function = function
        self._name = f"{NAMESPACE}::{name}"
        self._apply: Callable[..., Any] | None = None  # with an autograd node
        parameters, self._options = _flat_parameters(function)
        schema = torch.library.infer_schema(_prototype(function, parameters), mutates_args=mutates)
        torch.library.define(self._name, schema)
        torch.library.impl(self._name, ("CPU", "CUDA"))(self._grouping(function))
        torch.library.register_fake(self._name)(self._grouping(fake))
        self.registered = getattr(getattr(torch.ops, NAMESPACE), name).default
        arguments = self.registered._schema.arguments
        self._tensors = [n for n, arg in enumerate(arguments) if str(arg.type) in ("Tensor", "Optional[Tensor]")]

    def differentiate(self, save: Callable[..., None], backward: Callable[..., Any]) -> None:
        """Give it gradients: `save(ctx, inputs, output)` runs after forward, `backward(ctx, *grads)` later.

        `backward` returns the gradients of the first arguments; those it leaves out have none.
        """
        function = self.function

        def padded_backward(ctx: Any, *grads: Any) -> Any:
            found = backward(ctx, *grads)
            found = found if isinstance(found, tuple) else (found,)
            return *found, *[None] * (len(ctx.needs_input_grad) - len(found))

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                output = function(*args)
                save(ctx, args, output)
                return output

        Node.backward = staticmethod(padded_backward)
        self._apply = fast_apply(Node, self._tensors)
        save_flat = lambda ctx, inputs, output: save(ctx, self._group(inputs), output)
        torch.library.register_autograd(self._name, padded_backward, setup_context=save_flat)

    def __call__(self, *args: Any) -> Any:
        if is_observed():
            return self.registered(*self._flatten(args))
        if self._apply is not None and torch.is_grad_enabled():
            for n in self._tensors:
                arg = args[n]
                if arg is not None and arg.requires_grad:
                    return self._apply(*args)
        return self.function(*args)

    def _flatten(self, args: Sequence[Any]) -> Sequence[Any]:
        return args if self._options is None else (*args[:-1], *args[-1])

    def _group(self, args: Sequence[Any]) -> Sequence[Any]:
        if self._options is None:
            return args
        first = len(args) - len(self._options._fields)
        options = [tuple(arg) if isinstance(arg, list) else arg for arg in args[first:]]  # plans are cached by them
        return (*args[:first], self._options(*options))

    def _grouping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self._options is None else lambda *args: function(*self._group(args))


def _flat_parameters(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], Any]:
    """Return the parameters with options as single fields, and the class of the options."""
    hints = get_type_hints(function)
    parameters = [p.replace(annotation=hints[p.name]) for p in inspect.signature(function).parameters.values()]
    options = parameters[-1].annotation
    if not hasattr(options, "_fields"):
        return parameters, None
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fields = [inspect.Parameter(name, kind, annotation=hint) for name, hint in get_type_hints(options).items()]
    return [*parameters[:-1], *fields], options


def _prototype(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> Callable[..., Any]:
    """Return a function that has nothing but the signature that torch derives a schema from."""

    def prototype() -> None: ...

    returned = get_type_hints(function)["return"]
    returned = None if returned is type(None) else returned
    prototype.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return prototype


def fast_apply(node: type[torch.autograd.Function], tensors: Sequence[int]) -> Callable[..., Any]:
    """Return `node.apply` that unwraps only the arguments that can be tensors, given by their positions.

    torch's own asks every argument whether it is a tensor left over from a functional transform.
    """
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


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd will want gradients of one of these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def scatter(values: Iterable[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the values in order at the positions where one is wanted, None at the others."""
    rest = iter(values)
    return [next(rest) if is_wanted else None for is_wanted in wanted]


def is_observed() -> bool:
    """Return whether the call is traced or a dispatch mode is active, so that it must go through torch's dispatcher."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def constant_when_compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile call a function while it traces, and take the result as a constant.

    torch.compiler.assume_constant_result sets the same attribute, but first loads torch._dynamo, which takes seconds.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def operator(
    name: str, fake: Callable[..., Any], *, mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Operator]:
    """Make an Operator of a function.

    `fake` returns outputs of the right shape and dtype; `mutates` names the arguments that the function writes to.
    """
    return lambda function: Operator(name, function, fake, mutates)


def contiguous_like(x: Tensor, *_: object) -> Tensor:
    """Return an uninitialized contiguous tensor of the shape and dtype of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)

"""One call of a kernel, watched: what it returns, what it did to memory, and what it called on the way."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewright.errors import KernelStopped, MissingPackage, first_line
from tilewright.interpreter import interpret
from tilewright.worker.memory import Placed, free_memory, guarded
from tilewright.worker.operators import TorchCalls, check_operators

GRAPHS = 4096  # of one function
# How a kernel is called.
PLAIN, COMPILED, OPERATORS, SEEN = "", "under torch.compile", "registered operators", "seen through"


class KernelFailed(Exception):
    """The kernel gave no result to compare. `kind` is a verdict (crashed, timeout, wrong, tampered, unsupported),
    memory where this one call needs too much of it or, for a file that cannot be loaded, usage."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Like:
    """What a result must look like before its values are looked at."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Request:
    """A call: arguments, the incoming gradients of its floating-point results (None: no gradient of that one), which
    arguments need a gradient, and what the results must look like."""

    args: list[Any]  # Placed, or a value as it is
    wanted: list[Like]
    is_single: bool = True  # a tensor is wanted, not a collection of them
    grads: list[Placed | None] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    how: str = PLAIN
    watched: bool = True  # False: torch is left as it is
    same_memory: bool = False  # put the inputs where those of the last call were
    repeat: int = 1  # make these arguments so many times longer along their first dimension
    repeated: list[int] = field(default_factory=list)


@dataclass
class Reply:
    outputs: list[Tensor]
    gradients: list[Tensor | None]  # none at all: torch cannot differentiate it
    memory: list[Tensor]  # that of each placed argument, after the call
    calls: list[tuple[str, int]] = field(default_factory=list)  # torch's operators, and the elements of their input


class Stage:
    """Keeps the memory of the last inputs, and the last results, to see whether the next call touches them."""

    def __init__(self, device: str):
        self._device = device
        self._inputs: list[Any] = []
        self._results: list[Tensor] = []

    def perform(self, fn: Callable[..., Any], request: Request) -> Reply:
        scribbled = _scribble_on(self._results)
        self._results = []
        placed, args = self._place(request)
        _other_work(self._device)
        calls: list[tuple[str, int]] = []
        with failures(request.how), any_number_of_graphs():
            outputs, gradients, complaint = self._call(fn, args, request, calls)
        if any(not torch.isnan(result).all() for result in scribbled):
            raise KernelFailed("wrong", "the call changed the result of the call before")
        if complaint:
            raise KernelFailed("wrong", complaint)
        self._results = [r for r in self._results if not _lies_in(r, placed)]
        return Reply(outputs, gradients, [p.memory for p in placed], calls)

    def blocks(self, numbers: Sequence[int], size: int) -> list[list[Tensor]]:
        """Parts of the last results: those of so many rows, by number."""
        return [[result[n * size : (n + 1) * size] for result in self._results] for n in numbers]

    def _place(self, request: Request) -> tuple[list[Placed], list[Any]]:
        if request.same_memory:
            for mine, new in zip(self._inputs, request.args, strict=True):
                if isinstance(new, Placed):
                    mine.memory.copy_(new.memory)
        else:
            self._inputs = [a.copy(self._device) if isinstance(a, Placed) else a for a in request.args]
        placed = [a for a in self._inputs if isinstance(a, Placed)]
        args = [a.tensor() if isinstance(a, Placed) else a for a in self._inputs]
        for number in request.repeated:
            args[number] = args[number].repeat(request.repeat, *[1] * (args[number].dim() - 1))
        return placed, args

    def _call(
        self, fn: Callable[..., Any], args: list[Any], request: Request, calls: list[tuple[str, int]]
    ) -> tuple[list[Tensor], list[Tensor | None], str | None]:
        """Results, gradients, and what was seen that must not be."""
        grads = [g.copy(self._device).tensor() if g else None for g in request.grads]
        watched = request.watched and request.how == PLAIN
        if request.how == OPERATORS:
            with self._interpreted(watched=False), without_onednn():
                names, complaint = check_operators(fn, args, request.needs, grads)
            calls += [(name, 0) for name in names]
            return [], [], complaint
        if request.how == SEEN:
            with self._interpreted(watched=False), contextlib.suppress(Exception):  # some do not run under a mode
                calls += operators_called(fn, args)[0]
            return [], [], None
        if request.how == COMPILED:
            torch._dynamo.reset()
            backend = "inductor" if self._device == "cuda" else "aot_eager"
            fn = torch.compile(fn, fullgraph=True, dynamic=False, backend=backend)
        with contextlib.ExitStack() as stack:
            guards = stack.enter_context(guarded()) if watched else None
            run = stack.enter_context(self._interpreted(watched))
            leaves, returned = forward(fn, args, request.needs if grads else [])
            outputs = _results(returned, request, self._device)
            self._results = [output.detach() for output in outputs]
            values = self._results
            if self._device == "cuda" and request.repeat == 1:
                # Copied on this stream before any other is waited for: work left elsewhere is not in the copies.
                values = [result.clone() for result in self._results]
            slopes = backward(outputs, [leaves[n] for n in request.needs], grads)
            if self._device == "cuda":
                torch.cuda.synchronize()
            findings = [*run.findings, *run.unwritten([*outputs, *filter(_is_tensor, slopes)])] if run else []
            complaint = next((str(finding) for finding in findings), None)
            return values, slopes, complaint or (guards.broken() if guards else None)

    @contextlib.contextmanager
    def _interpreted(self, watched: bool) -> Iterator[Any]:
        """Triton on the CPU, where there is no GPU."""
        if self._device == "cuda":
            yield None
            return
        with interpret(faults="collect", memory=watched) as run:
            yield run


def forward(fn: Callable[..., Any], args: Sequence[Any], needs: Sequence[int]) -> tuple[list[Any], Any]:
    """The arguments as leaves where they need a gradient, and what `fn` makes of them."""
    leaves = [a.detach().requires_grad_() if number in needs else a for number, a in enumerate(args)]
    with torch.set_grad_enabled(bool(needs)), without_onednn():
        return leaves, fn(*leaves)


def backward(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """As `gradients`, where oneDNN would do harm."""
    with without_onednn():
        return gradients(outputs, inputs, grads)


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of the inputs for the incoming ones of the floating-point outputs; none if there are none."""
    pairs = [(o, g) for o, g in zip(_floats(outputs), grads, strict=True) if g is not None] if grads else []
    pairs = [(o, g) for o, g in pairs if o.requires_grad]
    if not pairs:
        return []
    return list(torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True))


@contextlib.contextmanager
def failures(how: str = PLAIN) -> Iterator[None]:
    """Whatever a kernel raises in the context, as a KernelFailed."""
    try:
        yield
    except KernelFailed:
        raise
    except MissingPackage as missing:
        raise KernelFailed("unsupported", str(missing)) from None
    except KernelStopped as stopped:
        raise KernelFailed(stopped.kind, str(stopped)) from None
    except torch.cuda.OutOfMemoryError:
        raise KernelFailed("memory", f"it needs more than {free_memory()[1]}") from None
    except Exception as error:
        if how == COMPILED:  # and it came to its end when called plainly
            raise KernelFailed("unsupported", f"torch.compile cannot capture it ({first_line(error)})") from None
        raise KernelFailed("crashed", first_line(error)) from error


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """On a virtual machine that names AMX without granting it, oneDNN's bfloat16 products kill the process."""
    was_on, *_ = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=was_on)


def _floats(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t.is_floating_point()]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _results(returned: Any, request: Request, device: str) -> list[Tensor]:
    """The tensors that were returned, if they are what they should be: their number, type, shape, dtype and device."""
    found, wanted = [returned] if request.is_single else flat(returned), request.wanted
    for output in found:
        if type(output) not in (Tensor, torch.nn.Parameter):
            raise KernelFailed("wrong", f"returned {type(output).__name__}, not a tensor")
    if len(found) != len(wanted):
        raise KernelFailed("wrong", f"returned {len(found)} tensors, expected {len(wanted)}")
    for number, (output, like) in enumerate(zip(found, wanted, strict=True)):
        name = "output" if len(wanted) == 1 else f"output {number}"
        for what, has, should in (
            ("shape", tuple(output.shape), like.shape),
            ("dtype", str(output.dtype).removeprefix("torch."), str(like.dtype).removeprefix("torch.")),
            ("device", output.device.type, device),
            ("layout", str(output.layout), str(torch.strided)),
        ):
            if has != should:
                raise KernelFailed("wrong", f"{name} has {what} {has}, expected {should}")
    return found


def flat(returned: Any) -> list[Any]:
    return pytree.tree_leaves(returned) if isinstance(returned, tuple | list | dict) else [returned]


def operators_called(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[list[tuple[str, int]], Any]:
    """Torch's operators that a call uses, at any depth, with the elements of their largest input; and its result."""
    with torch.no_grad(), without_onednn(), TorchCalls() as seen:
        returned = fn(*args)
    return seen.calls, returned


def any_number_of_graphs() -> contextlib.AbstractContextManager[Any]:
    """A compiled function is asked more shapes than torch.compile bears by itself. Nothing where it is not loaded."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=GRAPHS)


def _scribble_on(results: list[Tensor]) -> list[Tensor]:
    """The results of the last call are the caller's to write to: what is done to them must change nothing later."""
    done = []
    for result in _floats(results):
        with contextlib.suppress(RuntimeError), torch.inference_mode():  # not where elements share memory
            done.append(result.detach().fill_(float("nan")))
    return done


def _lies_in(result: Tensor, placed: list[Placed]) -> bool:
    return any(0 <= result.data_ptr() - p.memory.data_ptr() < len(p.memory) for p in placed)


def _other_work(device: str) -> None:
    """What a program does between two calls: it leaves other numbers in memory that is then free."""
    for size in (256, 2**14, 2**18):
        torch.full((size,), float("nan"), device=device).add_(1)

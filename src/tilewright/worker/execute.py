"""Run one instrumented kernel call: its outputs, its effects on memory and the torch operators it calls."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import KernelAborted, MissingPackage, first_line
from tilewright.fake_cuda import redirect_cuda
from tilewright.interpreter import interpret
from tilewright.worker.memory import GuardedTensor, free_memory, guard_allocations, same_bits
from tilewright.worker.operators import TorchCallRecorder, opcheck_custom_operators
from tilewright.worker.results import other_names

# Results of earlier calls, to see whether a ring of buffers or a thread writes to them later.
KEPT_RESULTS, KEPT_BYTES, KEPT_BYTES_EACH = 64, 2**22, 2**18
RECOMPILE_LIMIT = 4096  # per compiled function
# How a kernel is called.
PLAIN, COMPILED, OPCHECK, TRACED = "", "under torch.compile", "registered operators", "traced"


class KernelFailed(Exception):
    """The kernel returned nothing to compare.

    `kind` is a verdict (crashed, timeout, wrong, tampered, unsupported), "memory" if this call needs too much of it,
    "declined" if the kernel does not take such a case, or "usage" if the file cannot be loaded.
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class OutputSpec:
    """The shape and dtype that an output must have, or one of others with as many elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    others: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    @property
    def max_bytes(self) -> int:
        return prod(self.shape) * max(dtype.itemsize for dtype in (self.dtype, *(dtype for _, dtype in self.others)))


@dataclass
class Request:
    """A call: its arguments, the arguments that require a gradient, incoming gradients, and what it must return.

    `grads` has one element per floating-point output; None if that output gets no gradient.
    """

    args: list[Any]  # a GuardedTensor, or a value that is not a tensor
    output_specs: list[OutputSpec]
    returns_tensor: bool = True  # False: a collection of tensors
    grads: list[GuardedTensor | None] = field(default_factory=list)
    needs_grad: list[int] = field(default_factory=list)
    mode: str = PLAIN
    instrumented: bool = True  # False: torch is not patched
    reuse_memory: bool = False  # write the arguments into the tensors of the previous call
    repeat: int = 1  # repeat the arguments `repeated` this many times along their first dimension
    repeated: list[int] = field(default_factory=list)
    names: list[str] | None = None  # the keys of the outputs, if they are in a dictionary


@dataclass
class Reply:
    outputs: list[Tensor]
    gradients: list[Tensor | None]  # empty: autograd cannot differentiate the outputs
    memory: list[Tensor]  # each tensor argument's, after the call
    calls: list[tuple[str, int]] = field(default_factory=list)  # torch operators, with the size of their largest input
    forward_only: str = ""  # why the call fails if its arguments require a gradient
    shared: list[str] = field(default_factory=list)  # see shared_memory


class Executor:
    """Runs calls, and holds the last inputs and outputs to see whether a later call changes them."""

    def __init__(self, device: str):
        self._device = device
        self._inputs: list[Any] = []
        self._args: list[Any] = []  # the same as tensors
        self._results: list[Tensor] = []
        self._kept: deque[Tensor] = deque(maxlen=KEPT_RESULTS)  # results of earlier calls: they hold NaN

    def execute(self, fn: Callable[..., Any], request: Request) -> Reply:
        overwritten = _overwrite_with_nan(self._results)
        self._results = []
        self._require_unchanged(self._kept, "an earlier call")
        earlier = [] if request.reuse_memory else self._snapshots()
        placed, args = self._place(request)
        _dirty_free_memory(self._device)
        reply = Reply([], [], [p.memory for p in placed])
        with kernel_failures(request.mode), unlimited_recompiles():
            complaint = self._call(fn, args, request, reply)
        self._require_unchanged(overwritten, "the previous call")
        self._require_unchanged(self._kept, "an earlier call")
        if not all(torch.equal(memory, before) for memory, before in earlier):
            raise KernelFailed("wrong", "the call changed an argument of the previous call")
        self._kept += [result for result in overwritten if result.nbytes <= KEPT_BYTES_EACH]
        while sum(result.nbytes for result in self._kept) > KEPT_BYTES:
            self._kept.popleft()
        if complaint:
            raise KernelFailed("wrong", complaint)
        self._results = [r for r in self._results if not _shares_memory(r, placed)]
        return reply

    @staticmethod
    def _require_unchanged(results: Iterable[Tensor], whose: str) -> None:
        """Raise if results that were overwritten with NaN hold something else: their memory was reused."""
        if not all(torch.isnan(result).all() for result in results):
            raise KernelFailed("wrong", f"the call changed the result of {whose}")

    def _snapshots(self) -> list[tuple[Tensor, Tensor]]:
        """Return the small arguments of the previous call, each with a copy."""
        memories = [a.memory for a in self._inputs if isinstance(a, GuardedTensor)]
        return [(memory, memory.clone()) for memory in memories if memory.nbytes <= KEPT_BYTES_EACH]

    def blocks(self, numbers: Sequence[int], size: int) -> list[list[Tensor]]:
        """Return the blocks of `size` rows with these numbers from each of the last outputs."""
        return [[result[n * size : (n + 1) * size] for result in self._results] for n in numbers]

    def _place(self, request: Request) -> tuple[list[GuardedTensor], list[Any]]:
        if request.reuse_memory:
            for target, tensor, new in zip(self._inputs, self._args, request.args, strict=True):
                if isinstance(new, GuardedTensor):
                    target.memory.copy_(new.memory)
                    torch.autograd.graph.increment_version(tensor)  # as if the tensor had been written in place
        else:
            self._inputs = [a.copy(self._device) if isinstance(a, GuardedTensor) else a for a in request.args]
            self._args = [a.tensor() if isinstance(a, GuardedTensor) else a for a in self._inputs]
        placed = [a for a in self._inputs if isinstance(a, GuardedTensor)]
        args = [*self._args]
        for number in request.repeated:
            args[number] = args[number].repeat(request.repeat, *[1] * (args[number].dim() - 1))
        return placed, args

    def _call(self, fn: Callable[..., Any], args: list[Any], request: Request, reply: Reply) -> str | None:
        """Fill the reply, and return a fault that the interpreter or the guards found."""
        incoming = [g.copy(self._device) if g else None for g in request.grads]
        grads = [g.tensor() if g else None for g in incoming]
        instrumented = request.instrumented and request.mode == PLAIN
        if request.mode == OPCHECK:
            with self._interpreted(instrumented=False), without_onednn():
                names, complaint = opcheck_custom_operators(fn, args, request.needs_grad, grads)
            reply.calls = [(name, 0) for name in names]
            return complaint
        if request.mode == TRACED:
            # Some kernels do not run under a dispatch mode.
            with self._interpreted(instrumented=False), contextlib.suppress(Exception):
                reply.calls = trace_torch_calls(fn, args)[0]
            return None
        if request.mode == COMPILED:
            torch._dynamo.reset()
            backend = "inductor" if self._device == "cuda" else "aot_eager"
            fn = torch.compile(fn, fullgraph=True, dynamic=False, backend=backend)
        with contextlib.ExitStack() as stack:
            guards = stack.enter_context(guard_allocations()) if instrumented else None
            run = stack.enter_context(self._interpreted(instrumented))
            if request.mode != COMPILED:  # torch.compile cannot capture every call under a mode
                stack.enter_context(redirect_cuda(self._device))
            needs_grad = request.needs_grad if grads else []
            retry, forms = request.mode == PLAIN, [*map(_form, args)]
            leaves, returned, reply.forward_only = _forward(fn, args, needs_grad, retry)
            for number, form in enumerate(forms):
                if form != _form(_detach(leaves[number]) if number in needs_grad else args[number]):
                    return f"its argument {number + 1} came back with another shape, stride, memory or requires_grad"
            with torch._C.DisableTorchFunction():  # a function mode could compute the outputs only now
                outputs = _checked_outputs(returned, request, self._device)
                self._results = [_detach(output) for output in outputs]
                # At once: a thread may write to them later. And on this stream before synchronizing, so that work on
                # other streams is not in the copies.
                reply.outputs = [_clone(r) for r in self._results] if request.repeat == 1 else self._results
            reply.shared = shared_memory(self._results, leaves)
            reply.gradients = backward(outputs, [leaves[n] for n in request.needs_grad], grads)
            if self._device == "cuda":
                torch.cuda.synchronize()
            for given, after in zip(request.grads, incoming, strict=True):
                if given and after and not torch.equal(given.memory, after.memory.to(given.memory.device)):
                    return "the incoming gradient was changed, which other functions may share"
            produced = [*outputs, *(g for g in reply.gradients if g is not None)]
            findings = [*run.findings, *run.unwritten(produced)] if run else []
            complaint = next((str(finding) for finding in findings), None)
            if self._device == "cpu" and not all(map(same_bits, self._results, reply.outputs)):
                return "the outputs changed after the call had returned"
            return complaint or (guards.broken() if guards else None)

    @contextlib.contextmanager
    def _interpreted(self, instrumented: bool) -> Iterator[Any]:
        """Run Triton kernels in the interpreter if there is no GPU."""
        if self._device == "cuda":
            yield None
            return
        with interpret(faults="collect", memory=instrumented) as run:
            yield run


def forward(fn: Callable[..., Any], args: Sequence[Any], needs_grad: Sequence[int]) -> tuple[list[Any], Any]:
    """Return the arguments, as autograd leaves where they need a gradient, and the outputs of `fn`."""
    leaves = [a.detach().requires_grad_() if number in needs_grad else a for number, a in enumerate(args)]
    with torch.set_grad_enabled(bool(needs_grad)), without_onednn():
        returned = fn(*leaves)
        if torch.is_grad_enabled() != bool(needs_grad):
            raise KernelFailed("wrong", "the call left gradients switched on or off for the rest of the program")
        return leaves, returned


def _forward(
    fn: Callable[..., Any], args: Sequence[Any], needs_grad: Sequence[int], retry: bool
) -> tuple[list[Any], Any, str]:
    """Call `forward`; if it fails only because arguments require a gradient, call without, and return the reason."""
    try:
        return *forward(fn, args, needs_grad), ""
    except (KernelFailed, KernelAborted, MissingPackage, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        if not needs_grad or not retry:
            raise
        with contextlib.suppress(Exception):
            return *forward(fn, args, []), first_line(error)
        raise


def backward(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Compute `gradients` without oneDNN."""
    with without_onednn():
        return gradients(outputs, inputs, grads)


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the inputs' gradients for the incoming gradients of the floating-point outputs; empty without any."""
    pairs = [(o, g) for o, g in zip(_floats(outputs), grads, strict=True) if g is not None] if grads else []
    pairs = [(o, g) for o, g in pairs if o.requires_grad]
    if not pairs:
        return []
    return list(torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True))


@contextlib.contextmanager
def kernel_failures(mode: str = PLAIN) -> Iterator[None]:
    """Turn every exception that a kernel raises into KernelFailed."""
    try:
        yield
    except KernelFailed:
        raise
    except MissingPackage as missing:
        raise KernelFailed("unsupported", str(missing)) from None
    except KernelAborted as stopped:
        raise KernelFailed(stopped.kind, str(stopped)) from None
    except torch.cuda.OutOfMemoryError:
        raise KernelFailed("memory", f"it needs more than {free_memory()[1]}") from None
    except Exception as error:
        if mode == COMPILED:  # the plain call succeeded before
            raise KernelFailed("unsupported", f"torch.compile cannot capture it ({first_line(error)})") from None
        kind = "declined" if isinstance(error, NotImplementedError) else "crashed"
        raise KernelFailed(kind, first_line(error)) from error


_set_flags = torch.backends.mkldnn.set_flags  # a file could replace it, and compute an output when it is called


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN: on virtual machines that report AMX without enabling it, its bfloat16 GEMMs kill the process."""
    was_on, *_ = _set_flags(_enabled=False)
    try:
        yield
    finally:
        _set_flags(_enabled=was_on)


def _floats(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t.is_floating_point()]


_detach, _clone = Tensor.detach, Tensor.clone  # an attribute of a tensor could shadow them


def _form(value: Any) -> Any:
    """Return what a call must not change in a tensor besides its elements."""
    if not isinstance(value, Tensor):
        return None
    return tuple(value.shape), value.stride(), value.data_ptr(), value.requires_grad


def is_plain_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or parameter itself: a subclass could compute its elements when read.

    Compared by identity, since the metaclass of a subclass could define equality.
    """
    return type(value) is Tensor or type(value) is torch.nn.Parameter


def _checked_outputs(returned: Any, request: Request, device: str) -> list[Tensor]:
    """Return the output tensors if their number, type, shape, dtype, device and layout are right."""
    found, specs = [returned] if request.returns_tensor else flatten(returned), request.output_specs
    for output in found:
        if not is_plain_tensor(output):
            raise KernelFailed("wrong", f"returned {type(output).__name__}, not a tensor")
    if reason := other_names(returned, request.names):
        raise KernelFailed("wrong", reason)
    if len(found) != len(specs):
        raise KernelFailed("wrong", f"returned {len(found)} tensors, expected {len(specs)}")
    for number, (output, spec) in enumerate(zip(found, specs, strict=True)):
        name = "output" if len(specs) == 1 else f"output {number}"
        if (tuple(output.shape), output.dtype) in spec.others:
            spec = OutputSpec(tuple(output.shape), output.dtype)
        for what, has, should in (
            ("shape", tuple(output.shape), spec.shape),
            ("dtype", str(output.dtype).removeprefix("torch."), str(spec.dtype).removeprefix("torch.")),
            ("device", output.device.type, device),
            ("layout", str(output.layout), str(torch.strided)),
        ):
            if has != should:
                raise KernelFailed("wrong", f"{name} has {what} {has}, expected {should}")
    return found


def flatten(returned: Any) -> list[Any]:
    """Return what a call returned as a list, without the None of a collection."""
    if not isinstance(returned, tuple | list | dict):
        return [returned]
    return [leaf for leaf in leaves_of(returned) if leaf is not None]


def uncomparable(returned: Any) -> str | None:
    """Return why the results of a reference cannot be compared, or None."""
    for output in flatten(returned):
        if not isinstance(output, Tensor) or output.is_complex():
            kind = "complex numbers" if isinstance(output, Tensor) else type(output).__name__
            return f"returns {kind}, and only real tensors are compared"
    return None if flatten(returned) else "returns nothing"


def leaves_of(returned: Any) -> Iterator[Any]:
    """Yield the leaves of nested collections, those of a dictionary in the order of its keys.

    The methods of the base classes serve, since those of a subclass could compute the leaves only now.
    """
    if isinstance(returned, dict):
        for key in sorted(dict.keys(returned), key=str):
            yield from leaves_of(dict.__getitem__(returned, key))
    elif isinstance(returned, tuple | list):
        items = tuple.__iter__(returned) if isinstance(returned, tuple) else list.__iter__(returned)
        for item in items:
            yield from leaves_of(item)
    else:
        yield returned


def shared_memory(outputs: Sequence[Any], args: Sequence[Any]) -> list[str]:
    """Return which outputs lie in an argument's memory or in that of an earlier output."""
    held = [(f"argument {n + 1}", a) for n, a in enumerate(args) if isinstance(a, Tensor) and a.numel()]
    places = {a.untyped_storage().data_ptr(): name for name, a in reversed(held)}
    starts: dict[int, str] = {}
    found = []
    for number, output in enumerate(outputs):
        if not isinstance(output, Tensor) or not output.numel():
            continue
        name = "the output" if len(outputs) == 1 else f"output {number}"
        other = places.get(output.untyped_storage().data_ptr()) or starts.get(output.data_ptr())
        found += [f"{name} with {other}"] if other else []
        starts.setdefault(output.data_ptr(), name)
    return found


def trace_torch_calls(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[list[tuple[str, int]], Any]:
    """Return the torch operators a call uses at any depth, with the size of their largest input; and its output."""
    with torch.no_grad(), without_onednn(), TorchCallRecorder() as seen:
        returned = fn(*args)
    return seen.calls, returned


def unlimited_recompiles() -> contextlib.AbstractContextManager[Any]:
    """Raise torch.compile's recompile limit, if it is loaded: a check calls one function with many shapes."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=RECOMPILE_LIMIT)


def _overwrite_with_nan(results: list[Tensor]) -> list[Tensor]:
    """Write NaN over the previous outputs, which belong to the caller; return those that could be written."""
    done = []
    for result in _floats(results):
        # A tensor whose elements share memory cannot be written.
        with contextlib.suppress(RuntimeError), torch.inference_mode():
            done.append(result.detach().fill_(float("nan")))
    return done


def _shares_memory(result: Tensor, placed: list[GuardedTensor]) -> bool:
    return any(0 <= result.data_ptr() - p.memory.data_ptr() < len(p.memory) for p in placed)


def _dirty_free_memory(device: str) -> None:
    """Leave other numbers in freed memory, as a program's own work between two calls does."""
    for size in (256, 2**14, 2**18):
        torch.full((size,), float("nan"), device=device).add_(1)

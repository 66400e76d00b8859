"""Guard bytes around every buffer and poison in uninitialised memory, to reveal what a kernel does to memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.interpreter import fill_with_poison, patched

GUARD = 512  # bytes on either side; a multiple of the allocator's alignment
PADDING = 64  # elements after each row of a padded tensor
POISON_PERIOD = 8  # bytes after which the poison pattern repeats
MAX_GUARDED_BYTES = 2**32  # per call: guarded memory is freed when the call ends
CUDA_CONTEXT_BYTES = 2**31  # an upper bound
OTHERS = "that other processes leave"  # marks a reason that may not hold on an idle GPU
ALLOCATORS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))


def free_memory() -> tuple[int, str]:
    """Return the GPU memory that this process can use in total, in bytes and in words."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved()
    is_shared = total - free > CUDA_CONTEXT_BYTES
    return free, f"the {free / 2**30:.0f} GiB of GPU memory" + (f" {OTHERS}" if is_shared else "")


@dataclass(frozen=True)
class GuardedTensor:
    """A tensor in an allocation of its own: bytes between two guards, and the tensor's layout in them."""

    memory: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def copy_of(tensor: Tensor, layout: str) -> GuardedTensor:
        """Return a guarded copy with this layout."""
        copy = with_layout(tensor.detach(), layout)
        raw = _storage_bytes(copy)
        memory = _empty(len(raw) + 2 * GUARD, dtype=torch.uint8, device=raw.device)
        fill_with_poison(memory)
        memory[GUARD : len(memory) - GUARD] = raw
        return GuardedTensor(memory, tensor.dtype, tuple(copy.shape), copy.stride(), int(copy.storage_offset()))

    def copy(self, device: str) -> GuardedTensor:
        return replace(self, memory=self.memory.to(device, copy=True))

    def tensor(self) -> Tensor:
        return _between_guards(self.memory, self.dtype, self.shape, self.stride, self.offset)

    def difference(self, after: Tensor, may_change: bool) -> str | None:
        """Return what a call did to this memory that it must not do, or None."""
        inside = slice(GUARD, len(self.memory) - GUARD)
        if after.shape != self.memory.shape:
            return "came back with another size"
        if not may_change and not torch.equal(after[inside], self.memory[inside]):
            return "was changed"
        for guard, where in ((slice(0, GUARD), "before"), (slice(-GUARD, None), "after")):
            if not torch.equal(after[guard], self.memory[guard]):
                return f"was written out of bounds, {where} its memory"
        return None


def with_layout(tensor: Tensor, layout: str) -> Tensor:
    """Return a copy with this layout and poison in the gaps; contiguous if the tensor cannot have the layout."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().clone().transpose(0, -1)
    if layout == "sliced" and tensor.dim():
        wide = _poisoned(tensor, *tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
        return wide[..., : 2 * tensor.shape[-1] : 2].copy_(tensor)
    if layout == "padded" and tensor.dim():  # rows of a wider tensor
        return _poisoned(tensor, *tensor.shape[:-1], tensor.shape[-1] + PADDING)[..., : tensor.shape[-1]].copy_(tensor)
    if layout == "offset":
        return _poisoned(tensor, tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    if layout == "expanded" and tensor.dim() and tensor.shape[0] > 1 and (tensor.is_meta or _has_equal_rows(tensor)):
        return tensor[:1].clone().expand_as(tensor)
    # A dense tensor keeps its order of dimensions: an operation that draws a matrix transposed is to be timed with it.
    is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor.clone(memory_format=torch.preserve_format if is_dense else torch.contiguous_format)


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements, in order. Those of a non-contiguous tensor are a copy."""
    flat = tensor.detach().resolve_neg().contiguous().as_strided((tensor.numel(),), (1,))  # one element has any stride
    return flat.view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same shape and dtype hold the same bits, NaN and signed zeros included."""
    return torch.equal(bits(one), bits(other))


def _has_equal_rows(tensor: Tensor) -> bool:
    values = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # fp8 has few operators
    return torch.equal(values, values[:1].expand_as(values))


class AllocationGuards:
    """The guarded allocations of a call."""

    def __init__(self) -> None:
        self._allocations: list[Tensor] = []
        self._bytes = 0

    def add(self, tensor: Tensor) -> Tensor:
        """Return a tensor like this one that holds poison and lies between guards."""
        if not _can_be_guarded(tensor):
            return tensor
        size = tensor.untyped_storage().nbytes()
        self._bytes += size
        if self._bytes > MAX_GUARDED_BYTES:
            fill_with_poison(tensor)
            return tensor
        memory = _empty(size + 2 * GUARD, dtype=torch.uint8, device=tensor.device)
        fill_with_poison(memory)
        self._allocations.append(memory)
        guarded = _between_guards(memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)
        return guarded.requires_grad_(tensor.requires_grad)

    def broken(self) -> str | None:
        """Return which guard was overwritten, or None."""
        for memory in self._allocations:
            end = len(memory) - GUARD
            clean = _empty(GUARD + POISON_PERIOD, dtype=torch.uint8, device=memory.device)
            fill_with_poison(clean)
            for start, where in ((0, "before"), (end, "after")):
                phase = start % POISON_PERIOD  # not 0 if the allocation has an odd size
                if not torch.equal(memory[start : start + GUARD], clean[phase : phase + GUARD]):
                    return f"wrote out of bounds, {where} an allocation of {end - GUARD} bytes from torch.empty"
        return None


@contextlib.contextmanager
def guard_allocations() -> Iterator[AllocationGuards]:
    """Fill what torch.empty and its variants allocate with poison, and put it between guards."""
    guards = AllocationGuards()

    def guarding(allocate: Any) -> Any:
        def allocate_guarded(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor if kwargs.get("pin_memory") or "out" in kwargs else guards.add(tensor)

        return allocate_guarded

    with contextlib.ExitStack() as undo:
        for owner, name in ALLOCATORS:
            undo.enter_context(patched(owner, name, guarding(getattr(owner, name))))
        yield guards


_empty = torch.empty  # the original, also inside guard_allocations()


def _can_be_guarded(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not torch._C._are_functorch_transforms_active()
    )


def _between_guards(
    memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> Tensor:
    """Return the tensor between the guards. It is not a view, which autograd treats differently.

    On a CPU its storage ends at the guards, so that the interpreter knows the bounds.
    """
    empty = _empty(0, dtype=dtype, device=memory.device)
    if memory.device.type == "cpu":
        inside = memory.numpy()[GUARD : len(memory) - GUARD]
        if not len(inside):
            return _empty(shape, dtype=dtype)
        return empty.set_(torch.frombuffer(inside, dtype=torch.uint8).untyped_storage(), offset, shape, stride)
    return empty.set_(memory.untyped_storage(), GUARD // dtype.itemsize + offset, shape, stride)


def _poisoned(like: Tensor, *shape: int) -> Tensor:
    tensor = like.new_empty(shape)
    if not tensor.is_meta:
        fill_with_poison(tensor)
    return tensor


def _storage_bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

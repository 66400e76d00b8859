"""Memory that shows what a kernel did to it: guards around every buffer, poison where nobody has written yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.interpreter import poison, replaced

GUARD = 512  # bytes on either side; keeps what lies between aligned as an allocator would
WORD = 8  # bytes: the pattern of poison repeats within them
MOST_GUARDED = 2**32  # bytes of one call: guarded memory is kept until the call has ended
CONTEXT = 2**31  # bytes: more than CUDA itself keeps for a process
OTHERS = "that other processes leave"  # in every reason that may be gone when they are
MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))


def free_memory() -> tuple[int, str]:
    """What the GPU's memory has for this process, with what it has taken already: bytes, and in words."""
    torch.cuda.empty_cache()  # for whoever is next
    free, total = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved()
    return free, f"the {free / 2**30:.0f} GiB of GPU memory" + (f" {OTHERS}" if total - free > CONTEXT else "")


@dataclass(frozen=True)
class Placed:
    """A tensor in memory of its own: bytes between two guards, and how the elements lie in them."""

    memory: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor, layout: str) -> Placed:
        """A copy of these values that lies in memory as named."""
        laid = laid_out(tensor.detach(), layout)
        raw = _bytes(laid)
        memory = _empty(len(raw) + 2 * GUARD, dtype=torch.uint8, device=raw.device)
        poison(memory)
        memory[GUARD : len(memory) - GUARD] = raw
        return Placed(memory, tensor.dtype, tuple(laid.shape), laid.stride(), int(laid.storage_offset()))

    def copy(self, device: str) -> Placed:
        return replace(self, memory=self.memory.to(device, copy=True))

    def tensor(self) -> Tensor:
        return _between_guards(self.memory, self.dtype, self.shape, self.stride, self.offset)

    def difference(self, after: Tensor, may_change: bool) -> str | None:
        """What happened to this memory, if something did that should not."""
        inside = slice(GUARD, len(self.memory) - GUARD)
        if after.shape != self.memory.shape:
            return "came back in another size"
        if not may_change and not torch.equal(after[inside], self.memory[inside]):
            return "was changed"
        for guard, where in ((slice(0, GUARD), "before"), (slice(-GUARD, None), "behind")):
            if not torch.equal(after[guard], self.memory[guard]):
                return f"was written to {where} its memory"
        return None


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A copy of these values that lies in memory as named, with poison in the gaps; what cannot lie so lies plainly."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().clone().transpose(0, -1)
    if layout == "sliced" and tensor.dim():
        wide = _poison_of(tensor, *tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
        return wide[..., : 2 * tensor.shape[-1] : 2].copy_(tensor)
    if layout == "offset":
        return _poison_of(tensor, tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    if (
        layout == "expanded"
        and tensor.dim()
        and tensor.shape[0] > 1
        and (tensor.is_meta or torch.equal(tensor, tensor[:1].expand_as(tensor)))
    ):
        return tensor[:1].clone().expand_as(tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


class Guards:
    """The memory that was given out in the context, and whether what lies around it is untouched."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._bytes = 0

    def around(self, tensor: Tensor) -> Tensor:
        """Another tensor like this one, with poison in it and guards around it."""
        if not _can_be_guarded(tensor):
            return tensor
        size = tensor.untyped_storage().nbytes()
        self._bytes += size
        if self._bytes > MOST_GUARDED:
            poison(tensor)
            return tensor
        memory = _empty(size + 2 * GUARD, dtype=torch.uint8, device=tensor.device)
        poison(memory)
        self._made.append(memory)
        made = _between_guards(memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)
        return made.requires_grad_(tensor.requires_grad)

    def broken(self) -> str | None:
        for memory in self._made:
            behind = len(memory) - GUARD
            clean = _empty(GUARD + WORD, dtype=torch.uint8, device=memory.device)
            poison(clean)
            for start, where in ((0, "before"), (behind, "behind")):
                phase = start % WORD  # of the pattern, where the memory is of odd size
                if not torch.equal(memory[start : start + GUARD], clean[phase : phase + GUARD]):
                    return f"wrote {where} memory of {len(memory) - 2 * GUARD} bytes that it had from torch.empty"
        return None


@contextlib.contextmanager
def guarded() -> Iterator[Guards]:
    """What torch.empty and its like give out in the context holds poison and lies between guards."""
    guards = Guards()

    def guarding(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor if kwargs.get("pin_memory") or "out" in kwargs else guards.around(tensor)

        return made

    with contextlib.ExitStack() as undo:
        for owner, name in MAKERS:
            undo.enter_context(replaced(owner, name, guarding(getattr(owner, name))))
        yield guards


_empty = torch.empty  # as it is outside of the context


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
    """Not a view, for autograd treats views otherwise. On a CPU its storage ends at the guards, so that the interpreter
    knows where it ends."""
    empty = _empty(0, dtype=dtype, device=memory.device)
    if memory.device.type == "cpu":
        inside = memory.numpy()[GUARD : len(memory) - GUARD]
        if not len(inside):
            return _empty(shape, dtype=dtype)
        return empty.set_(torch.frombuffer(inside, dtype=torch.uint8).untyped_storage(), offset, shape, stride)
    return empty.set_(memory.untyped_storage(), GUARD // dtype.itemsize + offset, shape, stride)


def _poison_of(like: Tensor, *shape: int) -> Tensor:
    made = like.new_empty(shape)
    if not made.is_meta:
        poison(made)
    return made


def _bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

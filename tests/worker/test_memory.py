"""What a kernel does to memory shows: in its inputs, around them, and around what torch.empty gave it."""

import ctypes

import pytest
import torch

from support import LAYOUTS
from tilewright.worker.memory import GUARD, Placed, guarded


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0, 3), (4, 1, 6)])
def test_a_placed_tensor_holds_its_values_and_ends_at_its_guards(shape, dtype, layout):
    x = torch.randint(0, 2, shape).to(dtype)
    placed = Placed.of(x, layout)
    mine = placed.tensor()
    assert torch.equal(mine, x)
    assert mine.dtype == dtype
    assert not mine._is_view()
    if x.numel():
        assert mine.untyped_storage().nbytes() == len(placed.memory) - 2 * GUARD
        mine.add_(1) if dtype != torch.bool and layout != "expanded" else mine.data.fill_(True)
        assert placed.tensor().to(torch.float64).sum() >= x.to(torch.float64).sum()


def test_values_lie_in_memory_as_named():
    x = torch.randn(4, 6)
    assert Placed.of(x, "transposed").tensor().stride() == (1, 4)
    assert Placed.of(x, "sliced").tensor().stride() == (13, 2)
    assert Placed.of(x, "offset").tensor().storage_offset() == 1
    assert Placed.of(x[:1].expand(4, 6), "expanded").tensor().stride() == (0, 1)


def test_what_happened_to_memory_is_told():
    placed = Placed.of(torch.ones(8), "contiguous")
    for where, told in ((GUARD, "was changed"), (GUARD - 1, "before its memory"), (GUARD + 32, "behind its memory")):
        after = placed.memory.clone()
        assert placed.difference(after, may_change=False) is None
        after[where] += 1
        assert told in placed.difference(after, may_change=False)
    changed = placed.memory.clone()
    changed[GUARD] += 1
    assert placed.difference(changed, may_change=True) is None
    assert "another size" in placed.difference(changed[:-1], may_change=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, 4),
        lambda: torch.empty((3, 4), dtype=torch.float16),
        lambda: torch.empty_like(torch.ones(4, 3).t()),
        lambda: torch.empty_strided((3, 4), (8, 2)),
        lambda: torch.ones(2).new_empty(3, 4),
        lambda: torch.empty(3, 4, requires_grad=True),
    ],
)
def test_fresh_memory_is_poisoned_and_guarded(make):
    usual = make()
    with guarded() as guards:
        made = make()
        assert (made.shape, made.stride(), made.dtype) == (usual.shape, usual.stride(), usual.dtype)
        assert made.requires_grad == usual.requires_grad
        assert made.isnan().all()
        with torch.no_grad():
            made.zero_()
        assert guards.broken() is None
        size = made.untyped_storage().nbytes()
        ctypes.memset(made.data_ptr() + size, 0x55, 1)
        assert "behind" in guards.broken()
        ctypes.memset(made.data_ptr() - 1, 0x55, 1)
        assert "before" in guards.broken()
    assert torch.empty is not make


def test_what_cannot_be_guarded_is_left_alone():
    with guarded() as guards:
        assert torch.empty(3, device="meta").is_meta
        assert torch.empty(0, 3).shape == (0, 3)
        assert torch.vmap(lambda x: x + torch.empty_like(x).zero_())(torch.ones(2, 3)).shape == (2, 3)
        out = torch.ones(3)
        assert torch.empty(3, out=out) is out
        assert guards.broken() is None


def test_guards_of_memory_of_odd_size():
    with guarded() as guards:
        made = torch.empty(3, dtype=torch.uint8)
        made.fill_(1)
        assert guards.broken() is None
        ctypes.memset(made.data_ptr() + 3, 0x55, 1)
        assert "behind" in guards.broken()

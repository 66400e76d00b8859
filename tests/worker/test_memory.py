"""Guards and poison reveal what a kernel does to its inputs and to memory from torch.empty."""

import ctypes

import pytest
import torch

from support import LAYOUTS
from tilewright.worker.memory import GUARD, GuardedTensor, guard_allocations, with_layout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0, 3), (4, 1, 6)])
def test_a_guarded_tensor_holds_its_values_and_ends_at_its_guards(shape, dtype, layout):
    x = torch.randint(0, 2, shape).to(dtype)
    guarded = GuardedTensor.copy_of(x, layout)
    tensor = guarded.tensor()
    assert torch.equal(tensor, x)
    assert tensor.dtype == dtype
    assert not tensor._is_view()
    if x.numel():
        assert tensor.untyped_storage().nbytes() == len(guarded.memory) - 2 * GUARD
        tensor.add_(1) if dtype != torch.bool and layout != "expanded" else tensor.data.fill_(True)
        assert guarded.tensor().to(torch.float64).sum() >= x.to(torch.float64).sum()


def test_layouts_have_the_strides_and_offsets_of_their_names():
    x = torch.randn(4, 6)
    assert GuardedTensor.copy_of(x, "transposed").tensor().stride() == (1, 4)
    assert GuardedTensor.copy_of(x, "sliced").tensor().stride() == (13, 2)
    assert GuardedTensor.copy_of(x, "offset").tensor().storage_offset() == 1
    assert GuardedTensor.copy_of(x[:1].expand(4, 6), "expanded").tensor().stride() == (0, 1)


def test_changes_of_memory_are_reported():
    guarded = GuardedTensor.copy_of(torch.ones(8), "contiguous")
    for where, report in ((GUARD, "was changed"), (GUARD - 1, "before its memory"), (GUARD + 32, "after its memory")):
        after = guarded.memory.clone()
        assert guarded.difference(after, may_change=False) is None
        after[where] += 1
        assert report in guarded.difference(after, may_change=False)
    changed = guarded.memory.clone()
    changed[GUARD] += 1
    assert guarded.difference(changed, may_change=True) is None
    assert "another size" in guarded.difference(changed[:-1], may_change=True)


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
    plain = make()
    with guard_allocations() as guards:
        tensor = make()
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (plain.shape, plain.stride(), plain.dtype)
        assert tensor.requires_grad == plain.requires_grad
        assert tensor.isnan().all()
        with torch.no_grad():
            tensor.zero_()
        assert guards.broken() is None
        size = tensor.untyped_storage().nbytes()
        ctypes.memset(tensor.data_ptr() + size, 0x55, 1)
        assert "after" in guards.broken()
        ctypes.memset(tensor.data_ptr() - 1, 0x55, 1)
        assert "before" in guards.broken()
    assert torch.empty is not make


def test_tensors_that_cannot_be_guarded_are_unchanged():
    with guard_allocations() as guards:
        assert torch.empty(3, device="meta").is_meta
        assert torch.empty(0, 3).shape == (0, 3)
        assert torch.vmap(lambda x: x + torch.empty_like(x).zero_())(torch.ones(2, 3)).shape == (2, 3)
        out = torch.ones(3)
        assert torch.empty(3, out=out) is out
        assert guards.broken() is None


def test_allocations_of_odd_size_are_guarded():
    with guard_allocations() as guards:
        tensor = torch.empty(3, dtype=torch.uint8)
        tensor.fill_(1)
        assert guards.broken() is None
        ctypes.memset(tensor.data_ptr() + 3, 0x55, 1)
        assert "after" in guards.broken()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_matrix_that_is_drawn_transposed_stays_so(device):
    x = torch.ones(3, 5, device=device)
    for drawn in (x.t(), x):
        assert with_layout(drawn, "contiguous").stride() == drawn.stride()
    for sparse in (x[:1].expand(3, 5), x[:, :1].expand(3, 5), x[:, ::2]):
        assert with_layout(sparse, "contiguous").is_contiguous()

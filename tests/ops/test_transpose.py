"""Laws of the transposed copy, for every kernel."""

import pytest
import torch

from support import LAYOUTS, assert_gradients_match, laid_out
from tilewright.ops import transpose as module

CUDA = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda-padded", "cuda-swizzled")]
FORMS = ["triton", *CUDA]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 70), (70, 1), (64, 64), (67, 130), (0, 3)])
def test_elements_are_transposed(form, dtype, shape, device):
    x = laid_out(shape, "contiguous", device=device, dtype=dtype)
    y = module.transpose_forward(x, form)
    assert y.is_contiguous()
    torch.testing.assert_close(y, x.t(), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transposing_twice_restores_any_layout(form, layout, device):
    x = laid_out((35, 66), layout, device=device)
    once = module.transpose_forward(x, form)
    torch.testing.assert_close(once, x.t(), rtol=0, atol=0)
    torch.testing.assert_close(module.transpose_forward(once, form), x, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_and_registration(form, device):
    x = laid_out((5, 7), "sliced", device=device)
    assert_gradients_match(lambda x: module.transpose_forward(x, form), module.reference, x)
    torch.library.opcheck(module.transpose_forward.registered, (x.requires_grad_(), form))

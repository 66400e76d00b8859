"""Laws of the product of two fp8 matrices."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import tilewright as tw
from support import assert_compiles, assert_right, crossover_at
from tilewright.ops.linear import scaled_matmul as module
from tilewright.runtime.configs import clear_plans

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = ("tensor", "rows", "blocks", "squares")
PAIRS = list(itertools.product((E4M3, E5M2), repeat=2))


def drawn(device, M=70, N=33, K=300, scales="tensor", formats=(E4M3, E4M3), bias=False, dtype="bfloat16"):
    names = "-".join(module.FORMATS[f] for f in formats)
    sizes = {"M": (M,), "N": (N,), "K": (K,), "scales": (scales,), "formats": (names,), "bias": (bias,)}
    (case,) = module.points(**sizes)
    return module.op.make(case.with_dtype(dtype), device)


def integers(*shape, dtype, device):
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randint(-3, 4, shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("has_fp8", [True, False])
@pytest.mark.parametrize("formats", PAIRS, ids=str)
@pytest.mark.parametrize("scales", SCALES)
def test_values(scales, formats, has_fp8, device, monkeypatch):
    if not has_fp8:
        monkeypatch.setattr(module, "has_fp8", lambda device: False)
    args = drawn(device, scales=scales, formats=formats, bias=scales == "rows", dtype="float32")
    assert_right(module.triton_scaled_matmul(*args), module.reference, *args, precision=module.op.precision(*args))


@pytest.mark.parametrize(
    ("formats", "out_dtype"), [*zip(PAIRS, (torch.float32, torch.float16, torch.bfloat16, torch.float32), strict=True)]
)
def test_exact_on_integers_and_powers_of_two(out_dtype, formats, device):
    """However scales are spread, equal ones have the same result."""
    a = integers(130, 257, dtype=formats[0], device=device)
    b = integers(65, 257, dtype=formats[1], device=device).t()
    wanted = ((a.double() @ b.double()) / 8).to(out_dtype)
    for shape_a, shape_b in (((), (1,)), ((130,), (65,)), ((130, 1), (1, 65)), ((130, 3), (3, 1)), ((2, 3), (3, 65))):
        scales = torch.full(shape_a, 1 / 4, device=device), torch.full(shape_b, 1 / 2, device=device)
        got = tw.scaled_matmul(a, b, *scales, out_dtype=out_dtype)
        assert got.dtype == out_dtype
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scales", SCALES)
def test_a_sum_of_nothing_is_the_bias(scales, bias, device):
    args = drawn(device, K=0, scales=scales, bias=bias)
    wanted = module.reference(*args)
    assert wanted.any() == bias
    assert torch.equal(module.triton_scaled_matmul(*args), wanted)


@pytest.mark.parametrize("scales", SCALES)
def test_infinite_products_with_tiny_scales(scales, device):
    """The product of the scales is less than the smallest fp32 number; the infinities stay."""
    a, b, scale_a, scale_b, *rest = drawn(device, scales=scales, formats=(E5M2, E4M3), dtype="float32")
    a[0] = float("-inf")
    b = torch.ones_like(b, dtype=torch.float32).to(b.dtype)
    scale_a, scale_b = (torch.full_like(scale, 1e-40) for scale in (scale_a, scale_b))
    got = module.triton_scaled_matmul(a, b, scale_a, scale_b, *rest)
    assert torch.equal(got[0], torch.full_like(got[0], float("-inf")))


@pytest.mark.parametrize("has_fp8", [True, False])
def test_every_code(has_fp8, device, monkeypatch):
    """The product with the identity returns all 256 values, NaN and infinities included."""
    monkeypatch.setattr(module, "has_fp8", lambda device: has_fp8)
    codes = torch.arange(256, dtype=torch.int32).to(device, torch.uint8)
    one = torch.ones(1, 1, device=device)
    for fmt in (E4M3, E5M2):
        values = codes.view(fmt)[:, None]
        got = module.triton_scaled_matmul(values, one.to(fmt), one, one, None, torch.float32)
        torch.testing.assert_close(got, values.float(), rtol=0, atol=0, equal_nan=True)
        got = module.triton_scaled_matmul(one.to(fmt), values.t(), one, one, None, torch.float32)
        torch.testing.assert_close(got, values.t().float(), rtol=0, atol=0, equal_nan=True)


def test_sums_in_fp32(device):
    """2^20 + 1 is not in fp16, and fp8 sums of few bits would lose the ones."""
    a = torch.ones(1, 4096, device=device)
    a[0, 0] = 256
    b = torch.ones(4096, 1, device=device)
    b[0, 0] = 256
    one = torch.ones((), device=device)
    got = tw.scaled_matmul(a.to(E4M3), b.to(E4M3), one, one, out_dtype=torch.float32)
    assert got.item() == 256 * 256 + 4095


@pytest.mark.parametrize("form", ["triton", "best"])
def test_any_strides(form, device, monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))
    a, b, scale_a, scale_b, bias, _ = drawn(device, scales="blocks", bias=True)
    wanted = module._run(a, b, scale_a, scale_b, bias, torch.float32, "triton")
    fp8 = lambda codes: codes.view(E4M3)
    wide = fp8(a.view(torch.uint8).repeat_interleave(2, 0).repeat_interleave(2, 1))
    given = [
        (fp8(a.view(torch.uint8).t().contiguous()).t(), b.contiguous()),
        (wide[::2, ::2], b),
        (wide[::2, : 2 * a.shape[1] : 2], fp8(b.view(torch.uint8).contiguous())),
    ]
    scales = scale_a.t().contiguous().t(), scale_b.repeat_interleave(2, 1)[:, ::2]
    for one, other in given:
        got = module._run(one, other, *scales, bias.repeat_interleave(2)[::2], torch.float32, form)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("M", [1, 20, 300])
@pytest.mark.parametrize("scales", ["rows", "squares"])
def test_every_kind_of_tile(scales, M, device):
    args = drawn(device, M=M, N=150, K=200, scales=scales)
    assert_right(module.triton_scaled_matmul(*args), module.reference, *args, precision=module.op.precision(*args))


@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_empty(sizes, device, monkeypatch):
    M, N, K = sizes
    a, b = torch.zeros(M, K, device=device).to(E4M3), torch.zeros(K, N, device=device).to(E4M3)
    one, bias = torch.ones((), device=device), torch.randn(N, device=device)
    for crossover in (0, float("inf")):
        monkeypatch.setattr(module, "CROSSOVER", crossover_at(crossover))
        got = tw.scaled_matmul(a, b, one, one, bias, torch.float32)
        assert torch.equal(got, bias.expand(M, N))


@pytest.mark.parametrize(("capability", "wanted"), [((8, 9), 2.0**-13), ((9, 0), 2.0**-13), ((10, 0), 0.0)])
def test_precision_is_that_of_fp8_tensor_cores(capability, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    assert module.precision(on_gpu) == wanted
    assert module.precision(torch.ones(1)) == 0


def test_steps_are_added_in_fp32_or_by_the_tensor_cores(device, monkeypatch):
    args = drawn(device)
    added = module.triton_scaled_matmul(*args)
    monkeypatch.setattr(module, "keeps_13_bits", lambda device: False)
    clear_plans()
    torch.testing.assert_close(module.triton_scaled_matmul(*args), added)
    clear_plans()


def test_many_rows_of_matrices_with_k_strided(device):
    a, b, *others = drawn(device, M=module.MANY_ROWS, N=40, K=130, scales="blocks", dtype="float32")
    wanted = module.triton_scaled_matmul(a, b, *others)
    by_columns = lambda x: x.view(torch.uint8).t().contiguous().t().view(x.dtype)
    for one, other in ((by_columns(a), by_columns(b)), (a.repeat_interleave(2, 1)[:, ::2], b)):
        assert torch.equal(module.triton_scaled_matmul(one, other, *others), wanted)


def test_cublas_is_called_as_it_expects(device):
    """Torch's own function runs on a CPU too."""
    for scales in ("tensor", "rows"):
        args = drawn(device, M=32, N=48, K=64, scales=scales, bias=True)
        torch.testing.assert_close(module._torch(*args), module.reference(*args))


@pytest.mark.gpu
def test_cublas_takes_what_the_conditions_say(device):
    for scales, bias, dtype in itertools.product(SCALES, (False, True), ("bfloat16", "float16", "float32")):
        args = drawn(device, M=256, N=144, K=512, scales=scales, bias=bias, dtype=dtype)
        if module._fits_torch(*args):
            assert_right(module._torch(*args), module.reference, *args, precision=module.op.precision(*args))


def test_our_kernel_runs_where_cublas_does_not(device, monkeypatch):
    args = drawn(device, scales="blocks")
    assert not module._fits_torch(*args)
    monkeypatch.setattr(module, "reference", None)
    with tw.interpret() as run:
        tw.scaled_matmul(*args)
    assert len(run.launches) == 1


def test_on_a_cpu(device, monkeypatch):
    monkeypatch.setattr(module, "is_interpreted", lambda x: False)
    args = [x.cpu() if isinstance(x, torch.Tensor) else x for x in drawn(device, scales="squares", bias=True)]
    assert torch.equal(tw.scaled_matmul(*args), module.reference(*args))


def test_bad_arguments(device):
    a, b, one, _, _, _ = drawn(device, M=200, N=33, K=300)
    integer = torch.int8
    refused = [
        (TypeError, "a must be float8_e4m3fn or float8_e5m2, not torch.float32", (a.float(), b, one, one)),
        (RuntimeError, r"a and b must be of shape \[M, K\] and \[K, N\], not", (a, b.t(), one, one)),
        (TypeError, "scale_b must be a float32 tensor, not torch.float16", (a, b, one, one.half())),
        (TypeError, "scale_a must be a float32 tensor, not float", (a, b, 1.0, one)),
        (RuntimeError, r"scale_a must be one number or of shape \[1 or 200 or 2\] x \[1 or 3\], not \(4, 3\)",
         (a, b, torch.ones(4, 3, device=device), one)),
        (RuntimeError, r"scale_b must be one number or of shape \[1 or 3\] x \[1 or 33\], not \(33, 1\)",
         (a, b, one, torch.ones(33, 1, device=device))),
        (RuntimeError, r"the bias must be of shape \[33\], not \(1,\)", (a, b, one, one, one[0])),
        (TypeError, "out_dtype must be float32, float16 or bfloat16, not torch.int8", (a, b, one, one, None, integer)),
    ]  # fmt: skip
    for kind, message, args in refused:
        with pytest.raises(kind, match=message):
            tw.scaled_matmul(*args)


def test_there_is_no_gradient(device):
    a, b, scale_a, scale_b, _, _ = drawn(device)
    c = tw.scaled_matmul(a, b, scale_a.requires_grad_(), scale_b)
    with pytest.raises(RuntimeError, match="scaled_matmul has no gradient, like torch's scaled_mm: multiply in"):
        c.sum().backward()


def test_registered_operator(device):
    a, b, *others = drawn(device, M=6, N=5, K=7, scales="rows", formats=(E5M2, E4M3), bias=True)
    codes = a.view(torch.uint8), b.view(torch.uint8)
    args = (*codes, *others[:3], "e5m2-e4m3", torch.float16, "triton")
    torch.library.opcheck(module.scaled_matmul_forward.registered, args)
    assert_compiles(lambda a, b, *scales: tw.scaled_matmul(a, b, *scales), a, b, *others[:2])
    with torch.autocast(device, dtype=torch.float16):
        assert tw.scaled_matmul(a, b, *others).dtype == torch.bfloat16

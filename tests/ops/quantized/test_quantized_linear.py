"""Laws of the linear layer with a quantised weight."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the customary name

import tilewright as tw
from support import LAYOUTS, assert_compiles, assert_gradients_match, assert_right, laid_out
from tilewright.ops.quantized import _dynamic, _triton
from tilewright.ops.quantized import quantized_linear as module
from tilewright.ops.quantized._formats import FORMATS, Parts, dequantize, pack, parse
from tilewright.runtime.gpus import datasheet_facts

SOME = ("int4-g128", "int4-g32-zero", "int4", "int8-g64-float-zero", "fp8-block128", "mxfp4", "nf4")
DYNAMIC = ("int8-a8", "fp8-a8")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drawn(name, M=3, N=40, K=150, device="cpu", dtype=torch.float32, bias=False):
    (case,) = module.points(M=(M,), N=(N,), K=(K,), format=(name,), bias=(bias,))
    return module.op.make(case.with_dtype(str(dtype).removeprefix("torch.")), device)


def integers(*shape, high=5, seed=0):
    return torch.randint(-high, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def weight_of(name, N, K, device, dtype=torch.float32, seed=0):
    return tw.quantize(laid_out((N, K), "contiguous", device=device, dtype=dtype, seed=seed), name)


def integer_weight(name, N, K):
    """Return a weight whose dequantised values are integers."""
    fmt = parse(name)
    scale = torch.ones(fmt.groups(K), fmt.scale_columns(N))
    zero = None
    if fmt.has_e8m0:
        scale = torch.full(scale.shape, 128, dtype=torch.uint8)
    if fmt.zero:
        zero = integers(*scale.shape, seed=3)
    if fmt.values == "nf4":
        codes, levels = integers(N, K, high=7) + 7, torch.arange(16.0) - 6
        return tw.QuantizedWeight(name, (N, K), Parts(pack(codes.byte(), fmt), scale, None, levels))
    if fmt.is_integer:
        codes = (integers(N, K, high=7) + (8 if fmt.bits == 4 else 128)).byte()
    elif fmt.values == "e4m3":
        codes = integers(N, K, high=9).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = integers(N, K, high=7) + 8
    codes = (codes.int() - 128).to(torch.int8) if name == "int8-a8" else codes
    return tw.QuantizedWeight(name, (N, K), Parts(codes if fmt.quantizes_x else pack(codes, fmt), scale, zero))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_exact_on_integers(name, dtype, device):
    N, K = 37, 140
    weight = integer_weight(name, N, K).to(device)
    x = integers(3, K, seed=1)
    x[:, 7] = 127 if name == "int8-a8" else 448 if name == "fp8-a8" else 1  # then the scale of a row is 1
    x = x.to(device, dtype)
    expected = x.double() @ weight.dequantize(torch.float64).t()
    assert torch.equal(expected, expected.round())
    assert torch.equal(tw.quantized_linear(x, weight), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*SOME, *DYNAMIC])
def test_as_right_as_torch(name, dtype, device):
    args = drawn(name, device=device, dtype=dtype, bias=True)
    assert_right(module.triton_linear(*args), module.reference, *args)


@pytest.mark.parametrize("name", ["int4-g128", "int4-g64-zero", "int8-g32", "mxfp8", "nf4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_multiplies_the_weight_that_dequantize_returns(name, dtype, device):
    """Rows of the identity select columns of the weight as the kernel holds it, rounded to the dtype."""
    weight = weight_of(name, 33, 16, device, dtype)
    x = torch.eye(16, device=device, dtype=dtype)
    assert torch.equal(tw.quantized_linear(x, weight).t(), weight.dequantize(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_one_kernel_dequantizes_as_torch_does(name, dtype, device):
    weight = weight_of(name, 37, 140, device)
    got = module.dequantize_weight(*weight.parts, name, 140, dtype)
    assert torch.equal(got, weight.dequantize(dtype))


@pytest.mark.parametrize("rows", [1, 17, 64, 65, 130])
@pytest.mark.parametrize("name", ["int4-g32", "int8", *DYNAMIC])
def test_every_tile(name, rows, device):
    args = drawn(name, M=rows, N=130, K=96, device=device, dtype=torch.bfloat16)
    assert_right(module.triton_linear(*args), module.reference, *args)


@pytest.mark.parametrize("K", [1, 31, 128, 129, 257])
@pytest.mark.parametrize("name", ["int4-g32-zero", "int8-g128", "mxfp4", "fp8-tensor", *DYNAMIC])
def test_columns_that_fill_no_group_and_no_chunk(name, K, device):
    args = drawn(name, N=5, K=K, device=device)
    assert_right(module.triton_linear(*args), module.reference, *args)


@pytest.mark.parametrize("splits", [1, 3, 5])
def test_splits_cover_all_columns_once(splits, device):
    weight, K = integer_weight("int4-g64-zero", 20, 640).to(device), 640
    x, bias = integers(4, K, seed=1).to(device), integers(20, seed=2).to(device)
    key = (16, 20, K, 4, 4)
    config = _triton.CONFIGS.default_on(x.get_device(), key) | {"splits": splits}
    with _triton.CONFIGS.override(key, config):
        y = tw.quantized_linear(x, weight, bias, "relu")
    assert torch.equal(y, (x @ weight.dequantize().t() + bias).relu())


def test_calls_return_the_same_bits(device):
    args = drawn("int4-g128", M=2, N=64, K=4096, device=device, dtype=torch.float16)
    plan = _triton._plan(
        (2, 64, 4096), 4096, torch.float16, torch.float16, args[0].get_device(), "int4-g128", "none", False
    )
    assert plan[2] > 1
    assert torch.equal(module.triton_linear(*args), module.triton_linear(*args))


@pytest.mark.parametrize("name", ["int4-g128", "int8-zero"])
def test_scaling_the_scales_scales_the_result(name, device):
    x, codes, scale, *rest = drawn(name, device=device)
    assert torch.equal(
        4 * module.triton_linear(x, codes, scale, *rest), module.triton_linear(x, codes, 4 * scale, *rest)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["int4-g32", "int8-a8"])
def test_any_layout(name, layout, device):
    weight = weight_of(name, 9, 70, device)
    x = laid_out((5, 70), layout, device=device, seed=1)
    bias = laid_out((9,), layout, device=device, seed=2)
    got = tw.quantized_linear(x, weight, bias)
    assert_right(got, module.reference, x, *weight.parts, bias, name)


@pytest.mark.parametrize("shape", [(70,), (0, 70), (2, 0, 70), (2, 3, 70)])
def test_any_shape(shape, device):
    weight = weight_of("int4-g32", 9, 70, device)
    x = torch.randn(shape, device=device, requires_grad=True)
    y = tw.quantized_linear(x, weight, activation="silu")
    expected = F.silu(F.linear(x, weight.dequantize()))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(expected.sum(), x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["int4-g128", "nf4", *DYNAMIC])
def test_gradients(name, device):
    x, *parts, bias, _ = drawn(name, device=device, bias=True)
    ours = lambda x, bias: module.triton_linear(x, *parts, bias, name)
    assert_gradients_match(ours, lambda x, bias: module.reference(x, *parts, bias, name), x, bias)


def test_gradient_of_one_input_and_second_derivative(device):
    x, *parts, bias, name = drawn("int4-g64", device=device, bias=True)
    y = module.triton_linear(x, *parts, bias.requires_grad_(), name)
    assert torch.equal(torch.autograd.grad(y.sum(), bias)[0], torch.full_like(bias, 3))
    x.requires_grad_()
    weight = dequantize(Parts(*parts), parse(name), x.shape[1])

    def twice(fn):
        (dx,) = torch.autograd.grad(fn(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    ours, theirs = twice(lambda x: module.triton_linear(x, *parts, None, name)), twice(lambda x: F.linear(x, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["int4-g128", "int8-a8"])
@pytest.mark.parametrize("wants_gradients", [False, True])
def test_activations(name, activation, wants_gradients, device):
    weight = weight_of(name, 33, 90, device)
    x, bias = torch.randn(4, 90, device=device), torch.randn(33, device=device)
    leaves = [t.requires_grad_(wants_gradients) for t in (x, bias)]
    y = tw.quantized_linear(x, weight, bias, activation)
    expected = module.FORMULAS[activation](module.reference(x, *weight.parts, bias, name))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    if wants_gradients:
        got, wanted = (torch.autograd.grad(t.square().sum(), leaves) for t in (y, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_no_gradient_passes_a_fused_activation(device):
    x, *parts, bias, name = drawn("int4", device=device)
    y = module.quantized_linear_forward(x.requires_grad_(), *parts, bias, name, "relu")
    with pytest.raises(RuntimeError, match="the fused activation has no gradient: apply it to the result instead"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["int4-g64-zero", "nf4", "fp8-a8"])
def test_registered_operator(name, device):
    x, *parts, bias, _ = drawn(name, M=2, N=8, K=64, device=device, bias=True)
    args = x.requires_grad_(), *parts, bias.requires_grad_(), name, "none"
    torch.library.opcheck(module.quantized_linear_forward.registered, args)
    torch.library.opcheck(module.dequantize_weight.registered, (*parts, name, 64, torch.float32))
    weight = tw.QuantizedWeight(name, (8, 64), Parts(*parts))
    assert_compiles(lambda x: tw.quantized_linear(x, weight, bias, "relu"), x.detach())
    assert_compiles(lambda x: tw.quantized_linear(x, weight, bias), torch.randn(20, 64, device=device))  # torch's path


def test_specials_propagate_as_in_torch(device):
    x, *rest = drawn("int4-g32", M=4, device=device)
    x[0, 3], x[1, 4], x[2, 5] = float("inf"), -float("inf"), float("nan")
    expected = module.reference(x, *rest)
    torch.testing.assert_close(module.triton_linear(x, *rest), expected, equal_nan=True)
    x, *rest = drawn("int8-a8", M=4, device=device)
    x[0, 3], x[2, 5] = float("inf"), float("nan")
    y = module.triton_linear(x, *rest)
    assert y.isnan().all(1).tolist() == [True, False, True, False]
    torch.testing.assert_close(y, module.reference(x, *rest), equal_nan=True)


@pytest.mark.parametrize("name", DYNAMIC)
def test_rows_are_quantised_as_defined(name, device):
    """The codes of the kernel are those of torch, whose e4m3 rounding is IEEE's, down to subnormal numbers."""
    ties = torch.arange(-448, 448.5, 0.5)  # halfway between codes, if the scale is 1
    x = torch.cat([ties, torch.linspace(-448, 448, 2048), torch.logspace(-14, 2, 1500, 2)]).repeat(4, 1)
    x[1] *= 2.0**-40
    x[2] = 0
    x[3] = x[3].clamp(-127, 127)  # whose scale as int8 is 1
    x = x.to(device)
    fmt = parse(name)
    codes, scale = _dynamic.quantized_rows(x, fmt)
    kernel_codes, kernel_scale = torch.empty_like(codes), torch.empty_like(scale)
    sizes = (4, 1, x.shape[1])
    rows, _ = _dynamic._plan(sizes, x.stride(0), x.dtype, torch.float32, x.get_device(), name, "none", True, False)
    rows(x, kernel_codes, kernel_scale)
    assert torch.equal(kernel_scale, scale)
    assert torch.equal(
        kernel_codes & 0x7F if name == "fp8-a8" else kernel_codes, codes & 0x7F if name == "fp8-a8" else codes
    )


def test_e4m3_codes_are_multiplied_in_fp16_without_fp8_tensor_cores(device, monkeypatch):
    args = drawn("fp8-a8", device=device)
    native = module.triton_linear(*args)
    monkeypatch.setattr(_dynamic, "has_fp8", lambda device: False)
    torch.testing.assert_close(module.triton_linear(*args), native, rtol=1e-6, atol=1e-6)


def launches(call):
    with tw.interpret() as run:
        call()
    return [launch.kernel for launch in run.launches]


@pytest.mark.parametrize("name", ["fp8-a8", "int8-a8", "fp8"])
def test_only_fp8_tensor_cores_sum_in_13_bits(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_gpu = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    assert module.precision(on_gpu, None, name) == (2.0**-13 if name == "fp8-a8" else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["fp8", "fp8-block128"])
def test_every_e4m3_code_in_16_bits(name, dtype, device):
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).repeat(1, 2)
    codes[codes & 0x7F == 0x7F] = 0  # NaN, which no weight has
    fmt = parse(name)
    scale = torch.ones(fmt.groups(256), fmt.scale_columns(2))
    weight = tw.QuantizedWeight(name, (2, 256), Parts(pack(codes, fmt), scale)).to(device)
    for columns in torch.eye(256, device=device, dtype=dtype).split(64):
        assert torch.equal(tw.quantized_linear(columns, weight), columns @ weight.dequantize(dtype).t())


@pytest.mark.parametrize("M", [1, 17, 60, 128])
@pytest.mark.parametrize("name", ["int4-g128", "int4-g128-zero", "int8-g64", "fp8-block128", "mxfp4"])
def test_every_height_of_tile_in_16_bits(name, M, device):
    args = drawn(name, M=M, N=70, K=520, device=device, dtype=torch.bfloat16)
    assert_right(module.triton_linear(*args), module.reference, *args)


def test_the_largest_number_of_rows_depends_on_shared_memory():
    rows = {gpu: _triton.largest_rows(datasheet_facts(gpu), 4, 2) for gpu in ("h200", "a100", "l40s")}
    assert rows == {"h200": 128, "a100": 128, "l40s": 64}
    assert _triton.largest_rows(datasheet_facts("h200"), 4, 4) == 16


@pytest.mark.parametrize("name", DYNAMIC)
def test_quantised_activations_run_the_kernel_with_any_number_of_rows(name, device, monkeypatch):
    weight, x = weight_of(name, 9, 64, device), torch.randn(200, 64, device=device)
    wanted = F.linear(_dynamic.rounded_activations(x, parse(name)), weight.dequantize())
    assert "_scaled_matmul" in launches(lambda: tw.quantized_linear(x, weight))
    torch.testing.assert_close(tw.quantized_linear(x, weight), wanted, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(module, "has_fp8", lambda device: False)
    assert ("_scaled_matmul" in launches(lambda: tw.quantized_linear(x, weight))) == (name == "int8-a8")


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 16), (torch.bfloat16, 128)])
def test_the_kernel_runs_up_to_a_number_of_rows(dtype, rows, device, monkeypatch):
    weight = weight_of("int4-g32", 9, 70, device)
    x = torch.randn(rows + 1, 70, device=device, dtype=dtype)
    assert any("quantized_linear" in name for name in launches(lambda: tw.quantized_linear(x[:rows], weight)))
    assert launches(lambda: tw.quantized_linear(x, weight)) == ["_dequantize_weight"]
    assert torch.equal(tw.quantized_linear(x, weight), F.linear(x, weight.dequantize(dtype)))
    monkeypatch.setattr(module, "LARGEST_ROWS", {x.get_device(): rows + 1})
    ran = "_dequantize_weight" not in launches(lambda: tw.quantized_linear(x, weight))
    assert ran == (dtype != torch.float32)


def test_what_the_kernel_does_not_take_goes_to_torch():
    weight = weight_of("int8-g32", 9, 70, "cpu")
    x = torch.randn(3, 70)
    assert tw.quantized_linear(x.double(), weight).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tw.quantized_linear(x, weight).dtype == torch.bfloat16
    mapped = torch.func.vmap(lambda row: tw.quantized_linear(row, weight))(x)
    torch.testing.assert_close(mapped, F.linear(x, weight.dequantize()))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda x, w: (x, w.dequantize()),
            TypeError,
            "weight is a Tensor: quantize it first, with tilewright.quantize",
        ),
        (lambda x, w: (x[:, :30], w), ValueError, r"shape \(3, 30\), and the weight 9x70 takes 70 features"),
        (lambda x, w: (x, w.to("meta")), ValueError, r"the weight on meta: move it with .to\(\)"),
        (lambda x, w: (x.int(), w), TypeError, "the input must be a tensor of floats, not torch.int32"),
        (lambda x, w: (x, w, None, "swish"), ValueError, "activation must be None or one of relu, "),
    ],
)
def test_bad_input_is_refused_in_one_line(make, error, message, device):
    weight = weight_of("int4-g32", 9, 70, device)
    with pytest.raises(error, match=message) as refused:
        tw.quantized_linear(*make(torch.randn(3, 70, device=device), weight))
    assert "\n" not in str(refused.value)

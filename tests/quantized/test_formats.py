"""Formats of quantised weights: packing, rounding, and the container."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from support import few_examples
from tilewright import registry
from tilewright.hardware import datasheet
from tilewright.ops.quantized import _formats
from tilewright.ops.quantized._formats import FORMATS, Format, Parts, dequantize, encode, pack, parse, unpack
from tilewright.spec import Case
from tilewright.workbench.inspect.compiler import compile_kernel
from tilewright.workbench.inspect.launches import kernel_launches

ALL = [*FORMATS]
PACKED = [name for name, fmt in FORMATS.items() if not fmt.quantizes_x]


@pytest.fixture
def interpreter():
    """No kernel runs."""


@few_examples
@given(N=st.integers(1, 9), K=st.integers(1, 300), bits=st.sampled_from([4, 8]), seed=st.integers(0, 9))
def test_unpacking_reverses_packing(N, K, bits, seed):
    fmt = parse(f"int{bits}")
    codes = torch.randint(2**bits, (N, K), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    words = pack(codes, fmt)
    assert words.dtype == torch.int32
    assert words.shape == (N, -(-K // fmt.chunk) * 16)
    assert torch.equal(unpack(words, fmt, K), codes)


@pytest.mark.parametrize(
    ("bits", "place"), [(4, lambda w, b, c, h: 16 * h + 4 * b), (8, lambda w, b, c, h: 16 * b + 8 * h)]
)
def test_a_lane_finds_its_fragment_in_its_own_words(bits, place):
    """Column 32 w + 8 b + 2 c + h of a chunk (16 w for 8 bits) is in word 4 c + w, at the bit the kernel shifts."""
    fmt = parse(f"int{bits}")
    blocks = fmt.chunk // 32
    for w, b, c, h in [(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 2, 0), (3, blocks - 1, 3, 1), (2, 1, 0, 1)]:
        codes = torch.zeros(1, 2 * fmt.chunk, dtype=torch.uint8)
        codes[0, fmt.chunk + 8 * blocks * w + 8 * b + 2 * c + h] = 5
        words = pack(codes, fmt)[0].tolist()
        assert words[16 + 4 * c + w] == 5 << place(w, b, c, h)
        assert sum(word != 0 for word in words) == 1


@pytest.mark.parametrize("name", ["int4-g128", "int8-g32-zero"])
def test_the_compiled_kernel_keeps_the_dequantised_weight_in_registers(name):
    """On Hopper, between the loads of a chunk and its products nothing is stored to shared memory or shuffled."""
    op = registry.load("quantized_linear")
    case = Case((("M", 16), ("N", 4096), ("K", 4096), ("format", name), ("bias", False)), "bfloat16")
    launches = kernel_launches(op, op.kernels["triton"], case, datasheet("h200"))
    (launch,) = [one for one in launches if one.name == "_quantized_linear_fwd"]
    ptx = compile_kernel(launch.code).texts["ptx"]
    before_epilogue = ptx[: ptx.rindex("wgmma.mma_async")]
    assert "wgmma.mma_async" in before_epilogue
    assert "st.shared" not in before_epilogue
    assert "shfl" not in before_epilogue


@pytest.mark.parametrize("name", ALL)
def test_every_weight_is_within_half_a_step_of_its_code(name):
    """The error of nearest rounding, computed from the values that codes can have."""
    fmt, K = FORMATS[name], 150
    weight = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    parts = tw.quantize(weight, name).parts
    assert parts.scale.shape == (fmt.groups(K), fmt.scale_columns(5))
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    if fmt.quantizes_x and fmt.is_integer:
        codes = (codes.int() - 128).to(torch.int8)
    found = _formats._values(codes, fmt, parts.levels, torch.float64)
    values = found[found.isfinite()].unique()
    scale = _formats._expand(_formats.decoded_scale(parts.scale, fmt, torch.float64), fmt, weight.shape)
    zero = 0 if parts.zero is None else _formats._expand(parts.zero.double(), fmt, weight.shape)
    target = (weight.double() / scale + zero).clamp(values.min(), values.max())
    nearest = (target[..., None] - values).abs().amin(-1)
    got = dequantize(parts, fmt, K, torch.float64) / scale + zero
    assert ((got - target).abs() <= nearest + 1e-5).all()
    # Scales use the range: only MX scales, powers of two that OCP rounds down, let the largest weights saturate.
    if not fmt.has_e8m0:
        step = values.diff().max()
        assert (dequantize(parts, fmt, K, torch.float64) - weight).abs().max() <= step * scale.max() * 0.51


def test_codes_round_to_even_as_their_definitions_say():
    def encoded(name, values):
        return encode(torch.tensor(values), FORMATS[name]).tolist()

    # E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6; the tie 2.5 is between 2 (mantissa 0) and 3 (mantissa 1).
    assert encoded("mxfp4", [0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -5.0]) == [0, 0, 2, 2, 4, 4, 6, 6, 7, 14]
    assert encoded("fp8", [1.0, 448.0, 1e9, -448.0, 2.0**-9, 17.0]) == [0x38, 0x7E, 0x7E, 0xFE, 1, 0x58]
    assert encoded("int4", [-9.0, -8.0, 0.5, 1.5, 7.6]) == [0, 0, 8, 10, 15]


def test_mx_scales_are_the_exponents_of_the_specification():
    """OCP MX: the scale is 2^(floor(log2(largest)) - exponent of the largest element value)."""
    weight = torch.zeros(1, 96)
    weight[0, 0], weight[0, 32], weight[0, 64] = 6.0, 7.9, 0.75
    assert tw.quantize(weight, "mxfp4").scale.t().tolist() == [[127, 127, 124]]
    assert tw.quantize(weight, "mxfp8").scale.t().tolist() == [[121, 121, 118]]
    assert tw.quantize(weight, "mxfp4").dequantize()[0, [0, 32, 64]].tolist() == [6.0, 6.0, 0.75]


@pytest.mark.parametrize("name", ALL)
def test_scaling_a_weight_scales_its_codes_only_in_the_scale(name):
    weight = torch.randn(4, 70, generator=torch.Generator().manual_seed(2))
    once, twice = tw.quantize(weight, name), tw.quantize(4 * weight, name)
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(4 * once.dequantize(), twice.dequantize())


@pytest.mark.parametrize("name", ALL)
def test_zero_weights_stay_zero(name):
    assert not tw.quantize(torch.zeros(3, 40), name).dequantize().any()


def test_groups_do_not_affect_each_other():
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    other = weight.clone()
    other[:, 32:] *= 100
    a, b = (tw.quantize(w, "int4-g32").dequantize() for w in (weight, other))
    assert torch.equal(a[:, :32], b[:, :32])


@pytest.mark.parametrize("name", ["int4-g32-zero", "nf4", "mxfp4", "fp8-a8", "int8-float-zero"])
def test_the_container_is_saved_moved_and_copied(name):
    weight = tw.quantize(torch.randn(6, 100, generator=torch.Generator().manual_seed(4)).bfloat16(), name)
    expected = weight.dequantize()
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(weight)):
        assert torch.equal(other.dequantize(), expected)
    fresh = tw.quantize(torch.ones(6, 100).bfloat16(), name)
    fresh.load_state_dict(weight.state_dict())
    assert torch.equal(fresh.dequantize(), expected)
    for moved in (fresh.half(), fresh.double(), fresh.to(torch.float16)):  # rounds no scale
        assert torch.equal(moved.dequantize(), expected)
        assert moved.scale.dtype == weight.scale.dtype
    assert weight.to("meta").device.type == "meta"
    assert not any(p.requires_grad for p in weight.parameters())


def test_bits_per_weight():
    weight = torch.randn(256, 1024).bfloat16()
    bits = {name: 8 * tw.quantize(weight, name).nbytes / weight.numel() for name in ("int4-g128", "mxfp4", "int8")}
    assert bits == {"int4-g128": 4.125, "mxfp4": 4.25, "int8": 8.03125}
    assert "int4-g128, 256x1024, 4.12 bits per weight" in repr(tw.quantize(weight, "int4-g128"))


def test_dequantizing_rounds_once():
    weight = tw.quantize(torch.randn(7, 130, generator=torch.Generator().manual_seed(5)), "int4-g64-float-zero")
    assert torch.equal(weight.dequantize(torch.bfloat16), weight.dequantize(torch.float32).bfloat16())
    torch.testing.assert_close(weight.dequantize(torch.float64).float(), weight.dequantize(), rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("weight", "name", "error", "message"),
    [
        (torch.ones(2, 32), "int5", ValueError, "unknown format 'int5': choose from int8-a8, "),
        (torch.ones(2, 32), "int4-g100", ValueError, "unknown format 'int4-g100': groups have 32, 64, 128 columns"),
        (torch.ones(2, 32), None, ValueError, "unknown format None: choose from "),
        (torch.tensor([[1.0, float("nan")]]), "int4", ValueError, "the weight has NaN or infinities, which no scale "),
        (torch.ones(4), "int4", ValueError, r"quantize takes a matrix of floats, not \(4,\) of torch.float32"),
        (torch.ones(2, 0), "int4", ValueError, "quantize takes a matrix of floats"),
        (torch.ones(2, 4, dtype=torch.int64), "int4", ValueError, "not .2, 4. of torch.int64"),
        ([[1.0]], "int4", TypeError, "quantize takes a plain tensor, not list: pass the local or full tensor"),
    ],
)
def test_bad_input_is_refused_in_one_line(weight, name, error, message):
    with pytest.raises(error, match=message) as refused:
        tw.quantize(weight, name)
    assert "\n" not in str(refused.value)


def test_dtensors_are_refused(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.ones(4, 32), init_device_mesh("cpu", (1,)))
        with pytest.raises(
            TypeError, match="quantize takes a plain tensor, not DTensor: pass the local or full tensor"
        ):
            tw.quantize(weight, "int4")
    finally:
        dist.destroy_process_group()


def test_formats_are_data():
    assert parse("int4-g128") == Format("int4-g128", "int4", 128)
    assert all(str(fmt) == name for name, fmt in FORMATS.items())
    parts = Parts(torch.zeros(1, 16, dtype=torch.int32), torch.ones(1, 1))
    assert dequantize(parts, parse("int4"), 3).tolist() == [[-8.0] * 3]

"""Weights of checkpoints: each layout is dequantised here from its definition, element by element."""

import json

import pytest
import torch

import tilewright as tw

N, K, GROUP = 16, 96, 32


@pytest.fixture
def interpreter():
    """No kernel runs."""


def drawn(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def word(codes, bits):
    """Return the int32 with these codes from the lowest bits up."""
    value = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def scales(seed=9):
    return (0.5 + torch.rand(K // GROUP, N, generator=torch.Generator().manual_seed(seed))).half()


def assert_same(loaded, expected):
    assert torch.equal(loaded.dequantize(torch.float64), expected)


def packed_rows(codes, bits):
    """Return words [rows / (32 / bits), columns], each with consecutive rows of one column."""
    per = 32 // bits
    rows = range(0, codes.shape[0], per)
    return torch.tensor([[word(codes[r : r + per, c], bits) for c in range(codes.shape[1])] for r in rows]).int()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq-v2"])
def test_gptq(layout, bits, act_order):
    codes, zeros, scale = drawn(2**bits, K, N), drawn(2**bits, K // GROUP, N, seed=1), scales()
    zeros[0, 0] = 0  # which the older layout stores as the largest code
    g_idx = (torch.randperm(K, generator=torch.Generator().manual_seed(2)) if act_order else torch.arange(K)) // GROUP
    stored = (zeros - 1) % 2**bits if layout == "gptq" else zeros
    tensors = {
        "qweight": packed_rows(codes, bits),
        "qzeros": packed_rows(stored.t(), bits).t().contiguous(),
        "scales": scale,
        "g_idx": g_idx.int(),
    }
    expected = torch.tensor(
        [
            [(int(codes[k, n]) - int(zeros[g_idx[k], n])) * float(scale[g_idx[k], n]) for k in range(K)]
            for n in range(N)
        ],
        dtype=torch.float64,
    )
    loaded = tw.load_quantized(tensors, layout)
    assert loaded.format == f"int{bits}-g32-zero"
    assert (loaded.order is not None) == act_order
    assert_same(loaded, expected)


def test_symmetric_gptq_has_no_zero_points():
    tensors = {
        "qweight": packed_rows(drawn(16, K, N), 4),
        "qzeros": torch.full((K // GROUP, N // 8), word([7] * 8, 4)).int(),
        "scales": scales(),
    }
    assert tw.load_quantized(tensors, "gptq").format == "int4-g32"


def test_awq():
    """Word j of a row holds columns 8 j + 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits up."""
    codes, zeros, scale = drawn(16, K, N), drawn(16, K // GROUP, N, seed=1), scales()
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(matrix):
        return torch.tensor([[word(row[j : j + 8][order], 4) for j in range(0, N, 8)] for row in matrix]).int()

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scale}
    expected = [
        [(int(codes[k, n]) - int(zeros[k // GROUP, n])) * float(scale[k // GROUP, n]) for k in range(K)]
        for n in range(N)
    ]
    assert_same(tw.load_quantized(tensors, "awq"), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("bits", [4, 8])
def test_hqq(bits):
    rows = N * K // GROUP
    codes = drawn(2**bits, rows, GROUP).to(torch.uint8)
    scale = (0.5 + torch.rand(rows, 1, generator=torch.Generator().manual_seed(3))).half()
    zero = (torch.rand(rows, 1, generator=torch.Generator().manual_seed(4)) * 2**bits).half()
    packed = codes if bits == 8 else codes[: rows // 2] << 4 | codes[rows // 2 :]
    tensors = {"W_q": packed, "scale": scale, "zero": zero, "shape": (N, K), "nbits": bits, "group_size": 32, "axis": 1}
    loaded = tw.load_quantized(tensors, "hqq")
    expected = ((codes.double() - zero.double()) * scale.double()).reshape(N, K)
    torch.testing.assert_close(loaded.dequantize(torch.float64), expected, rtol=0, atol=2.0 ** (bits - 23))


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(nested):
    """Blocks of 64 weights in the order of memory, the first of a pair in the high nibble."""
    columns, blocks = 128, N * 128 // 64
    codes = drawn(16, N * columns).to(torch.uint8)
    levels = torch.linspace(-1, 1, 16)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [N, columns]}
    tensors = {"weight": (codes[0::2] << 4 | codes[1::2]).view(-1, 1), "weight.quant_map": levels}
    if nested:
        inner, table = drawn(256, blocks, seed=1).to(torch.uint8), torch.linspace(-1, 1, 256)
        outer = torch.tensor([2.0, 3.0])
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 4.0}
        tensors |= {
            "weight.absmax": inner,
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": table,
        }
        absmax = torch.stack([table[int(code)] * outer[n // 16] + 4.0 for n, code in enumerate(inner)])
    else:
        absmax = torch.rand(blocks, generator=torch.Generator().manual_seed(5)) + 0.5
        tensors["weight.absmax"] = absmax
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    expected = [float(levels[int(code)].double() * absmax[n // 64].double()) for n, code in enumerate(codes)]
    loaded = tw.load_quantized(tensors, "bitsandbytes")
    assert loaded.format == "nf4"
    assert_same(loaded, torch.tensor(expected, dtype=torch.float64).view(N, columns))


@pytest.mark.parametrize("zeros", ["none", "packed", "int8"])
@pytest.mark.parametrize("act_order", [False, True])
def test_compressed_tensors(zeros, act_order):
    codes, zero, scale = drawn(16, N, K) - 8, drawn(16, N, K // GROUP, seed=1) - 8, scales().t().contiguous()
    g_idx = (torch.randperm(K, generator=torch.Generator().manual_seed(2)) if act_order else torch.arange(K)) // GROUP
    tensors = {
        "weight_packed": packed_rows((codes + 8).t(), 4).t().contiguous(),
        "weight_scale": scale,
        "weight_shape": torch.tensor([N, K]),
        "weight_g_idx": g_idx.int() if act_order else torch.full((K,), -1).int(),
    }
    if zeros != "none":
        tensors["weight_zero_point"] = packed_rows(zero + 8, 4) if zeros == "packed" else zero.to(torch.int8)
    else:
        zero = torch.zeros_like(zero)
    expected = [
        [(int(codes[n, k]) - int(zero[n, g_idx[k]])) * float(scale[n, g_idx[k]]) for k in range(K)] for n in range(N)
    ]
    assert_same(tw.load_quantized(tensors, "compressed-tensors"), torch.tensor(expected, dtype=torch.float64))


def test_a_scale_per_channel_and_columns_that_do_not_fill_a_word():
    codes = drawn(16, N, 43)
    tensors = {
        "weight_packed": packed_rows(torch.nn.functional.pad(codes, (0, 5)).t(), 4).t(),
        "weight_scale": scales()[:1].t(),
        "weight_shape": torch.tensor([N, 43]),
    }
    loaded = tw.load_quantized(tensors, "compressed-tensors")
    assert loaded.format == "int4"
    assert_same(loaded, (codes - 8).double() * scales()[:1].t().double())


def test_a_linear_layer_with_reordered_columns(device):
    g_idx = torch.randperm(K, generator=torch.Generator().manual_seed(2)) // GROUP
    tensors = {"qweight": packed_rows(drawn(16, K, N), 4), "qzeros": torch.zeros(K // GROUP, N // 8).int()}
    loaded = tw.load_quantized(tensors | {"scales": scales(), "g_idx": g_idx}, "gptq").to(device)
    x = torch.randn(3, K, device=device, dtype=torch.float64).float()
    expected = x.double() @ loaded.dequantize(torch.float64).t()
    with tw.interpret() as run:
        y = tw.quantized_linear(x, loaded)
    assert device == "cuda" or run.launches
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


GPTQ = {"qweight": torch.zeros(12, 8).int(), "qzeros": torch.zeros(3, 1).int(), "scales": torch.ones(3, 8)}
CT = {
    "weight_packed": torch.zeros(8, 12).int(),
    "weight_scale": torch.ones(8, 3),
    "weight_shape": torch.tensor([8, 96]),
}
STATE = "weight.quant_state.bitsandbytes__nf4"
NF4 = {
    "weight": torch.zeros(256, 1).byte(),
    "weight.absmax": torch.ones(8),
    "weight.quant_map": torch.ones(16),
    STATE: torch.tensor([*b'{"shape": [8, 64], "blocksize": 64}']).byte(),
}
HQQ = {"W_q": torch.zeros(4, 32), "scale": torch.ones(8, 1), "zero": torch.ones(8, 1), "shape": (8, 32)}


@pytest.mark.parametrize(
    ("tensors", "layout", "message"),
    [
        (GPTQ, "gguf", "unknown layout 'gguf': choose from gptq, gptq-v2, awq, hqq, bitsandbytes, compressed-tensors"),
        ({}, "awq", "a layer in the layout awq has qweight, qzeros, scales: qweight is missing"),
        (GPTQ, "awq", r"qweight \(12, 8\) is not that of 4-bit AWQ with scales \(3, 8\)"),
        (
            GPTQ | {"scales": torch.full((3, 8), float("nan"))},
            "gptq",
            "the scales have NaN or infinities: the checkpoint",
        ),
        (GPTQ | {"scales": torch.ones(6, 8)}, "gptq", "6 scales in a row of 96 columns are not one per"),
        (GPTQ | {"qweight": torch.zeros(12, 8)}, "gptq", "qweight must be a matrix of int32, not"),
        (GPTQ | {"scales": torch.ones(3, 4)}, "gptq", "8x96 .* has 3x8 scales, not 3x4"),
        (
            GPTQ | {"g_idx": torch.arange(96).flip(0) // 40},
            "gptq",
            "g_idx does not assign 32 columns to each of 3 groups",
        ),
        (GPTQ | {"qzeros": torch.zeros(3, 3).int()}, "gptq", "only weights of 4 and 8 bits are supported, not 12"),
        (CT | {"weight_packed": torch.zeros(8, 9).int()}, "compressed-tensors", "only weights of 4 and 8 bits are"),
        (HQQ | {"nbits": 4, "group_size": 32, "axis": 0}, "hqq", "HQQ needs axis=1 and groups that divide 32 columns"),
        (HQQ | {"nbits": 4, "group_size": 64, "axis": 1}, "hqq", "HQQ needs axis=1 and groups that divide 32 columns"),
        (HQQ | {"nbits": 4, "group_size": 0, "axis": 1}, "hqq", "HQQ needs axis=1 and groups that divide 32 columns"),
        (HQQ | {"nbits": 8, "group_size": 32, "axis": 1}, "hqq", "W_q has 128 elements, and a weight 8x32, unpacked,"),
        (CT | {"weight_packed": torch.zeros(7, 12).int()}, "compressed-tensors", "must have 8 rows, as weight_shape"),
        (CT | {"weight_shape": torch.tensor([8])}, "compressed-tensors", "weight_shape has 1 elements, and a matrix"),
        (NF4 | {STATE: torch.zeros(2).byte()}, "bitsandbytes", "is not the JSON of a matrix's state"),
        (NF4 | {"weight.absmax": torch.ones(3)}, "bitsandbytes", "weight.absmax has 3 elements, and a weight 8x64"),
    ],
)
def test_bad_checkpoints_are_refused_in_one_line(tensors, layout, message):
    with pytest.raises(ValueError, match=message) as refused:
        tw.load_quantized(tensors, layout)
    assert "\n" not in str(refused.value)

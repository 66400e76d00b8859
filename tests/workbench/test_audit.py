"""The traffic that `audit` counts, compared with counts by hand."""

import json

import pytest
import torch

import tilewright
from interpreter import kernels
from tilewright import registry
from tilewright.errors import BadInput, TooLarge
from tilewright.spec import Case
from tilewright.workbench.audit import audit, case_elements, default_case, shrink_case
from tilewright.workbench.audit.inputs import make_input


def audit_op(op_name: str, kernel: str, dtype: str = "bfloat16", **sizes):
    op = registry.load(op_name)
    args = op.make(Case(tuple(sizes.items()), dtype))
    return audit(op.kernels[kernel].fn, *args, cost=op.cost(*args))


@pytest.mark.parametrize(("kernel", "moves"), [("triton-three-pass", 4), ("triton-online", 3), ("triton", 2)])
def test_bytes_moved_by_each_softmax_kernel(kernel, moves):
    found = audit_op("softmax", kernel, M=5, N=4096)
    assert found.moved == moves * found.result.nbytes
    assert found.distinct == found.min_bytes == 2 * found.result.nbytes
    assert found.scratch == 0
    (launch,) = found.launches
    assert launch.arguments["x_ptr"].reads_per_element == moves - 1
    assert f"{moves / 2:.2f}x the minimum bytes" in found.summary()[0]


@pytest.mark.parametrize("tile", [16, 32, 64])
def test_reads_per_element_of_a_tiled_matmul(tile):
    found = tilewright.audit(kernels.matmul, torch.randn(64, 48), torch.randn(48, 128), tile)
    a, b, c = found.launches[0].arguments.values()
    assert (a.reads_per_element, b.reads_per_element) == (128 / tile, 64 / tile)
    assert (c.stored, c.distinct_written, c.loaded) == (64 * 128 * 4, 64 * 128 * 4, 0)
    torch.testing.assert_close(found.result, found.launches[0].arguments["c_ptr"].tensor)


def test_attention_scores_stay_on_chip():
    found = audit_op("attention", "triton", B=1, H=2, HKV=2, LQ=128, LK=128, D=32, causal=False)
    scores = 2 * 128 * 128 * 2
    assert all(t.tensor.nbytes < scores for t in found.traffic)
    assert found.scratch < scores / 10  # one number per row, for the backward pass


def test_coalescing():
    x = torch.randn(64, 64)
    straight = tilewright.audit(kernels.copy, x).launches[0].arguments["x_ptr"]
    assert straight.sectors * 32 == straight.loaded
    found = tilewright.audit(kernels.column, x)
    across = found.launches[0].arguments["x_ptr"]
    assert across.sectors == 64
    assert across.loaded == 64 * 4
    assert any("about 8.0x the bytes they use" in line for line in found.summary())


def test_masked_lanes_and_waves():
    found = tilewright.audit(kernels.copy, torch.randn(65))
    x = found.launches[0].arguments["x_ptr"]
    assert (x.lanes, x.masked) == (128, 63)
    assert "2 programs on 132 SMs, 130 idle" in found.summary()[-1]
    many = tilewright.audit(kernels.copy, torch.randn(64 * 133))
    assert "1.0 waves at one program per SM, the last 1% full" in many.summary()[-1]


def test_several_launches_are_listed_and_summed():
    x = torch.randn(100)
    found = tilewright.audit(kernels.two_launches, x)
    assert [launch.kernel for launch in found.launches] == ["_double", "_copy"]
    assert found.moved == 4 * x.nbytes
    assert found.scratch == x.nbytes
    assert [found.role(t) for t in found.traffic] == ["input", "scratch", "scratch", "output"]


def test_maps_of_reads_and_writers():
    found = tilewright.audit(kernels.copy, torch.randn(10, 10))
    x, y = found.launches[0].arguments.values()
    assert x.reads.shape == (10, 10)
    assert (x.reads == 1).all()
    assert (x.writer == 0).all()
    assert y.writer.reshape(-1).tolist() == [1] * 64 + [2] * 36


def test_findings_are_collected():
    found = tilewright.audit(kernels.copy_too_much, torch.randn(100))
    assert [f.kind for f in found.findings] == ["out of bounds"]
    assert json.loads(json.dumps(found.as_json()))["findings"][0]["argument"] == "x_ptr"


def test_a_fault_in_several_launches_is_listed_once():
    x = torch.randn(100)
    found = tilewright.audit(lambda: [kernels.copy_too_much(x) for _ in range(3)])
    assert [(f.kind, f.lanes) for f in found.findings] == [("out of bounds", 84)]
    assert len(set(found.summary())) == len(found.summary())


def test_inputs_that_are_too_large_raise_with_a_suggestion():
    with pytest.raises(TooLarge, match="make the tensors 4 times smaller"):
        audit(kernels.copy, torch.randn(400), elements=100)
    op = registry.load("softmax")
    small = shrink_case(op, Case((("M", 2**20), ("N", 2**20)), "bfloat16"), elements=2**20)
    assert case_elements(op, small) == 2**20


def test_the_default_case_is_supported_by_every_triton_kernel():
    op = registry.load("softmax")
    args = op.make(default_case(op), device="meta")
    assert all(kernel.fits(*args) for kernel in op.kernels.values() if kernel.language == "triton")


def test_parsing_of_inputs():
    assert make_input("3x4:bf16").shape == (3, 4)
    assert make_input("3x4:bf16").dtype == torch.bfloat16
    assert make_input("5:int64").dtype == torch.int64
    assert [make_input("7"), make_input("0.5"), make_input("true")] == [7, 0.5, True]
    with pytest.raises(BadInput, match="write a tensor as"):
        make_input("3x4:bf17")


PRINTED = """\
two_launches
launch          argument         loaded  stored  distinct  reads/elem  masked off  overfetch*
_double 32x1x1  x_ptr (input)    4.0 KB            4.0 KB        1.00          2%       1.00x
                y_ptr (scratch)          4.0 KB    4.0 KB                      2%       1.00x
_copy 16x1x1    x_ptr (scratch)  4.0 KB            4.0 KB        1.00          2%       1.00x
                y_ptr (output)           4.0 KB    4.0 KB                      2%       1.00x
* bytes of the 32-byte sectors"""


def test_printing_an_audit_shows_the_table_the_summary_and_the_findings():
    audited = tilewright.audit(kernels.two_launches, torch.randn(1000))
    assert str(audited).startswith(PRINTED)
    assert str(audited).endswith("\n".join(audited.summary()))
    faulty = tilewright.audit(kernels.copy_too_much, torch.randn(100))
    assert str(faulty).endswith(str(faulty.findings[0]))


def test_printing_an_audit_or_a_launch_prints_no_arrays():
    audited = tilewright.audit(kernels.copy, torch.randn(100_000))
    assert len(repr(audited)) < 1000
    assert len(repr(audited.launches[0])) < 2000


def returns_its_input(x):
    return kernels.copy(x), x


def with_zeroed_scratch(x):
    total = torch.zeros_like(x)
    kernels._copy[(2,)](x, total, x.numel(), 64)
    return kernels.copy(total + 1)


def update(x, out):
    kernels._copy[(2,)](x, x, x.numel(), 64)
    kernels._copy[(2,)](x, out, x.numel(), 64)


WEIGHT = torch.randn(100)


def of_a_constant(x):
    return kernels.copy(WEIGHT)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (returns_its_input, ["returned unchanged", "output"]),
        (with_zeroed_scratch, ["input", "scratch", "scratch", "output"]),
        (lambda x: update(x, torch.empty(100)), ["in place", "in place", "in place", "scratch"]),
        (of_a_constant, ["input", "output"]),
    ],
)
def test_roles(call, expected):
    found = audit(call, torch.randn(100))
    assert [found.role(t) for t in found.traffic] == expected


def test_a_buffer_that_the_call_only_fills_is_an_output():
    found = audit(update, torch.randn(100), torch.zeros(100))
    assert [found.role(t) for t in found.traffic][2:] == ["in place", "output"]
    assert found.scratch == 0

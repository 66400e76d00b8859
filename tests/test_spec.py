"""Ops, cases, drawn inputs and costs."""

import pytest
import torch

from tilewright import registry
from tilewright.errors import BadCase
from tilewright.spec import Case, Cost, Draw, Op, grid, kernel, matrix_unit, points


def test_grid_crosses_and_points_pair():
    assert [str(case) for case in grid(M=(1, 2), N=(3,))] == ["M=1,N=3", "M=2,N=3"]
    assert [str(case) for case in points(M=(1, 2), N=(3, 4))] == ["M=1,N=3", "M=2,N=4"]
    with pytest.raises(ValueError, match="shorter"):
        points(M=(1, 2), N=(3,))


def test_parsing_a_case_inverts_printing_it():
    like = Case((("M", 1), ("causal", False), ("form", "tanh")))
    case = Case((("M", 64), ("causal", True), ("form", "none")))
    assert Case.parse(str(case), like) == case


@pytest.mark.parametrize("text", ["M=3,N", "M=3", "M=x,N=1", "M=-1,N=2", "M=1,Q=2", "", "M=1;N=2"])
def test_the_error_of_a_bad_case_shows_a_good_one(text):
    with pytest.raises(BadCase, match="write it like --case M=1,N=2"):
        Case.parse(text, grid(M=(1,), N=(2,))[0])


def test_modes_are_true_or_false():
    like = grid(causal=(False,))[0]
    assert Case.parse("causal=true", like)["causal"] is True
    with pytest.raises(BadCase):
        Case.parse("causal=maybe", like)


def test_values_depend_on_the_seed_alone():
    case = grid(M=(4,), N=(5,))[0].with_dtype("float16")
    first, again, other = (Draw(case, "cpu", seed).randn("M", "N", 2) for seed in (1, 1, 2))
    assert first.shape == (4, 5, 2)
    assert first.dtype == torch.float16
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_two_draws_of_one_case_differ():
    draw = Draw(grid(M=(4,))[0], "cpu", 0)
    assert not torch.equal(draw.randn("M"), draw.randn("M"))


def test_random_integers_are_below_their_bound():
    case = grid(M=(50,), N=(3,))[0]
    first, again = (Draw(case, "cpu", 1).randint("M", 2, high="N") for _ in range(2))
    assert torch.equal(first, again)
    assert first.dtype == torch.int64
    assert set(first.flatten().tolist()) == {0, 1, 2}
    assert len(set(Draw(case, "cpu", 1, "repeated").randint("M", high=50).tolist())) == 1
    assert Draw(case, "meta", 1).randint("M", high="N").shape == (50,)


def test_the_floor_is_the_slowest_unit_and_reads_have_their_own_ceiling():
    rates = {"copy": 4.0, "read": 5.0, "fp32": 100.0}
    assert Cost(read=20, written=20, flops={"fp32": 10}).floor(rates) == ("copy", 10.0)
    assert Cost(read=100, written=1, flops={"fp32": 10}).floor(rates)[0] == "read"
    assert Cost(read=1, written=1, flops={"fp32": 1000}).floor(rates) == ("fp32", 10.0)
    assert Cost(read=1, written=1, flops={"unheard of": 1e9}).floor(rates) == ("copy", 0.5)
    assert Cost(read=1, written=1).floor({}) == ("unknown", 0.0)


def test_fp32_matmul_uses_tensor_cores_only_if_torch_allows_tf32():
    assert matrix_unit(torch.bfloat16) == "tensor.bfloat16"
    assert matrix_unit(torch.float32) == "fp32"
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert matrix_unit(torch.float32) == "tensor.tf32"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_an_op_has_eager_and_compile_from_its_reference():
    op = Op("double", lambda x: x * 2, lambda x: Cost(0, 0), lambda draw: (draw.randn("N"),), grid(N=(3,)), [])
    assert list(op.kernels) == ["eager", "compile"]
    assert not op.kernels["eager"].differentiable, "no backward cost: no gradients to check"


def test_the_kernel_decorator_does_not_change_the_function():
    def mine(x):
        return x

    assert kernel("softmax")(mine) is mine


def test_a_size_sweep_changes_one_size_from_1_kib_to_4_gib():
    softmax = registry.load("softmax")
    found = softmax.sizes()
    sizes = [sum(a.nbytes for a in softmax.make(case, "meta")) for case in found]
    assert [2 * size for size in sizes] == [2**power for power in range(10, 33, 2)], "inputs and results"
    assert {case["N"] for case in found} == {softmax.bench[0]["N"]}
    assert registry.load("linear_cross_entropy").sizes() == [], "nothing of it grows alone"


def test_a_size_sweep_starts_from_the_smallest_bench_case():
    found = registry.load("sum").sizes()
    assert len(found) == 12
    assert {case["N"] for case in found} == {64}


def test_the_swept_size_need_not_be_a_batch():
    rope = registry.load("rope")
    assert rope.batch == "B"
    assert [case["S"] for case in rope.sizes()[:2]] == [4, 16]
    assert {case["B"] for case in rope.sizes()} == {4}

"""Verdicts on kernels that are wrong in common ways, and on right ones that look odd."""

import random

import pytest
import torch

import tilewright as tw
from tilewright import registry, source
from tilewright.errors import GPUUnusable
from tilewright.spec import VALUES, Cost, Kernel, Op, grid, points
from tilewright.workbench.check import cases, check, elements
from tilewright.workbench.check.budget import (
    ExpectedTensor,
    Match,
    Mismatch,
    compare,
    expect,
    shows_nothing,
    tighten_for_integers,
)
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import FIRST, HALF_REPLACED, ONE_REPLACED, ReferenceRuns
from tilewright.workbench.check.judge import MAX_CRASHES, InProcess, Judge
from tilewright.worker import execute

SOFTMAX = registry.load("softmax")


def verdict(fn, op=SOFTMAX, *, differentiable=False, seed=0, **more):
    kernel = Kernel("mine", fn, "torch", lambda *_: True, differentiable)
    return next(check(op, [kernel], device="cpu", seed=seed, **more))


def in_pieces(x):
    """Compute softmax with another order of summation."""
    e = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
    total = sum(part.sum(-1, keepdim=True) for part in e.flip(-1).split(97, dim=-1))
    return (e / total).to(x.dtype)


RIGHT = {
    "the reference": lambda x: torch.softmax(x, -1),
    "more accurate than torch": lambda x: torch.softmax(x.double(), -1).to(x.dtype),
    "another order": in_pieces,
    "through logarithms": lambda x: torch.log_softmax(x.float(), -1).exp().to(x.dtype),
}
WRONG = {
    "zeros": torch.zeros_like,
    "the mean": lambda x: torch.full_like(x, 1.0 / x.shape[-1]),
    "computed in bfloat16": lambda x: torch.softmax(x.bfloat16(), -1).to(x.dtype),
    "a hundred roundings of fp32 off": lambda x: torch.softmax(x, -1) * (1 + 100 * 2.0**-24),
    "not normalised": lambda x: torch.exp(x - x.amax(-1, keepdim=True)),
    "along the wrong dimension": lambda x: torch.softmax(x, 0),
    "last column skipped": lambda x: torch.cat([torch.softmax(x, -1)[:, :-1], torch.zeros_like(x[:, -1:])], -1),
    "shape that would broadcast": lambda x: torch.softmax(x, -1)[:1],
    "another dtype": lambda x: torch.softmax(x.double(), -1),
    "NaN": lambda x: torch.softmax(x, -1) * float("nan"),
    "two results": lambda x: (torch.softmax(x, -1), x),
    "input zeroed": lambda x: (torch.softmax(x, -1), x.zero_())[0],
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    found = verdict(RIGHT[name])
    assert found.verdict == "right", found.reason


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    found = verdict(WRONG[name], dtypes=["float32"])
    assert found.verdict == "wrong"
    assert found.reason


@pytest.mark.parametrize("dtype", SOFTMAX.dtypes)
def test_zeros_are_wrong_for_a_softmax_so_long_that_every_value_is_tiny(dtype):
    found = verdict(torch.zeros_like, cases=points(M=(1,), N=(393216,)), dtypes=[dtype])
    assert found.verdict == "wrong"


def test_accumulating_in_half_precision_fails():
    op = Op(
        "total",
        lambda x: x.float().sum(-1).to(x.dtype),
        lambda x: Cost(0, 0),
        lambda draw: (draw.randn("M", "N"),),
        grid(M=(4,), N=(2048,)),
        [],
    )

    def naive(x):
        total = torch.zeros_like(x[:, 0])
        for column in x.unbind(-1):
            total += column
        return total

    assert verdict(naive, op, dtypes=["float16"], depth="quick").verdict == "wrong"
    assert verdict(lambda x: x.double().sum(-1).to(x.dtype), op).verdict == "right"


def test_a_kernel_more_exact_than_the_float64_reference_is_right():
    """1 + tanh(x) cancels to zero even in float64 where the exact value is 1e-20."""
    op = Op(
        "twice_sigmoid",
        lambda x: 1 + torch.tanh(x),
        lambda x: Cost(0, 0),
        lambda draw: (draw.randn("N", scale=30),),
        grid(N=(20000,)),
        [],
    )
    assert verdict(lambda x: (2 * torch.sigmoid(2 * x.double())).to(x.dtype), op).verdict == "right"


def test_wrong_gradients_are_wrong_though_the_values_are_right():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.softmax(x, -1)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            (y,) = ctx.saved_tensors
            return 0.5 * y * (dy - (y * dy).sum(-1, keepdim=True))

    assert verdict(Halved.apply, dtypes=["float32"]).verdict == "right"
    found = verdict(Halved.apply, differentiable=True, dtypes=["float32"])
    assert found.verdict == "wrong"
    assert "gradient of x" in found.reason


@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [100, 2000])
def test_the_small_gradients_of_a_mean_must_be_computed(loss, dtype, size):
    """The output is larger than its gradients by the number of elements, and does not loosen their budgets."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, size, generator=generator).to(dtype) for _ in range(2))
    y = y.argmax(-1) if loss == "cross_entropy" else y
    want = expect(getattr(torch.nn.functional, loss), [x, y], [torch.ones((), dtype=dtype)], {0: "x"})[1]
    right = want.truth.to(dtype)
    assert isinstance(compare(right, want), Match)
    for wrong in (torch.zeros_like(right), right / 2, -right, right.masked_fill(right > 0, 0.0)):
        assert isinstance(compare(wrong, want), Mismatch)


class DeltaAttention(torch.autograd.Function):
    """Attention with the backward pass of FlashAttention, which reads outputs that were rounded to the dtype."""

    @staticmethod
    def forward(ctx, q, k, v):
        p = torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, -1)
        out = (p @ v.float()).to(q.dtype)
        ctx.save_for_backward(q, k, v, p, out)
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v, p, out = (t.float() for t in ctx.saved_tensors)
        delta = (do.float() * out).sum(-1, keepdim=True)
        ds = p * (do.float() @ v.mT - delta) * q.shape[-1] ** -0.5
        return (ds @ k).to(do.dtype), (ds.mT @ q).to(do.dtype), (p.mT @ do.float()).to(do.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_backward_pass_may_read_rounded_outputs(dtype):
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        args = [torch.randn(2, n, 16, generator=generator).mul(2).round().to(dtype) for n in (1, 17, 17)]
        grad = torch.randn(2, 1, 16, generator=generator).to(dtype)
        expected = expect(torch.nn.functional.scaled_dot_product_attention, args, [grad], {0: "q", 1: "k", 2: "v"})[1:]
        leaves = [a.requires_grad_() for a in args]
        got = torch.autograd.grad(DeltaAttention.apply(*leaves), leaves, grad)
        for gradient, want in zip(got, expected, strict=True):
            found = compare(gradient, want)
            assert isinstance(found, Match), found


def test_a_gradient_is_compared_far_below_zero_too():
    """A backward pass may find the maximum once more, and start at 0."""

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, least):
            ctx.save_for_backward(x)
            ctx.least = least
            return torch.softmax(x, -1)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            e = torch.exp(x - x.amax(-1, keepdim=True).clamp_min(ctx.least))
            y = e / e.sum(-1, keepdim=True)
            return y * (dy - (y * dy).sum(-1, keepdim=True)), None

    (case,) = grid(M=(3,), N=(100,))
    for least, right in ((-float("inf"), True), (0.0, False)):
        kernel = Kernel("mine", lambda x, least=least: Recomputed.apply(x, least), "torch", lambda *_: True, True)
        judge = Judge(SOFTMAX, kernel, InProcess(kernel.fn, "cpu"), ReferenceRuns(SOFTMAX, "cpu", 0), "cpu")
        found = judge.judge([CheckCase(case), CheckCase(case, values="far below zero")], lambda: None)
        assert found.right == right
        assert right or "(far below zero) float32: gradient of x" in found.reason


def through_the_maximum(x):
    """Softmax as first written by everyone: its gradient passes through the maximum too."""
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def test_a_case_that_breaks_the_gpu_is_named(monkeypatch):
    def breaks(self, case):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for it")

    monkeypatch.setattr(Judge, "_judge_case", breaks)
    with pytest.raises(GPUUnusable, match=r"^mine or the reference on M=.* left .*CUDA error: an illegal .*; earlier"):
        verdict(torch.softmax)


@pytest.mark.parametrize("scale", [1.0, 2.0**-12, 0.0])
@pytest.mark.parametrize(("fault", "expected"), [(0.0, Match), (1e-3, Mismatch)])
def test_the_maximum_may_take_the_rounding_errors_of_its_row(scale, fault, expected):
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(9, 781, generator=generator) for _ in range(2))
    x = (scale * x).requires_grad_()
    want = expect(SOFTMAX.reference, [x.detach()], [dy], {0: "x"})[1]
    through_the_maximum(x).backward(dy)
    off = fault * x.grad.abs().amax(-1, keepdim=True)
    got = x.grad.scatter_add(-1, x.argmax(-1, keepdim=True), off)
    assert isinstance(compare(got, want), expected)


@pytest.mark.parametrize(("missing", "expected"), [(0.05, Match), (0.11, Mismatch)])
def test_a_missing_gradient_in_a_long_line_is_no_rounding_error(missing, expected):
    """The rounding errors of 2**20 terms of 1 may add up to 1/8; each stays far smaller than a term."""
    truth = torch.ones(2**20, dtype=torch.float64)
    truth[1::2] = -1.0
    want = ExpectedTensor("gradient of x", truth, 1e-6 * truth.abs(), torch.float32, True, terms=truth.abs)
    truth[:2] *= missing
    assert isinstance(compare(truth.float(), want), Match)
    assert isinstance(compare(truth.float().index_fill(0, torch.tensor([0]), 0.0), want), expected)


def test_products_may_be_added_one_after_the_other():
    """torch may add them in another order, whose errors are smaller than the partial sums that cancel."""
    found = set()
    for seed in range(20):
        a, b = torch.randn(2, 7, 4096, generator=torch.Generator().manual_seed(seed))
        total = torch.zeros(7, 7)
        for x, y in zip(a.unbind(1), b.unbind(1), strict=True):
            total += x[:, None] * y
        exact = lambda a, b: (a.double() @ b.double().T).to(a.dtype)
        for multiplies in (True, False):
            (want,) = expect(exact, [a, b], multiplies=multiplies)
            found.add((multiplies, type(compare(total, want))))
        in_tf32 = a.view(torch.int32).bitwise_and(-(2**13)).view(torch.float32)
        assert isinstance(compare(exact(in_tf32, b), expect(exact, [a, b], multiplies=True)[0]), Mismatch)
    assert found == {(True, Match), (False, Match), (False, Mismatch)}


@pytest.mark.parametrize(("got", "right"), [(float("inf"), True), (-float("inf"), True), (7e4, True), (1.0, False)])
def test_where_torch_overflows_a_value_is_not_judged_unless_it_is_finite(got, right):
    x = torch.tensor([300.0, 2.0], dtype=torch.float16)
    (want,) = expect(lambda x: (x * x) / 2, [x])
    found = compare(torch.tensor([got, 2.0]).to(torch.float16), want)
    assert isinstance(found, Match) == right
    assert want.non_finite == 1


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_infinities_and_nan_of_the_truth_are_not_interchangeable(value):
    x = torch.tensor([value, 2.0])
    (want,) = expect(lambda x: x * 2, [x])
    for got in (float("inf"), -float("inf"), float("nan"), 1.0):
        is_same = got == value or (got != got and value != value)
        assert isinstance(compare(torch.tensor([got, 4.0]), want), Match) == is_same, got


def test_where_torch_overflows_everywhere_a_case_shows_nothing():
    x = torch.full((8,), 300.0, dtype=torch.float16)
    assert shows_nothing(expect(lambda x: (x * x) / 2, [x])) == "returns only NaN and infinities"


def test_integers_are_exact_only_where_torch_is():
    x = torch.full((9,), 683.0, dtype=torch.float16)
    (want,) = expect(lambda x: x * 3 * 31, [x])  # 2049 is rounded before it is multiplied
    assert isinstance(compare(x * 3 * 31, tighten_for_integers(want)), Match)
    (want,) = expect(lambda x: x * 7, [x])
    assert isinstance(compare(x * 7 + 4, tighten_for_integers(want)), Mismatch)


def test_a_kernel_that_raises_has_crashed_with_its_exception():
    found = verdict(lambda x: x[:, 10**6])
    assert (found.verdict, len(found.cases)) == ("crashed", MAX_CRASHES)
    assert "IndexError" in found.reason


def test_one_crash_does_not_hide_the_other_cases():
    def crashes_once(x):
        assert x.shape != (1, 1)
        return torch.softmax(x, -1) + (x.shape[-1] == 781)

    sizes = points(M=(1, 37, 3), N=(1, 781, 61))
    found = verdict(crashes_once, dtypes=["float32"], depth="once", cases=sizes)
    kinds = {case.verdict for case in found.cases}
    assert (found.verdict, kinds) == ("crashed", {"crashed", "right", "wrong"}), found
    assert "AssertionError" in found.reason
    assert "; 1 other case: wrong" in found.reason


TWO_SIZES = points(M=(3, 37), N=(61, 781))  # variants are checked on the larger one


def declines_unless(accepts):
    def softmax(x):
        if not accepts(x):
            raise NotImplementedError("not for this one")
        return torch.softmax(x, -1)

    return softmax


@pytest.mark.parametrize(
    ("accepts", "expected", "words"),
    [
        (lambda x: x.shape[-1] != 781, "right", "left out: the kernel does not take such a case"),
        (lambda x: x.is_contiguous() and x.storage_offset() % 2 == 0, "right", "does not take such a case"),
        (lambda x: False, "unsupported", "NotImplementedError: not for this one"),
        (lambda x: bool((x < 64).all()), "wrong", "takes such a case with other values"),
        (iter([True] * 45 + [False] * 10**4).__next__, "wrong", "in other calls"),
    ],
    ids=["a size", "layouts", "everything", "values", "later calls"],
)
def test_a_users_kernel_may_decline_cases_but_not_values_or_later_calls(accepts, expected, words):
    declines = declines_unless(accepts if "__next__" not in str(accepts) else lambda x: accepts())
    found = tw.check(declines, "softmax", dtypes=["float32"], depth="quick", cases=TWO_SIZES, device="cpu", seed=0)
    assert found.verdict == expected, found
    assert words in str(found)


def test_variants_of_a_declined_case_are_checked_on_another_one():
    """A result cached by shape is found out though the case on which calls are repeated is declined."""
    cache = {}

    def cached(x):
        if x.shape[-1] == 781:
            raise NotImplementedError
        return cache.setdefault((x.shape, x.dtype), torch.softmax(x, -1)).clone()

    found = tw.check(cached, "softmax", dtypes=["float32"], depth="quick", cases=TWO_SIZES, device="cpu")
    assert found.verdict == "wrong", found


def test_ours_must_not_decline():
    found = verdict(declines_unless(lambda x: x.shape[-1] != 781), dtypes=["float32"], cases=TWO_SIZES)
    assert found.verdict == "crashed"


def test_a_kernel_that_overwrites_its_input_does_not_affect_the_next():
    kernels = [
        Kernel(name, fn, "torch", lambda *_: True, differentiable=False)
        for name, fn in (("bad", WRONG["input zeroed"]), ("good", RIGHT["the reference"]))
    ]
    found = {v.kernel: v.verdict for v in check(SOFTMAX, kernels, device="cpu", cases=SOFTMAX.check[-1:])}
    assert found == {"bad": "wrong", "good": "right"}


def test_the_reason_names_the_element():
    def off_by_one(x):
        y = torch.softmax(x, -1)
        y[-1, -1] += 1
        return y

    found = verdict(off_by_one, cases=grid(M=(3,), N=(5,)), dtypes=["float32"])
    assert "output[2, 4]" in found.reason
    assert "1 of 15 elements" in found.reason


def test_a_kernel_that_supports_no_case_is_unsupported():
    kernel = Kernel("mine", torch.zeros_like, "torch", lambda x: False, differentiable=False)
    assert next(check(SOFTMAX, [kernel], device="cpu")).verdict == "unsupported"


def test_the_seed_repeats_a_run():
    seen = []

    def spy(x):
        seen.append(x.clone())
        return torch.softmax(x, -1)

    for seed in (7, 7, None, None):
        verdict(spy, seed=seed, cases=grid(M=(2,), N=(3,)), dtypes=["float32"])
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[2], seen[3])


def _fits(op, kernel, dtype):
    return any(op.kernels[kernel].fits(*op.make(case.with_dtype(dtype))) for case in op.check)


COMPUTE_BOUND = ("attention", "attention_modes", "decode_attention", "linear", "matmul", "quantized_linear")


def _assert_right(op, kernels, device, depth):
    for found in check(op, kernels, device=device, seed=0, depth=depth):
        assert found.verdict in ("right", "unsupported"), f"{found.kernel}: {found.reason}"
        if op.kernels[found.kernel].language == "triton":
            assert found.verdict == "right", f"{found.kernel}: {found.reason}"
            right = {case.dtype for case in found.cases if case.verdict == "right"}
            assert right == {dtype for dtype in op.dtypes if _fits(op, found.kernel, dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("name", source.op_files())
def test_every_registered_kernel_that_can_run_here_is_right(name, device):
    op = registry.load(name)
    kernels = [*op.kernels.values()]
    if name in COMPUTE_BOUND:  # steps of a ladder have tests of their own, of values and layouts
        kernels = [one for one in kernels if one.name == "triton" or one.language == "torch"]
    _assert_right(op, kernels, device, "quick")


# One operation of each folder is checked in depth, since the others share its code.
FIRST_OF_FOLDER = {file.parent: name for name, file in reversed(source.op_files().items())}.values()
IN_DEPTH = [one for one in FIRST_OF_FOLDER if "triton" in source.kernels(one) and one not in COMPUTE_BOUND]
MARKED = [pytest.param(one, marks=pytest.mark.slow if one == "log_softmax" else pytest.mark.verify) for one in IN_DEPTH]


@pytest.mark.parametrize("name", MARKED)
def test_kernels_are_right_in_depth(name, device):
    op = registry.load(name)
    _assert_right(op, [op.kernels["triton"]], device, "default")


OUT_OF_BOUNDS = """
import torch, triton, triton.language as tl

@triton.jit
def _rows(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * N + offs)  # no mask: reads the next row, and discards it
    x = tl.where(offs < N, x, -float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + tl.program_id(0) * N + offs, (e / tl.sum(e, axis=0)).to(y_ptr.dtype.element_ty), mask=offs < N)

def softmax(x):
    y = torch.empty_like(x)
    _rows[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
"""


def test_an_out_of_bounds_access_is_wrong_even_if_the_values_are_right(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OUT_OF_BOUNDS)
    (found,) = check(SOFTMAX, [], [file], device="cpu", cases=points(M=(3,), N=(50,)), dtypes=["float32"])
    assert found.verdict == "wrong"
    assert "mine.py:7: out of bounds in _rows, program (2, 0, 0)" in found.reason


def doubled_into(x, out):
    return out.copy_(x * 2)


@pytest.mark.parametrize(("declared", "expected"), [((1,), "right"), ((), "wrong")])
def test_an_op_may_declare_that_a_kernel_changes_an_argument(declared, expected):
    op = Op(
        "doubled",
        lambda x, out: x * 2,
        lambda x, out: Cost(0, 0),
        lambda draw: (draw.randn("N"), draw.randn("N")),
        grid(N=(7, 4096)),
        [],
        mutates=lambda *_: declared,
    )
    found = verdict(doubled_into, op, dtypes=["float32"])
    assert found.verdict == expected, found.reason


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_small_dtypes_of_an_op(dtype):
    op = Op(
        "doubled",
        lambda x: (x * 2 if x.dtype == torch.float64 else x.float() * 2).to(x.dtype),
        lambda x: Cost(0, 0),
        lambda draw: (draw.randn("M", "N"),),
        grid(M=(3, 31), N=(7, 130)),
        [],
        dtypes=(dtype,),
    )
    right = verdict(lambda x: (x.float() + x.float()).to(x.dtype), op)
    assert right.verdict == "right", right.reason
    assert verdict(lambda x: (x.float() * 2.3).to(x.dtype), op).verdict == "wrong"


def test_an_incoming_gradient_may_be_none():
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.set_materialize_grads(False)
            return x.sin(), x.cos()

        @staticmethod
        def backward(ctx, first, second):
            (x,) = ctx.saved_tensors
            return first * x.cos() - second * x.sin()  # fails where one of them is None

    op = Op(
        "both",
        lambda x: (x.sin(), x.cos()),
        lambda x: Cost(0, 0),
        lambda draw: (draw.randn("N"),),
        grid(N=(7, 999)),
        [],
        backward_cost=lambda x: Cost(0, 0),
    )
    assert verdict(lambda x: (x.sin(), x.cos()), op, differentiable=True, dtypes=["float32"]).verdict == "right"
    found = verdict(Both.apply, op, differentiable=True, dtypes=["float32"])
    assert found.verdict == "crashed"
    assert "no gradient for output" in found.reason


def test_a_gradient_that_is_wrong_unless_all_inputs_need_one_is_found():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return (grad * y, grad * x) if ctx.needs_input_grad[0] else (None, grad)

    op = Op(
        "product",
        torch.mul,
        lambda x, y: Cost(0, 0),
        lambda draw: (draw.randn("N"), draw.randn("N")),
        grid(N=(7, 999)),
        [],
        backward_cost=lambda x, y: Cost(0, 0),
    )
    found = verdict(Product.apply, op, differentiable=True, dtypes=["float32"])
    assert found.verdict == "wrong"
    assert "gradient of argument 2 alone" in found.reason


@pytest.mark.parametrize(("fn", "expected"), [(lambda x: torch.softmax(x, -1), "right"), ("last row skipped", "wrong")])
def test_a_case_many_times_as_long_is_compared_block_by_block(fn, expected):
    def skips_last_row(x):
        return torch.cat([torch.softmax(x[:-1], -1), torch.zeros_like(x[-1:])])

    fn = skips_last_row if fn == "last row skipped" else fn
    kernel = Kernel("mine", fn, "python", lambda *_: True, False, origin="user")
    judge = Judge(SOFTMAX, kernel, InProcess(kernel.fn, "cpu"), ReferenceRuns(SOFTMAX, "cpu", 0), "cpu")
    found = judge.judge([CheckCase(SOFTMAX.check[4].with_dtype("float32"), repeat=9)], lambda: None)
    assert found.verdict == expected
    assert ("in repetition 8" in found.reason) == (expected == "wrong")


@pytest.mark.parametrize("why", ["too large", "no memory", "large but cached", None])
def test_a_case_that_cannot_be_traced_keeps_its_verdict(monkeypatch, why):
    """Tracing comes after everything else, and not for cases that fill the memory."""
    kernel = Kernel("mine", lambda x: torch.softmax(x, -1), "python", lambda *_: True, False, origin="user")
    traced = []

    class Scarce(InProcess):
        def call(self, request):
            if request.mode == execute.TRACED:
                traced.append(request)
                if why == "no memory":
                    raise torch.cuda.OutOfMemoryError("no")
            return super().call(request)

    monkeypatch.setattr("tilewright.workbench.check.judge.MAX_TRACED_ELEMENTS", 0 if "large" in str(why) else 2**26)
    references = ReferenceRuns(SOFTMAX, "cpu", 0, evicts_large=why != "large but cached")
    judge = Judge(SOFTMAX, kernel, Scarce(kernel.fn, "cpu"), references, "cpu")
    found = judge.judge([CheckCase(SOFTMAX.check[4].with_dtype("float32"))], lambda: None)
    assert found.verdict == "right"
    assert len(traced) == (why != "too large")
    assert ("falls back to torch" in found.labels) == (why in (None, "large but cached"))


def test_drawn_cases_are_not_listed_and_the_first_is_not_empty():
    """A kernel that knows the listed cases is checked on another one even by a quick check."""
    listed = {case.point for case in SOFTMAX.check}
    for seed in range(300):
        first, *others = cases.draw_cases(SOFTMAX, SOFTMAX.check, 3, str(seed))
        assert 0 not in dict(first.point).values()
        assert not listed & {case.point for case in (first, *others)}


def test_drawn_cases_have_the_modes_of_any_listed_case():
    op = registry.load("layer_norm")
    drawn = {case["affine"] for case in cases.draw_cases(op, op.check, 40, "0")}
    assert drawn == {case["affine"] for case in op.check}
    assert len(drawn) > 1


def test_the_incoming_gradient_of_a_scalar_is_one_only_in_training():
    total = registry.load("dot")
    case = CheckCase(total.check[-1])
    for is_training in (True, False):
        (grad,) = ReferenceRuns(total, "cpu", 3, is_training=is_training)(case, True).grads
        assert (grad.item() == 1) == is_training


def test_inputs_are_perturbed_independently_to_derive_a_budget():
    """A difference of two inputs changes by the rounding of each."""
    m = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    (expected,) = expect(lambda m, g: m + (g - m) * 0.1, (m, -9 * m))
    fused = (m.double() + (-10 * m).double() * float(torch.tensor(0.1))).float()  # as a fused multiply-add has it
    assert fused.any()
    assert isinstance(compare(fused, expected), Match)


@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (0,)])
@pytest.mark.parametrize("has_steps", [False, True])
def test_empty_results_have_budgets(shape, has_steps):
    (expected,) = expect(lambda x: (2 * x).round(), (torch.randn(shape),), has_steps=has_steps)
    assert expected.budget.shape == shape
    assert isinstance(compare(torch.empty(shape), expected), Match)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_results_in_chunks_have_the_budgets_of_the_whole(monkeypatch, chunk):
    x = torch.randn(37, 31, generator=torch.Generator().manual_seed(0)).half()
    (whole,) = expect(lambda x: torch.softmax(x, -1), (x,))
    got = torch.softmax(x, -1)
    wrong = got.clone()
    wrong[3, 4] += 0.1
    matched, missed = compare(got, whole), compare(wrong, whole)
    monkeypatch.setattr(elements, "CHUNK", chunk)
    (cut,) = expect(lambda x: torch.softmax(x, -1), (x,))
    assert torch.equal(cut.budget, whole.budget)
    assert cut.torch_error == pytest.approx(whole.torch_error)
    again = compare(got, whole)
    assert isinstance(matched, Match)
    assert isinstance(again, Match)
    assert (again.error, again.budget) == (matched.error, matched.budget)
    assert again.relative_to_torch == pytest.approx(matched.relative_to_torch)
    assert isinstance(missed, Mismatch)
    assert compare(wrong, whole) == missed


@pytest.mark.parametrize(("chance", "calls"), [(0.0, 32), (0.5, 64), (0.9, 320), (1 - 1e-9, 4096)])
def test_the_number_of_extra_calls_has_a_long_tail(monkeypatch, chance, calls):
    """A user's kernel is called more than n times with a probability of 32 / n."""
    monkeypatch.setattr("tilewright.workbench.check.judge.EXTRA_SECONDS", 600.0)
    monkeypatch.setattr(random.SystemRandom, "random", lambda _: chance)
    case = CheckCase(SOFTMAX.check[4].with_dtype("float32"), rerun=True)
    found = []
    for origin in ("user", "ours"):
        kernel = Kernel("mine", lambda x: torch.softmax(x, -1), "python", lambda *_: True, False, origin=origin)
        judge = Judge(SOFTMAX, kernel, InProcess(kernel.fn, "cpu"), ReferenceRuns(SOFTMAX, "cpu", 0), "cpu")
        found.append(judge.judge([case], lambda: None))
    assert [verdict.calls for verdict in found] == [6 + calls + 1, 6 + 1]


def test_a_gradient_that_is_lost_in_some_cases_only_is_wrong():
    def loses(x):
        return torch.softmax(x if len(x) < 3 else x.detach(), -1)

    kernel = Kernel("mine", loses, "python", lambda *_: True, differentiable=True, origin="user")
    cases = [case.with_dtype("float32") for case in points(M=(2, 4), N=(5, 5))]
    found = next(check(SOFTMAX, [kernel], device="cpu", cases=cases, dtypes=["float32"], depth="once"))
    assert found.verdict == "wrong"
    assert "has no gradient here" in found.reason


def test_bool_outputs_are_compared_exactly():
    op = Op(
        "positive",
        lambda x: (x > 0, x * 2),
        lambda x: Cost(0, 0),
        lambda draw: (draw.randn("N"),),
        grid(N=(7, 4096)),
        [],
    )
    assert verdict(lambda x: (x.clamp(min=0) > 0, x + x), op, dtypes=["float32"]).right
    found = verdict(lambda x: (x >= 0.01, x + x), op, dtypes=["float32"])
    assert found.verdict == "wrong"
    assert "output 0" in found.reason


def planned_for_a_gpu(op):
    return cases.plan_cases(op, None, op.dtypes, "default", seed=0, device="cuda")


def test_one_row_grows_beyond_int32(monkeypatch):
    """A small limit stands for that of an int32: a kernel is wrong beyond it, and has no gradient there."""
    monkeypatch.setattr(cases, "MAX_INT32", 2**12)
    (planned,) = [case for case in planned_for_a_gpu(SOFTMAX) if case.is_long]
    assert str(planned) == f"M=1,N={2**12 + 12}"

    def wraps_around(x):
        y = torch.softmax(x, -1)
        return torch.cat((y[:, : 2**12], y[:, : x.shape[1] - 2**12]), 1)

    verdicts = {}
    for fn in (wraps_around, lambda x: torch.softmax(x, -1) if not x.requires_grad else 1 / 0):
        kernel = Kernel("mine", fn, "torch", lambda *_: True, differentiable=True)
        judge = Judge(SOFTMAX, kernel, InProcess(fn, "cpu"), ReferenceRuns(SOFTMAX, "cpu", 0), "cpu")
        verdicts[fn is wraps_around] = judge.judge([planned], lambda: None)
    assert verdicts[True].verdict == "wrong"
    assert verdicts[True].reason.startswith("M=1,N=4108")
    assert verdicts[False].verdict == "right", verdicts[False].reason


def test_rows_grow_where_models_set_their_size():
    lengths = {name: registry.load(name).length for name in ("softmax", "rms_norm", "sum", "cross_entropy", "swiglu")}
    assert set(lengths.values()) == {"N"}
    assert [registry.load(name).length for name in ("linear", "rope", "add")] == [None] * 3
    for name in lengths:
        (planned,) = [case for case in planned_for_a_gpu(registry.load(name)) if case.is_long]
        assert planned.case["N"] > 2**31
        assert planned.case["M"] == 1


def test_every_small_case_gets_values_far_below_zero_and_an_uneven_one_all_values():
    planned = [case for case in cases.plan_cases(SOFTMAX, None, SOFTMAX.dtypes, "default", seed=0) if case.case.point]
    below = {str(case.case) for case in planned if case.values == "far below zero"}
    assert {"M=1,N=2", "M=3,N=1", "M=3,N=781", "M=67,N=2", "M=3,N=4096"} <= below
    assert {case.values for case in planned if str(case.case) == "M=3,N=781"} >= set(VALUES[:-1])


def test_every_draw_is_stored_as_the_operation_draws_it():
    op = registry.load("scaled_matmul")
    runs = ReferenceRuns(op, "cpu", 0)
    case = CheckCase(op.check[1].with_dtype("bfloat16"))
    stored = {
        tuple(a.stride() for a in runs(case, False, draw).args if isinstance(a, torch.Tensor)) for draw in range(6)
    }
    assert stored == {tuple(a.stride() for a in op.make(op.check[1]) if isinstance(a, torch.Tensor))}


def test_draws_replace_one_element_or_half_of_them():
    runs = ReferenceRuns(SOFTMAX, "cpu", 0)
    case = CheckCase(SOFTMAX.check[6].with_dtype("bfloat16"))
    first, one, half = (runs(case, False, draw).args[0] for draw in (FIRST, ONE_REPLACED, HALF_REPLACED))
    assert int((first != one).sum()) == 1
    assert abs(int((first != half).sum()) - first.numel() / 2) < 120  # each is replaced with a probability of a half


def test_a_backward_pass_may_subtract_rounded_probabilities():
    """With one class the probability is 1, and all but the gradient of the second term cancels."""

    def loss(x, target):
        nll = torch.nn.functional.cross_entropy(x, target)
        return nll + 0.01 * torch.logsumexp(x, -1).square().mean()

    for seed in range(8):
        x = torch.randn(127, 1, generator=torch.Generator().manual_seed(seed))
        target = torch.zeros(127, dtype=torch.int64)
        _, gradient = expect(loss, [x, target], [torch.ones(())], {0: "x"})
        rounded = torch.softmax(x, -1) * (1 - 2.0**-22)
        fused = (rounded * (1 + 0.02 * torch.logsumexp(x, -1, keepdim=True)) - 1) / 127
        assert isinstance(compare(fused, gradient), Match)
        assert isinstance(compare(fused * 0.5, gradient), Mismatch)
        assert isinstance(compare(torch.zeros_like(x), gradient), Mismatch)

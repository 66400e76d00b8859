"""Verdicts on kernels that are wrong in common ways, and on right ones that look odd."""

import random

import pytest
import torch

from tilewright import registry, source
from tilewright.spec import Cost, Kernel, Op, grid, points
from tilewright.workbench.check import budget, cases, check
from tilewright.workbench.check.budget import Match, Mismatch, compare, expect
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import ReferenceRuns
from tilewright.workbench.check.judge import InProcess, Judge
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
        grid(M=(16,), N=(4096,)),
        [],
    )

    def naive(x):
        total = torch.zeros_like(x[:, 0])
        for column in x.unbind(-1):
            total += column
        return total

    assert verdict(naive, op, dtypes=["float16"]).verdict == "wrong"
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


def test_a_kernel_that_raises_has_crashed_with_its_exception():
    found = verdict(lambda x: x[:, 10**6])
    assert (found.verdict, len(found.cases)) == ("crashed", 1)
    assert "IndexError" in found.reason


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


@pytest.mark.slow
@pytest.mark.parametrize("name", source.op_files())
def test_every_registered_kernel_that_can_run_here_is_right(name, device):
    op = registry.load(name)
    for found in check(op, list(op.kernels.values()), device=device, seed=0):
        assert found.verdict in ("right", "unsupported"), f"{found.kernel}: {found.reason}"
        if op.kernels[found.kernel].language == "triton":
            assert found.verdict == "right", f"{found.kernel}: {found.reason}"
            assert {case.dtype for case in found.cases if case.verdict == "right"} == set(op.dtypes)


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
        first, *others = cases.draw_cases(SOFTMAX, SOFTMAX.check[0], 3, str(seed))
        assert 0 not in dict(first.point).values()
        assert not listed & {case.point for case in (first, *others)}


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


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_results_in_chunks_have_the_budgets_of_the_whole(monkeypatch, chunk):
    x = torch.randn(37, 31, generator=torch.Generator().manual_seed(0)).half()
    (whole,) = expect(lambda x: torch.softmax(x, -1), (x,))
    got = torch.softmax(x, -1)
    wrong = got.clone()
    wrong[3, 4] += 0.1
    matched, missed = compare(got, whole), compare(wrong, whole)
    monkeypatch.setattr(budget, "CHUNK", chunk)
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

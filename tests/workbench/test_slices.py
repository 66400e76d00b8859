"""Truths by rows: used for calls whose truth takes much memory, if the rows are independent of each other."""

import pytest
import torch

from tilewright.spec import Case, Cost, Kernel, Op, grid
from tilewright.workbench.check import check, slices
from tilewright.workbench.check.budget import Match, Mismatch, SlicedTensor, compare, expect
from tilewright.workbench.check.cases import CheckCase
from tilewright.workbench.check.expected import ReferenceRuns
from tilewright.workbench.check.judge import FORWARD_WHERE_LARGE
from tilewright.workbench.check.slices import candidates, expect_rows

X = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
W = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(slices, "MAX_BYTES", 2**14)


def by_rows(reference, *args):
    found = (expect_rows(reference, args, rows) for rows in candidates(args, [reference(*args)]))
    return next((one for one in found if one), None)


@pytest.mark.parametrize(
    ("reference", "args"),
    [(torch.softmax, (X, -1)), (torch.matmul, (X, W)), (torch.matmul, (torch.randn(24, 24), torch.randn(24, 24)))],
    ids=["softmax", "matmul", "matmul of squares, of which only the first is cut"],
)
def test_rows_give_the_verdict_of_the_whole(reference, args):
    (expected,) = by_rows(reference, *args)
    pieces = list(expected.pieces())
    assert len(pieces) > 1
    assert sum(rows.stop - rows.start for rows, _ in pieces) == args[0].shape[0]
    (whole,) = expect(reference, args)
    torch.testing.assert_close(torch.cat([piece.truth for _, piece in pieces]), whole.truth, rtol=1e-12, atol=1e-12)
    right = reference(*args)
    assert isinstance(compare(right, expected), Match)
    wrong = right.clone()
    wrong[-1, 3] += 0.01
    found = compare(wrong, expected)
    assert isinstance(found, Mismatch)
    assert "from row" in found.reason
    assert "shape" in compare(right[:-1], expected).reason
    assert "dtype" in compare(right.double().half(), expected).reason


@pytest.mark.parametrize(
    "reference",
    [
        lambda x: (x - x.mean(0)) / x.std(0),
        lambda x: x.cumsum(0),
        lambda x: x.flip(0),
        lambda x: x.sum(),
        lambda x: x.sum(0),
        lambda x: x / len(x),
        lambda x: x * torch.arange(len(x))[:, None],
    ],
    ids=["normalised", "summed", "reversed", "one number", "one row", "divided by its length", "numbered"],
)
def test_rows_that_depend_on_each_other_are_not_cut(reference):
    assert by_rows(reference, X) is None


def test_a_case_whose_gradients_do_not_fit_is_judged_without(monkeypatch):
    op = Op(
        "softmax",
        lambda x: torch.softmax(x, -1),
        lambda x: Cost(0, 0),
        inputs=lambda draw: (draw.randn("M", "N"),),
        check=grid(M=(5, 67), N=(40,)),
        bench=[],
        backward_cost=lambda x: Cost(0, 0),
    )
    run = ReferenceRuns._run_reference

    def limited(self, case, with_gradients, draw):
        if case.case["M"] == 67 and with_gradients:
            raise torch.cuda.OutOfMemoryError("no memory")
        return run(self, case, with_gradients, draw)

    def skips_row(x):
        y = torch.softmax(x, -1)
        return torch.cat([y[:60], 2 * y[60:61], y[61:]]) if len(x) == 67 else y

    monkeypatch.setattr(ReferenceRuns, "_run_reference", limited)
    found = []
    for fn in (op.reference, skips_row):
        kernel = Kernel("mine", fn, "torch", lambda *_: True, differentiable=True)
        found += check(op, [kernel], device="cpu", dtypes=["float32"], depth="once")
    assert [one.verdict for one in found] == ["right", "wrong"]
    assert FORWARD_WHERE_LARGE in found[0].labels
    assert "from row" in found[1].reason


def test_little_memory_is_not_cut(monkeypatch):
    monkeypatch.setattr(slices, "MAX_BYTES", 2**30)
    assert candidates((X,), (X,)) == []


def test_a_check_uses_rows_where_the_truth_is_large():
    op = Op(
        "halve", lambda x: x / 2, lambda x: Cost(0, 0), inputs=lambda draw: (draw.randn("M", "N"),), check=[], bench=[]
    )
    runs = ReferenceRuns(op, "cpu", 0)
    large, small = (CheckCase(Case((("M", size), ("N", 24)), "float32")) for size in (400, 4))
    first, second = runs(large, False), runs(large, False, draw=1)
    assert all(isinstance(one, SlicedTensor) for run in (first, second) for one in run.expected)
    assert not isinstance(runs(small, False).expected[0], SlicedTensor)
    assert isinstance(compare(second.args[0] / 2, second.expected[0]), Match)
    assert isinstance(compare(first.args[0] / 2, second.expected[0]), Mismatch)
    assert runs.request(large, first).output_specs[0].shape == (400, 24)

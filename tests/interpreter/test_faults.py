"""Every planted fault is reported at its line; correct kernels have no findings and match torch."""

from pathlib import Path

import pytest
import torch
import triton

import tilewright
from interpreter import faulty
from interpreter.faulty import FAULTS, VALUE_FAULTS
from interpreter.tricky import TRICKY
from tilewright.errors import KernelFault
from tilewright.interpreter.results import NEVER_WRITTEN


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@named(FAULTS)
def test_each_fault_is_reported_at_its_line(case):
    with tilewright.interpret(faults="collect") as run:
        out = case.run()
    findings = [*run.findings, *run.unwritten(out)]
    report = "\n".join(map(str, findings)) or "no findings"

    found = [f for f in findings if (f.kind, f.argument) == (case.kind, case.argument)]
    assert found, report
    others = {(f.kind, f.argument) for f in findings} - {(case.kind, case.argument)}
    assert others <= case.consequences, report

    kernel = case.kernel.fn.__name__
    assert {f.kernel for f in findings} == {kernel}, report
    assert all(kernel in str(f) for f in found)
    if case.kind == NEVER_WRITTEN:
        assert [f.program for f in found] == [None]
    else:
        assert {f.line for f in found} <= case.lines, report
        assert {Path(f.file).name for f in found} == {Path(faulty.__file__).name}
    if case.program is not None:
        assert found[0].program == case.program, report
    if case.element is not None:
        assert found[0].element == case.element, report
    if case.lanes is not None:
        assert sum(f.lanes for f in found) == case.lanes, report


@named([case for case in FAULTS if case.kind != NEVER_WRITTEN])
def test_each_fault_raises_unless_collected(case):
    with pytest.raises(KernelFault, match=case.kernel.fn.__name__), tilewright.interpret():
        case.run()


@named(TRICKY)
def test_correct_kernels_have_no_findings(case):
    with tilewright.interpret(faults="collect") as run:
        out = case.run()
    findings = [*run.findings, *run.unwritten(out)]
    assert not findings, "\n".join(map(str, findings))
    tolerance = {"rtol": 0, "atol": 0} if case.exact else {}
    torch.testing.assert_close(out, case.reference(), **tolerance)
    assert run.launches


@named(VALUE_FAULTS)
def test_wrong_values_match_the_hardware(case):
    with tilewright.interpret(faults="collect") as run:
        out = case.run()
    assert not run.findings
    assert not run.unwritten(out)
    torch.testing.assert_close(out, case.wrong(), equal_nan=True)
    assert not torch.allclose(out.double(), case.reference().double(), rtol=0, atol=case.min_error)


@pytest.fixture
def on_gpu():
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    with torch.device("cuda"):
        yield


@pytest.mark.gpu
@named(TRICKY)
def test_correct_kernels_are_correct_on_the_gpu(case, on_gpu):
    tolerance = {"rtol": 0, "atol": 0} if case.exact else {}
    torch.testing.assert_close(case.run(), case.reference(), **tolerance)


@pytest.mark.gpu
@named(VALUE_FAULTS)
def test_wrong_values_are_wrong_on_the_gpu(case, on_gpu):
    torch.testing.assert_close(case.run(), case.wrong(), equal_nan=True)


def test_all_kinds_of_fault_are_covered():
    assert len(FAULTS) >= 24
    assert len(TRICKY) >= 24
    assert {case.kind for case in FAULTS} == {
        faulty.OUT_OF_BOUNDS,
        faulty.RACE,
        faulty.READ_BEFORE_WRITE,
        faulty.NEVER_WRITTEN,
        faulty.OVERFLOW,
    }

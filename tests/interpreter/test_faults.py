"""Every planted fault is found where it is; nothing is found in kernels that are right, whose values are torch's."""

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
def test_fault_is_found_where_it_is(case):
    with tilewright.interpret(faults="collect") as run:
        out = case.run()
    findings = [*run.findings, *run.unwritten(out)]
    told = "\n".join(map(str, findings)) or "nothing was found"

    found = [f for f in findings if (f.kind, f.argument) == (case.kind, case.argument)]
    assert found, told
    beside = {(f.kind, f.argument) for f in findings} - {(case.kind, case.argument)}
    assert beside <= case.consequences, told

    kernel = case.kernel.fn.__name__
    assert {f.kernel for f in findings} == {kernel}, told
    assert all(kernel in str(f) for f in found)
    if case.kind == NEVER_WRITTEN:
        assert [f.program for f in found] == [None]
    else:
        assert {f.line for f in found} <= case.lines, told
        assert {Path(f.file).name for f in found} == {Path(faulty.__file__).name}
    if case.program is not None:
        assert found[0].program == case.program, told
    if case.element is not None:
        assert found[0].element == case.element, told
    if case.lanes is not None:
        assert sum(f.lanes for f in found) == case.lanes, told


@named([case for case in FAULTS if case.kind not in (NEVER_WRITTEN, faulty.OVERFLOW)])  # the latter take gigabytes
def test_fault_raises_unless_it_is_collected(case):
    with pytest.raises(KernelFault, match=case.kernel.fn.__name__), tilewright.interpret():
        case.run()


@named(TRICKY)
def test_nothing_is_found_in_what_is_right(case):
    with tilewright.interpret(faults="collect") as run:
        out = case.run()
    findings = [*run.findings, *run.unwritten(out)]
    assert not findings, "\n".join(map(str, findings))
    tolerance = {"rtol": 0, "atol": 0} if case.exact else {}
    torch.testing.assert_close(out, case.reference(), **tolerance)
    assert run.launches


@named(VALUE_FAULTS)
def test_wrong_values_are_those_of_the_hardware(case):
    with tilewright.interpret(faults="collect") as run:
        out = case.run()
    assert not run.findings
    assert not run.unwritten(out)
    torch.testing.assert_close(out, case.wrong(), equal_nan=True)
    assert not torch.allclose(out.double(), case.reference().double(), rtol=0, atol=case.apart)


@pytest.fixture
def on_gpu():
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    with torch.device("cuda"):
        yield


@pytest.mark.gpu
@named(TRICKY)
def test_what_is_right_is_right_on_the_gpu(case, on_gpu):
    tolerance = {"rtol": 0, "atol": 0} if case.exact else {}
    torch.testing.assert_close(case.run(), case.reference(), **tolerance)


@pytest.mark.gpu
@named(VALUE_FAULTS)
def test_wrong_values_are_wrong_on_the_gpu(case, on_gpu):
    torch.testing.assert_close(case.run(), case.wrong(), equal_nan=True)


def test_there_are_enough_of_each():
    assert len(FAULTS) >= 24
    assert len(TRICKY) >= 24
    assert {case.kind for case in FAULTS} == {
        faulty.OUT_OF_BOUNDS,
        faulty.RACE,
        faulty.READ_BEFORE_WRITE,
        faulty.NEVER_WRITTEN,
        faulty.OVERFLOW,
    }

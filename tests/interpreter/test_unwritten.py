"""Values from memory that has not been written: which operations pass them on, and where they are reported."""

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import tilewright
from tilewright.interpreter.results import READ_BEFORE_WRITE


@triton.jit
def apply(x, out, OPERATION: tl.constexpr):
    """Store a result for each of 16 lanes, of which lane 5 of x is not written."""
    offs = tl.arange(0, 16)
    value = tl.load(x + offs)
    if OPERATION == "copy":
        result = value
    elif OPERATION == "cast":
        result = value.to(tl.int32).to(tl.float32)
    elif OPERATION == "where":
        result = tl.where(offs == 5, 0.0, value)
    elif OPERATION == "where condition":
        result = tl.where(value > 0, 1.0, 1.0)
    elif OPERATION == "and":
        result = ((value > 0) & (offs != 5)).to(tl.float32)
    elif OPERATION == "or":
        result = ((value > 0) | (offs == 5)).to(tl.float32)
    elif OPERATION == "sum":
        result = tl.sum(value) + tl.zeros([16], tl.float32)
    elif OPERATION == "sum of kept":
        result = tl.sum(tl.where(offs == 5, 0.0, value)) + tl.zeros([16], tl.float32)
    elif OPERATION == "scan":
        result = tl.cumsum(value)
    elif OPERATION == "reverse scan":
        result = tl.cumsum(value, reverse=True)
    elif OPERATION == "dot":
        result = tl.sum(tl.dot(value[:, None] + tl.zeros([16, 16], tl.float32), tl.zeros([16, 16], tl.float32)), 1)
    elif OPERATION == "gather":
        result = tl.gather(value, 15 - offs, 0)
    elif OPERATION == "reshape":
        result = tl.reshape(tl.trans(tl.reshape(value, [4, 4])), [16])
    elif OPERATION == "join":
        result = tl.sum(tl.join(value, value), 1)
    elif OPERATION == "histogram":
        result = tl.histogram((value > 0).to(tl.int32), 16).to(tl.float32)
    elif OPERATION == "argmax":
        result = tl.argmax(value, 0) + tl.zeros([16], tl.float32)
    else:
        result = tl.load(x + offs, mask=offs != 5)
    tl.store(out + offs, result)


ALL = set(range(16))
REACHED = {
    "copy": {5}, "cast": {5}, "where": set(), "where condition": {5}, "and": set(), "or": set(), "sum": ALL,
    "sum of kept": set(), "scan": set(range(5, 16)), "reverse scan": set(range(6)), "dot": {5}, "gather": {10},
    "reshape": {5}, "join": {5}, "histogram": ALL, "argmax": ALL, "masked": set(),
}  # fmt: skip


@pytest.mark.parametrize("operation", REACHED)
def test_lanes_that_unwritten_memory_reaches(operation, monkeypatch):
    from tilewright.interpreter.memory import Memory

    stored = []

    def record(self, poison, what, mask=None, use=Memory.use):
        if what == "store":
            stored.append(set() if poison is None else set(torch.from_numpy(poison.copy()).nonzero()[:, 1].tolist()))
        use(self, poison, what, mask)

    monkeypatch.setattr(Memory, "use", record)
    with tilewright.interpret(faults="collect") as run:
        x, out = torch.empty(16), torch.empty(16)
        write = torch.arange(16) != 5
        fill[(1,)](write.to(torch.int32), x)
        apply[(1,)](x, out, OPERATION=operation)
    expected = REACHED[operation]
    got = stored[-1]
    assert got == expected or (expected == ALL and got == {0})  # a broadcast value has one lane
    assert [f.kind for f in run.findings] == ([READ_BEFORE_WRITE] if expected else [])
    assert all(f.element == (5,) for f in run.findings)


@triton.jit
def fill(write, x):
    offs = tl.arange(0, 16)
    tl.store(x + offs, 1.0, mask=tl.load(write + offs) != 0)


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


def test_a_finding_names_the_load_and_the_use():
    with tilewright.interpret(faults="collect") as run:
        x, out = torch.empty(16), torch.empty(16)
        apply[(1,)](x, out, OPERATION="sum")
    (finding,) = run.findings
    assert finding.line == line_of("value = tl.load(x + offs)")
    assert finding.lanes == 16
    use = line_of("tl.store(out + offs, result)")
    assert re.search(rf"load of `x\[0\]`, which has not been written, reaches the store in line {use}$", finding.detail)


def test_a_batch_that_diverges_forgets_its_stores():
    """The rolled-back stores of the first attempt must not count as writes."""
    with tilewright.interpret(faults="collect") as run:
        scratch, out = torch.empty(4), torch.empty(4)
        store_then_diverge[(4,)](scratch, out)
    assert {f.argument for f in run.findings} == {"scratch"}
    assert sum(f.lanes for f in run.findings) == 4


@triton.jit
def store_then_diverge(scratch, out):
    pid = tl.program_id(0)
    before = tl.load(scratch + pid)
    tl.store(scratch + pid, 1.0)
    if pid % 2 == 0:
        tl.store(out + pid, before)
    else:
        tl.store(out + pid, before + 1.0)

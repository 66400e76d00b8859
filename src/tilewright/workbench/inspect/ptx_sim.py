"""Simulate the integer arithmetic of PTX for all threads of a block, to find the addresses in shared memory.

Values loaded from memory, and everything computed from them, are unknown. The block is the first of its grid, and each
loop body runs once. Branches and predicates deactivate threads; at an unknown branch both paths are taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewright.workbench.inspect.line_info import CodeLine, SourceLine

Value = NDArray[np.int64] | None  # per thread; predicates are 0 and 1; None: unknown
WARP = 32
_STATEMENT = re.compile(r"\s*(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+")
_TYPE = re.compile(r"\.(?:[usbf](8|16|32|64|128)|bf16|pred)(?=\.|$)")
_SHARED = re.compile(r"(ld|st|ldmatrix|stmatrix|cp\.async(?!\.bulk))\.(?:\w+\.)*?shared(::cta)?\b(?!::cluster)")


@dataclass(frozen=True)
class Access:
    """One instruction that moves data between shared memory and registers or global memory."""

    kind: str  # load, store or async copy
    width: int  # bytes per thread
    addresses: Value
    active: NDArray[np.bool_]  # per thread
    source_line: SourceLine


@dataclass(frozen=True)
class Branch:
    """One conditional branch. `diverges` is None if its condition is unknown."""

    diverges: bool | None
    source_line: SourceLine


def branches(
    lines: Sequence[CodeLine], threads: int, arguments: Sequence[int | None], placeholder: int
) -> list[Branch]:
    """Return the conditional branches of one kernel; arguments as in `shared_accesses`."""
    block = _Block(threads, arguments, placeholder)
    for _ in block.run(lines):
        pass
    return block.branches


def shared_accesses(
    lines: Sequence[CodeLine], threads: int, arguments: Sequence[int | None], placeholder: int
) -> Iterator[Access]:
    """Yield the shared memory accesses of one kernel in code order. Unknown arguments take the value `placeholder`."""
    return _Block(threads, arguments, placeholder).run(lines)


class _Block:
    def __init__(self, threads: int, arguments: Sequence[int | None], placeholder: int):
        self._arguments, self._placeholder = arguments, placeholder
        thread = np.arange(threads, dtype=np.int64)
        self._registers: dict[str, Value] = {
            "%tid.x": thread,
            "%ntid.x": np.full_like(thread, threads),
            "%laneid": thread % WARP,
            "%warpid": thread // WARP,
            **dict.fromkeys(("%ctaid.x", "%ctaid.y", "%ctaid.z", "%cluster_ctarank"), np.zeros_like(thread)),
            **dict.fromkeys(("%nctaid.x", "%nctaid.y", "%nctaid.z"), np.full_like(thread, placeholder)),
        }
        self._active = np.ones(threads, bool)
        self._waiting: dict[str, NDArray[np.bool_]] = {}  # threads that branched ahead, by label
        self._passed: set[str] = set()
        self.branches: list[Branch] = []

    def run(self, lines: Sequence[CodeLine]) -> Iterator[Access]:
        for line in lines:
            code = line.code.partition("//")[0]
            if label := re.match(r"\s*(\$?\w+):\s*$", code):
                self._passed.add(label[1])
                self._active |= self._waiting.pop(label[1], np.False_)
                continue
            for statement in code.split(";")[:-1]:
                if found := _STATEMENT.fullmatch(statement.lstrip(" \t{").rstrip()):
                    yield from self._execute(found, line.source_line)

    def _execute(self, statement: re.Match[str], source_line: SourceLine) -> Iterator[Access]:
        negated, guard, opcode, rest = statement.groups()
        operands: list[str] = _OPERAND.findall(rest)
        taken: Value = np.ones_like(self._active, np.int64)
        if guard:
            held = self._registers.get(guard)
            taken = None if held is None else held ^ 1 if negated else held
        base = opcode.partition(".")[0]
        if base == "bra":
            if guard:
                self.branches.append(Branch(self._diverges(taken), source_line))
            self._branch(operands[0], taken)
        elif base in ("ret", "exit", "trap"):
            self._active &= np.True_ if taken is None else taken == 0
        elif moved := _SHARED.match(opcode):
            yield self._access(moved[1], opcode, operands, taken, source_line)
            if moved[1].startswith("ld"):
                self._write(operands[0], None, taken)
        elif base not in ("st", "red", "bar", "cp", "fence", "membar", "prefetch") and operands:
            self._write(operands[0], self._result(base, opcode, operands[1:]), taken)

    def _diverges(self, taken: Value) -> bool | None:
        if taken is None:
            return None
        warps = [slice(first, first + WARP) for first in range(0, len(taken), WARP)]
        return any(len(np.unique(taken[warp][self._active[warp]])) > 1 for warp in warps)

    def _branch(self, label: str, taken: Value) -> None:
        if label in self._passed:  # a loop: its body has run once
            return
        branching = self._active & (np.True_ if taken is None else taken != 0)
        self._waiting[label] = self._waiting.get(label, np.False_) | branching
        if taken is not None:
            self._active = self._active & ~branching

    def _access(self, base: str, opcode: str, operands: list[str], taken: Value, line: SourceLine) -> Access:
        kind = "async copy" if base == "cp.async" else "load" if base.startswith("ld") else "store"
        address = next(operand for operand in operands if operand.startswith("["))
        active = self._active & (np.True_ if taken is None else taken != 0)
        if "matrix" in base:  # the first 8, 16 or 32 lanes each address a row of 16 bytes
            matrices = int((re.search(r"\.x([124])\b", opcode) or "11")[1])
            addressing = active & (np.arange(len(active)) % WARP < 8 * matrices)
            return Access(kind, 16, self._address(address), addressing, line)
        if kind == "async copy":
            return Access(kind, int(operands[2], 0), self._address(address), active, line)
        vector = int((re.search(r"\.v([248])\b", opcode) or "11")[1])
        return Access(kind, vector * _bits(opcode) // 8, self._address(address), active, line)

    def _address(self, text: str) -> Value:
        base, _, offset = text.strip("[] ").replace(" ", "").partition("+")
        value = self._read(base, "u32")
        return None if value is None else value + int(offset or "0", 0)

    def _write(self, operand: str, value: Value, taken: Value) -> None:
        name, *others = re.findall(r"%?\b[a-z_]\w*", operand) or [""]  # `%r1|%p1` and `{%r1, %r2}` name several
        self._registers.update(dict.fromkeys(others))
        before = self._registers.get(name, value)
        if value is None or taken is None:
            self._registers[name] = None
            return
        changed = self._active & (taken != 0)
        if not changed.all():
            value = None if before is None else np.where(changed, value, before)
        self._registers[name] = value

    def _read(self, text: str, kind: str) -> Value:
        """Return an operand as an integer of this type. Addresses of variables are 0: only offsets matter."""
        if re.match(r"-?\d", text):
            number = re.fullmatch(r"-?(0x[\da-fA-F]+|\d+)", text)  # otherwise a float
            return np.full_like(self._active, int(text, 0), np.int64) if number else None
        if text not in self._registers and not text.startswith("%"):
            return np.zeros_like(self._active, np.int64)
        value, bits = self._registers.get(text), _bits(kind)
        if value is None or bits >= 64:
            return value
        value = value & ((1 << bits) - 1)
        return value - ((value >> (bits - 1)) << bits) if kind.startswith("s") else value

    def _result(self, base: str, opcode: str, operands: list[str]) -> Value:
        kinds = [found[0][1:] for found in _TYPE.finditer(opcode)]
        if base == "ld" and opcode.startswith("ld.param"):
            return self._parameter(operands[0], kinds[-1])
        if base == "shfl" and ".idx" in opcode:
            return self._shuffle(operands)
        if base not in _INTEGER or not kinds or any(kind.startswith(("f", "bf")) for kind in kinds):
            return None
        if len(operands) != _OPERANDS[base] or operands[-1].startswith("{") or re.search(r"\.hi\.[us]64", opcode):
            return None
        types = [kinds[-1]] * len(operands)  # the source type: u32 in `cvt.u64.u32`
        if ".wide" in opcode:
            types[2:] = ["s64"]
        values = [self._read(operand, kind) for operand, kind in zip(operands, types, strict=False)]
        if any(value is None for value in values):
            return None
        with np.errstate(all="ignore"):
            result = _INTEGER[base](opcode, *values)
        bits = 64 if ".wide" in opcode else _bits(kinds[0])
        return result & ((1 << bits) - 1) if bits < 64 else result

    def _parameter(self, text: str, kind: str) -> Value:
        if kind.startswith("f"):
            return None
        number = re.search(r"param_(\d+)\]$", text)
        given = self._arguments[int(number[1])] if number and int(number[1]) < len(self._arguments) else None
        return np.full_like(self._active, self._placeholder if given is None else given, np.int64)

    def _shuffle(self, operands: list[str]) -> Value:
        value, lane = self._read(operands[0], "u32"), self._read(operands[1], "u32")
        if value is None or lane is None:
            return None
        thread = np.arange(len(value))
        return value[np.minimum(thread - thread % WARP + lane % WARP, len(value) - 1)]


def _bits(kind: str) -> int:
    if kind.endswith("pred"):
        return 1
    found = re.search(r"[usbf](\d+)$", kind)
    return int(found[1]) if found else 64


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _compare(opcode: str, a: Any, b: Any) -> Any:
    return _COMPARISONS[opcode.split(".")[1]](a, b).astype(np.int64)


def _lop3(_: str, a: Any, b: Any, c: Any, table: Any) -> Any:
    """Look up bit 4a + 2b + c of the table, for each bit."""
    result = np.zeros_like(a)
    for case in range(8):
        terms = [value if case >> place & 1 else ~value for value, place in ((a, 2), (b, 1), (c, 0))]
        result |= np.where(table >> case & 1, terms[0] & terms[1] & terms[2], 0)
    return result


def _divide(_: str, a: Any, b: Any) -> Any:
    """Divide, rounding towards zero."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))


def _extract_bits(opcode: str, a: Any, first: Any, length: Any) -> Any:
    field = (a >> first) & ((1 << length) - 1)
    return field - ((field >> np.maximum(length - 1, 0)) << length) if ".s" in opcode else field


def _insert_bits(_: str, field: Any, a: Any, first: Any, length: Any) -> Any:
    mask = ((1 << length) - 1) << first
    return (a & ~mask) | ((field << first) & mask)


_INTEGER: dict[str, Callable[..., Any]] = {
    "mov": lambda _, a: a,
    "cvt": lambda _, a: a,
    "cvta": lambda _, a: a,
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda opcode, a, b: (a * b) >> 32 if ".hi" in opcode else a * b,
    "mad": lambda _, a, b, c: a * b + c,
    "neg": lambda _, a: -a,
    "abs": lambda _, a: np.abs(a),
    "min": lambda _, a, b: np.minimum(a, b),
    "max": lambda _, a, b: np.maximum(a, b),
    "div": _divide,
    "rem": lambda _, a, b: a - b * _divide(_, a, b),
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda _, a: ~a,
    "shl": lambda _, a, b: np.where(b < 64, a << np.minimum(b, 63), 0),
    "shr": lambda _, a, b: a >> np.minimum(b, 63),
    "bfe": _extract_bits,
    "bfi": _insert_bits,
    "lop3": _lop3,
    "selp": lambda _, a, b, p: np.where(p != 0, a, b),
    "setp": _compare,
}
_OPERANDS = {name: len(signature(function).parameters) - 1 for name, function in _INTEGER.items()}

"""Classify machine instructions: loads and stores with their width, arithmetic by unit, synchronisation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tilewright.workbench.inspect.compiler import CompiledKernel
from tilewright.workbench.inspect.line_info import CodeLine, SourceLine, code_lines

# Kinds in the order they are reported. The first pattern that matches an opcode decides.
NVIDIA = {
    "global load": r"LDG\.|LD\.",
    "global store": r"STG\.|ST\.",
    "async copy": r"LDGSTS",
    "bulk copy": r"UTMALDG|UTMASTG|UTMAREDG|UTMAPF|UTMACCTL|UBLKCP|UBLKPF|UBLKRED",
    "tensor core": r"[HIQDBO]G?MMA\b|UTC[HIQO]MMA",
    "tensor memory": r"LDTM|STTM|UTCCP|UTCSHIFT",
    "special function": r"MUFU",
    "atomic": r"ATOM|RED[GS.]|RED$|REDAS",
    "wait": r"LDGDEPBAR|DEPBAR|SYNCS|ARRIVES|UTCBAR|WARPGROUP|UTMACMDFLUSH",
    "barrier": r"BAR|MEMBAR|FENCE|WARPSYNC|UCGABAR|CCTL",
    "local load": r"LDL",
    "local store": r"STL",
    "shared load": r"LDS",
    "shared store": r"STS",
    "shuffle": r"SHFL|REDUX|CREDUX|U?VOTE|MATCH|MOVM",
    "branch": r"U?BRA|BRX|JMP|JMX|CALL|RET|BSSY|BSYNC|BREAK|BMOV|EXIT|KILL",
    "fp64": r"D(ADD|MUL|FMA|SETP|MNMX)",
    "fp32": r"F(ADD|MUL|FMA|MNMX|SETP|SEL|SWZ|CHK|SET)",
    "fp16": r"H(ADD|MUL|FMA|MNMX|SETP|SET)",
    "conversion": r"F2|I2|FRND",
    "constant load": r"U?LDC|LDCU",
    "integer and other": r"(?!NOP)",
}
AMD = {
    "global load": r"(global|buffer|flat)_load_(?!lds)",
    "global store": r"(global|buffer|flat)_store",
    "async copy": r"(global|buffer)_load_lds",
    "tensor core": r"v_s?mfmac?_",
    "special function": r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_",
    "atomic": r"(global|buffer|flat)_atomic|ds_(add|sub|inc|dec|min|max|and|or|xor|cmpst|wrxchg|pk_add)",
    "wait": r"s_waitcnt|s_sleep",
    "barrier": r"s_barrier|buffer_(inv|wb)",
    "local load": r"scratch_load",
    "local store": r"scratch_store",
    "shuffle": r"ds_(bpermute|permute|swizzle)|v_readlane|v_readfirstlane|v_writelane|\w+_dpp|v_permlane",
    "shared load": r"ds_read|ds_load",
    "shared store": r"ds_write|ds_store",
    "branch": r"s_c?branch|s_setpc|s_swappc|s_endpgm",
    "fp64": r"v_\w+_f64",
    "conversion": r"v_cvt",
    "fp32": r"v_(pk_)?(add|sub|subrev|mul|fma|fmac|fmaak|fmamk|mad|mac|max3?|min3?|med3|cmp_\w+|div_\w+|ldexp)_f32",
    "fp16": r"v_\w*_(f16|bf16)",
    "constant load": r"s_(buffer_)?load",
    "integer and other": r"(?!s_nop)(v|s|ds)_",
}
MOVES = ("global load", "global store", "async copy", "shared load", "shared store", "local load", "local store")
_NVIDIA_WIDTH = re.compile(r"\.(?:[US]?(8|16)|(32|64|128|256))(?:\.|$)")
_AMD_WIDTH = re.compile(r"_(?:(u?s?byte|u8|i8|b8)|(u?s?short|u16|i16|b16)|(?:dword|b)(x\d|\d+)?)")
_INSTRUCTION = {
    False: re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w[\w.]*)"),
    True: re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_[a-z0-9_]+)"),
}
_CONSTANT = re.compile(r"\bHFMA2\S* \w+, -RZ, RZ, ")  # 0 * 0 + constant: a move on an idle unit

# Blackwell's MMA takes its shape and types in a register (PTX ISA, instruction descriptor of tcgen05.mma).
_TCGEN05_MMA = re.compile(r"\btcgen05\.mma\.\S*kind::(f16|tf32|f8f6f4|i8)\s+\[[^\]]+\],[^,]+,[^,]+, (%r\d+),")
_MOVE_IMMEDIATE = re.compile(r"\bmov\.[bu]32\s+(%r\d+), (\d+);")
_ACCUMULATOR_TYPES = {0: "F16", 1: "F32", 2: "S32"}
_OPERAND_TYPES = {
    "f16": {0: "F16", 1: "BF16"},
    "tf32": {2: "TF32"},
    "f8f6f4": {0: "E4M3", 1: "E5M2", 3: "E2M3", 4: "E3M2", 5: "E2M1"},
    "i8": {0: "U8", 1: "S8"},
}
_MMA_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}


@dataclass(frozen=True)
class Instruction:
    opcode: str
    kind: str
    width: int  # bytes moved per thread; 0 if none
    source_line: SourceLine
    in_loop: bool = False


@dataclass(frozen=True)
class Mix:
    """Static instruction counts by kind: each instruction counts once, however often it runs."""

    instructions: Sequence[Instruction]

    @property
    def kinds(self) -> dict[str, int]:
        return dict(Counter(i.kind for i in self.instructions))

    def details(self, kind: str) -> dict[str, int]:
        """Return the counts of one kind, by width for data movement, else by opcode."""
        chosen = [i for i in self.instructions if i.kind == kind]
        if kind in MOVES:
            return {f"{width} B": count for width, count in sorted(Counter(i.width for i in chosen).items())[::-1]}
        return dict(Counter(i.opcode for i in chosen).most_common())

    def mean_width(self, *kinds: str) -> float | None:
        """Return the mean bytes per thread of the instructions of these kinds."""
        widths = [i.width for i in self.instructions if i.kind in kinds]
        return sum(widths) / len(widths) if widths else None

    def by_line(self, *kinds: str) -> dict[SourceLine, int]:
        """Return how many instructions of these kinds each source line has, most first."""
        return dict(Counter(i.source_line for i in self.instructions if i.kind in kinds).most_common())

    def as_json(self) -> dict[str, dict[str, int]]:
        return {kind: self.details(kind) for kind in NVIDIA if kind in self.kinds}


def mix(compiled: CompiledKernel) -> Mix:
    is_amd = compiled.arch.startswith("gfx")
    found = list(read_instructions(code_lines(compiled, "sass"), is_amd))
    if any(map(_is_blackwell_mma, found)) and "ptx" in compiled.texts:
        shapes = _mma_shapes(code_lines(compiled, "ptx"))
        found = [_with_mma_shape(one, shapes.get(one.source_line, set())) for one in found]
    return Mix(found)


def _is_blackwell_mma(one: Instruction) -> bool:
    return one.kind == "tensor core" and one.opcode.startswith("UTC")


def _with_mma_shape(one: Instruction, shapes: set[str]) -> Instruction:
    """Append shape and types to the opcode, as on other architectures, if its source line has a single MMA shape."""
    if not _is_blackwell_mma(one) or len(shapes) != 1:
        return one
    return replace(one, opcode=f"{one.opcode}.{next(iter(shapes))}")


def _mma_shapes(ptx: Sequence[CodeLine]) -> dict[SourceLine, set[str]]:
    """Return the shapes and types of the MMAs of each source line."""
    values = {found[1]: int(found[2]) for line in ptx if (found := _MOVE_IMMEDIATE.search(line.code))}
    shapes: dict[SourceLine, set[str]] = {}
    for line in ptx:
        if found := _TCGEN05_MMA.search(line.code):
            kind, register = found.groups()
            shape = _mma_shape(kind, values[register]) if register in values else ""
            shapes.setdefault(line.source_line, set()).add(shape)
    return {source_line: found for source_line, found in shapes.items() if "" not in found}


def _mma_shape(kind: str, descriptor: int) -> str:
    """Return shape and types; an empty string if a type is unknown."""

    def bits(first: int, count: int) -> int:
        return descriptor >> first & (1 << count) - 1

    m, n, k = bits(24, 5) * 16, bits(17, 6) * 8, _MMA_K[kind]
    operands = _OPERAND_TYPES[kind]
    types = [_ACCUMULATOR_TYPES.get(bits(4, 2)), operands.get(bits(7, 3)), operands.get(bits(10, 3))]
    if not all(types):
        return ""
    return ".".join([f"{m}x{n}x{k}", *map(str, types if kind == "f8f6f4" else types[:2])])


def read_instructions(lines: Sequence[CodeLine], is_amd: bool) -> Iterator[Instruction]:
    pattern, kinds = _INSTRUCTION[is_amd], _MATCHERS[is_amd]
    for line in lines:
        if found := pattern.match(line.code):
            opcode = found[1]
            kind = next((name for name, matches in kinds.items() if matches(opcode)), None)
            if kind is None:  # padding
                continue
            if is_amd and kind == "global load" and line.code.rstrip().endswith(" lds"):
                kind = "async copy"
            elif kind == "fp16" and _CONSTANT.search(line.code):
                kind = "integer and other"
            yield Instruction(opcode, kind, _width(opcode, is_amd) if kind in MOVES else 0, line.source_line)


def _width(opcode: str, is_amd: bool) -> int:
    if is_amd:
        return _amd_width(opcode)
    if opcode.startswith(("LDSM", "STSM")):  # 8x8 matrices of 16-bit elements: 4 bytes per thread and matrix
        return 4 * int(opcode[-1]) if opcode[-1] in "124" else 4
    found = _NVIDIA_WIDTH.search(opcode)
    return int(found[1] or found[2]) // 8 if found else 4


def _amd_width(opcode: str) -> int:
    found = _AMD_WIDTH.search(opcode)
    twice = 2 if re.match(r"ds_(read|write|load|store)2", opcode) else 1
    if not found or found[1]:
        return 1
    if found[2]:
        return 2
    size = found[3] or ""
    return twice * (4 * int(size[1:]) if size.startswith("x") else int(size) // 8 if size else 4)


_MATCHERS = {
    is_amd: {name: re.compile(pattern).match for name, pattern in kinds.items()}
    for is_amd, kinds in ((False, NVIDIA), (True, AMD))
}

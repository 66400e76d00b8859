"""Machine instructions by kind: what moves data and how wide, what computes on which unit, what waits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tilewright.workbench.inspect.compiling import Compiled
from tilewright.workbench.inspect.listing import Line, Place, listing

# The kinds, in the order of a report. The first pattern that an opcode matches decides.
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
_CONSTANT = re.compile(r"\bHFMA2\S* \w+, -RZ, RZ, ")  # zero times zero plus a constant: a move on an idle unit

# What Blackwell's matrix unit is told in a register, as PTX has it (PTX ISA, instruction descriptor of tcgen05.mma).
_TOLD = re.compile(r"\btcgen05\.mma\.\S*kind::(f16|tf32|f8f6f4|i8)\s+\[[^\]]+\],[^,]+,[^,]+, (%r\d+),")
_SET = re.compile(r"\bmov\.[bu]32\s+(%r\d+), (\d+);")
_RESULTS = {0: "F16", 1: "F32", 2: "S32"}
_FACTORS = {
    "f16": {0: "F16", 1: "BF16"},
    "tf32": {2: "TF32"},
    "f8f6f4": {0: "E4M3", 1: "E5M2", 3: "E2M3", 4: "E3M2", 5: "E2M1"},
    "i8": {0: "U8", 1: "S8"},
}
_DEPTHS = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}


@dataclass(frozen=True)
class Instruction:
    opcode: str
    kind: str
    width: int  # bytes that a thread moves; 0 where nothing is moved
    place: Place


@dataclass(frozen=True)
class Mix:
    """How many instructions of each kind the code has: as written, not as often as a run takes them."""

    instructions: Sequence[Instruction]

    @property
    def kinds(self) -> dict[str, int]:
        return dict(Counter(i.kind for i in self.instructions))

    def details(self, kind: str) -> dict[str, int]:
        """Of one kind: by bytes where data is moved, else by what the unit does."""
        chosen = [i for i in self.instructions if i.kind == kind]
        if kind in MOVES:
            return {f"{width} B": count for width, count in sorted(Counter(i.width for i in chosen).items())[::-1]}
        return dict(Counter(i.opcode for i in chosen).most_common())

    def bytes_each(self, *kinds: str) -> float | None:
        """Bytes that an instruction of these kinds moves for a thread, on average."""
        widths = [i.width for i in self.instructions if i.kind in kinds]
        return sum(widths) / len(widths) if widths else None

    def by_place(self, *kinds: str) -> dict[Place, int]:
        """How many instructions of these kinds each source line has, most first."""
        return dict(Counter(i.place for i in self.instructions if i.kind in kinds).most_common())

    def as_json(self) -> dict[str, dict[str, int]]:
        return {kind: self.details(kind) for kind in NVIDIA if kind in self.kinds}


def mix(made: Compiled) -> Mix:
    is_amd = made.arch.startswith("gfx")
    found = list(read_instructions(listing(made, "sass"), is_amd))
    if any(_is_blackwell_product(one) for one in found) and "ptx" in made.texts:
        products = _products(listing(made, "ptx"))
        found = [_with_product(one, products.get(one.place, set())) for one in found]
    return Mix(found)


def _is_blackwell_product(one: Instruction) -> bool:
    return one.kind == "tensor core" and one.opcode.startswith("UTC")


def _with_product(one: Instruction, products: set[str]) -> Instruction:
    """Named as the instructions of other architectures are, where its source line asks for one kind of product."""
    if not _is_blackwell_product(one) or len(products) != 1:
        return one
    return replace(one, opcode=f"{one.opcode}.{next(iter(products))}")


def _products(ptx: Sequence[Line]) -> dict[Place, set[str]]:
    """Shape and types of the products that each source line asks for."""
    numbers = {found[1]: int(found[2]) for line in ptx if (found := _SET.search(line.code))}
    products: dict[Place, set[str]] = {}
    for line in ptx:
        if found := _TOLD.search(line.code):
            kind, register = found.groups()
            told = _described(kind, numbers[register]) if register in numbers else ""
            products.setdefault(line.place, set()).add(told)
    return {place: told for place, told in products.items() if "" not in told}


def _described(kind: str, descriptor: int) -> str:
    """Shape and types; nothing where a type has no name."""

    def bits(first: int, count: int) -> int:
        return descriptor >> first & (1 << count) - 1

    m, n, k = bits(24, 5) * 16, bits(17, 6) * 8, _DEPTHS[kind]
    types = [_RESULTS.get(bits(4, 2)), _FACTORS[kind].get(bits(7, 3)), _FACTORS[kind].get(bits(10, 3))]
    if not all(types):
        return ""
    return ".".join([f"{m}x{n}x{k}", *map(str, types if kind == "f8f6f4" else types[:2])])


def read_instructions(lines: Sequence[Line], is_amd: bool) -> Iterator[Instruction]:
    pattern, kinds = _INSTRUCTION[is_amd], _COMPILED[is_amd]
    for line in lines:
        if found := pattern.match(line.code):
            opcode = found[1]
            kind = next((name for name, matches in kinds.items() if matches(opcode)), None)
            if kind is None:  # filling
                continue
            if is_amd and kind == "global load" and line.code.rstrip().endswith(" lds"):
                kind = "async copy"
            elif kind == "fp16" and _CONSTANT.search(line.code):
                kind = "integer and other"
            yield Instruction(opcode, kind, _width(opcode, is_amd) if kind in MOVES else 0, line.place)


def _width(opcode: str, is_amd: bool) -> int:
    if is_amd:
        return _amd_width(opcode)
    if opcode.startswith(("LDSM", "STSM")):  # matrices of 8 x 8 halves: 4 bytes of each a thread
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


_COMPILED = {
    is_amd: {name: re.compile(pattern).match for name, pattern in kinds.items()}
    for is_amd, kinds in ((False, NVIDIA), (True, AMD))
}

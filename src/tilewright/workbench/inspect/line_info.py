"""Compiled code line by line, each line with its source line, from the line info of the compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import CodeNotAvailable
from tilewright.workbench.inspect.compiler import CompiledKernel, demangle
from tilewright.workbench.inspect.resources import disassembly

FORMS = ("ttir", "ttgir", "llir", "ptx", "sass")
SourceLine = tuple[str, int] | None  # file and line number


@dataclass(frozen=True)
class CodeLine:
    code: str
    source_line: SourceLine


def code_lines(compiled: CompiledKernel, form: str) -> list[CodeLine]:
    """Return the code in one of FORMS. AMD has a single assembly, returned for both `ptx` and `sass`."""
    if form in ("ptx", "sass") and compiled.arch.startswith("gfx"):
        return list(_assembly(compiled.texts["amdgcn"]))
    if form == "sass":
        return list(_sass(_function(disassembly(compiled), compiled.symbol)))
    if form not in compiled.texts:
        raise CodeNotAvailable(demangle(compiled.symbol), form, forms(compiled))
    return list(_READERS[form](compiled.texts[form]))


def forms(compiled: CompiledKernel) -> list[str]:
    """Return the FORMS that this kernel has."""
    assembly = ("ptx", "sass") if "amdgcn" in compiled.texts else ("sass",)
    return [form for form in FORMS if form in (*compiled.texts, *assembly)]


def _function(text: str, symbol: str) -> str:
    """Return the section of one kernel; a binary may contain several."""
    _, found, rest = text.partition(f"\n.text.{symbol}:\n")
    return re.split(r"\n//-{5,}", rest, maxsplit=1)[0] if found else text


def _sass(text: str) -> Iterator[CodeLine]:
    source_line: SourceLine = None
    for line in text.splitlines():
        if found := re.search(r'//## File "(.+?)", line (\d+)', line):
            source_line = found[1], int(found[2])
        elif line.strip():
            yield CodeLine(line.rstrip().replace("\t", "    "), source_line)


def _assembly(text: str) -> Iterator[CodeLine]:
    """Parse PTX and AMD assembly, in which a `.loc` applies to the lines after it, up to the debug sections."""
    files: dict[str, str] = {}
    for number, folder, name in re.findall(r'^\s*\.file\s+(\d+) "([^"]*)"(?: "([^"]*)")?', text, re.M):
        files[number] = str(Path(folder) / name) if name else folder
    source_line: SourceLine = None
    for line in text.splitlines():
        if re.match(r"\s*\.section\s+\.?(debug|AMDGPU|rodata)", line):
            break
        if found := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            source_line = (files[found[1]], int(found[2])) if found[2] != "0" else None
        elif line.strip() and not line.lstrip().startswith(".file"):
            yield CodeLine(line.rstrip().replace("\t", "    "), source_line)


def _mlir(text: str) -> Iterator[CodeLine]:
    """Parse TTIR and TTGIR, in which an operation ends with a location: a file position, or an alias of a location."""
    aliases = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))
    location = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")

    def resolve(text: str, depth: int = 0) -> SourceLine:
        if found := re.search(r'"([^"]+)":(\d+):\d+', text):
            return found[1], int(found[2])
        alias = re.search(r"#loc\d*", text)
        return resolve(aliases.get(alias[0], ""), depth + 1) if alias and depth < 9 else None

    for line in text.splitlines():
        if line.strip() and not line.startswith("#loc"):
            locations = location.findall(line)
            yield CodeLine(location.sub("", line).rstrip(), resolve(locations[-1]) if locations else None)


class _DebugInfo:
    """The debug info of LLVM IR: a DILocation refers to a scope, which refers to a file, and to its call site."""

    def __init__(self, text: str):
        self.entries = dict(re.findall(r"^(!\d+) = (?:distinct )?!(DI\w+\(.*\))$", text, re.M))

    def source_line(self, name: str) -> SourceLine:
        found = re.search(r"DILocation\(line: (\d+).*?scope: (!\d+)", self.entries.get(name, ""))
        file = self._file(found[2]) if found else None
        return (file, int(found[1])) if found and file else None

    def outermost(self, name: str) -> SourceLine:
        """Return the line of the kernel into which a location was inlined, or its own line."""
        caller = re.search(r"inlinedAt: (!\d+)", self.entries.get(name, ""))
        return self.outermost(caller[1]) if caller else self.source_line(name)

    def _file(self, name: str) -> str | None:
        entry = self.entries.get(name, "")
        if entry.startswith("DIFile"):
            file, folder = re.search(r'filename: "([^"]*)"', entry), re.search(r'directory: "([^"]*)"', entry)
            return str(Path(folder[1] if folder else "") / (file[1] if file else ""))
        next_name = re.search(r"(?:file|scope): (!\d+)", entry)
        return self._file(next_name[1]) if next_name else None


def _llvm(text: str) -> Iterator[CodeLine]:
    info = _DebugInfo(text)
    for line in text.splitlines():
        if not line.strip() or line.startswith("!"):
            continue
        code, _, name = line.rpartition(", !dbg ")
        yield CodeLine((code or line).rstrip(), info.source_line(name.strip()))


def call_sites(compiled: CompiledKernel) -> dict[SourceLine, set[SourceLine]]:
    """Return the lines of the kernel into which each line of a called function was inlined; empty without LLVM IR."""
    info, found = _DebugInfo(compiled.texts.get("llir", "")), {}
    for name, entry in info.entries.items():
        if "inlinedAt" in entry:
            found.setdefault(info.source_line(name), set()).add(info.outermost(name))
    return found


_READERS: dict[str, Callable[[str], Iterator[CodeLine]]] = {
    "ttir": _mlir,
    "ttgir": _mlir,
    "llir": _llvm,
    "ptx": _assembly,
}

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


def _llvm(text: str) -> Iterator[CodeLine]:
    """Parse LLVM IR, in which an operation refers to a DILocation, which refers to a scope, which refers to a file."""
    entries = dict(re.findall(r"^(!\d+) = (?:distinct )?!(DI\w+\(.*\))$", text, re.M))

    def file_of(name: str) -> str | None:
        entry = entries.get(name, "")
        if entry.startswith("DIFile"):
            file, folder = re.search(r'filename: "([^"]*)"', entry), re.search(r'directory: "([^"]*)"', entry)
            return str(Path(folder[1] if folder else "") / (file[1] if file else ""))
        next_name = re.search(r"(?:file|scope): (!\d+)", entry)
        return file_of(next_name[1]) if next_name else None

    for line in text.splitlines():
        if not line.strip() or line.startswith("!"):
            continue
        code, _, name = line.rpartition(", !dbg ")
        found = re.search(r"DILocation\(line: (\d+).*?scope: (!\d+)", entries.get(name.strip(), ""))
        file = file_of(found[2]) if found else None
        yield CodeLine((code or line).rstrip(), (file, int(found[1])) if found and file else None)


_READERS: dict[str, Callable[[str], Iterator[CodeLine]]] = {
    "ttir": _mlir,
    "ttgir": _mlir,
    "llir": _llvm,
    "ptx": _assembly,
}

"""Compiled code line by line, each with the line of the source that it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import NoSuchCode
from tilewright.workbench.inspect.compiling import Compiled, readable
from tilewright.workbench.inspect.resources import disassembly

FORMS = ("ttir", "ttgir", "llir", "ptx", "sass")
Place = tuple[str, int] | None  # file and line


@dataclass(frozen=True)
class Line:
    code: str
    place: Place


def listing(made: Compiled, form: str) -> list[Line]:
    """The code in one of FORMS; AMD's assembly, which is one text, is both its `ptx` and its `sass`."""
    if form in ("ptx", "sass") and made.arch.startswith("gfx"):
        return list(_assembly(made.texts["amdgcn"]))
    if form == "sass":
        return list(_sass(_of_function(disassembly(made), made.symbol)))
    if form not in made.texts:
        raise NoSuchCode(readable(made.symbol), form, forms(made))
    return list(_READERS[form](made.texts[form]))


def forms(made: Compiled) -> list[str]:
    """Those of FORMS that there are."""
    assembly = ("ptx", "sass") if "amdgcn" in made.texts else ("sass",)
    return [form for form in FORMS if form in (*made.texts, *assembly)]


def _of_function(text: str, symbol: str) -> str:
    """A binary may hold several kernels, each in a section of its own."""
    _, found, rest = text.partition(f"\n.text.{symbol}:\n")
    return re.split(r"\n//-{5,}", rest, maxsplit=1)[0] if found else text


def _sass(text: str) -> Iterator[Line]:
    place: Place = None
    for line in text.splitlines():
        if found := re.search(r'//## File "(.+?)", line (\d+)', line):
            place = found[1], int(found[2])
        elif line.strip():
            yield Line(line.rstrip().replace("\t", "    "), place)


def _assembly(text: str) -> Iterator[Line]:
    """PTX and AMD's: a `.loc` holds for what follows. Sections of debugging data, at the end, are left out."""
    files: dict[str, str] = {}
    for number, folder, name in re.findall(r'^\s*\.file\s+(\d+) "([^"]*)"(?: "([^"]*)")?', text, re.M):
        files[number] = str(Path(folder) / name) if name else folder
    place: Place = None
    for line in text.splitlines():
        if re.match(r"\s*\.section\s+\.?(debug|AMDGPU|rodata)", line):
            break
        if found := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            place = (files[found[1]], int(found[2])) if found[2] != "0" else None
        elif line.strip() and not line.lstrip().startswith(".file"):
            yield Line(line.rstrip().replace("\t", "    "), place)


def _mlir(text: str) -> Iterator[Line]:
    """TTIR and TTGIR: an operation ends with the name of its place; a name may stand for another, or for a call."""
    named = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))
    of_operation = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")

    def place(what: str, depth: int = 0) -> Place:
        if found := re.search(r'"([^"]+)":(\d+):\d+', what):
            return found[1], int(found[2])
        inner = re.search(r"#loc\d*", what)
        return place(named.get(inner[0], ""), depth + 1) if inner and depth < 9 else None

    for line in text.splitlines():
        if line.strip() and not line.startswith("#loc"):
            places = of_operation.findall(line)
            yield Line(of_operation.sub("", line).rstrip(), place(places[-1]) if places else None)


def _llvm(text: str) -> Iterator[Line]:
    """LLVM's: an operation names a location, that a scope, that a file."""
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
        yield Line((code or line).rstrip(), (file, int(found[1])) if found and file else None)


_READERS: dict[str, Callable[[str], Iterator[Line]]] = {"ttir": _mlir, "ttgir": _mlir, "llir": _llvm, "ptx": _assembly}

"""Write the part of this package that some layers need as a build for Hugging Face's `kernels`.

Such a build is one folder that is loaded under a name of its own: it may import nothing by name but torch and Triton.
So every file that the layers reach is copied with relative imports, and torch's operators are registered in a namespace
of the build, which may be loaded beside this package.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from tilewright import __version__
from tilewright.errors import BuildFolderTaken
from tilewright.source import PACKAGE, TUNED, public_names

NAME = "tilewright"
LAYERS = PACKAGE / "models" / "layers.py"
BACKENDS = ("cuda", "rocm", "universal")  # `kernels` loads torch-universal on any machine
OPERATORS, NAMESPACE = PACKAGE / "runtime" / "operator.py", "NAMESPACE"  # where torch's operators get their namespace


def build(folder: Path, backend: str) -> Path:
    """Write `build/torch-<backend>` into a folder and return its path. A build of ours there is replaced."""
    target = folder / "build" / f"torch-{backend}"
    if target.exists() and not (target / "metadata.json").is_file():
        raise BuildFolderTaken(target)
    files = {_place(path): path.read_text() for path in reached(LAYERS)}
    data = sorted([*TUNED.glob("*.json"), *(PACKAGE / "ops" / "include").iterdir(), *_cuda_sources(files)])
    contents = "".join(f"{place}{files[place]}" for place in sorted(files)).encode() + b"".join(
        path.read_bytes() for path in data
    )
    identity = f"_{NAME}_{hashlib.sha256(contents).hexdigest()[:12]}"
    shutil.rmtree(target, ignore_errors=True)
    for place, text in files.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        (target / place).write_text(_rewritten(place, text, identity))
    for path in data:
        copy = target / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for package in {place.parent for place in files} - {Path()}:
        for one in (package, *package.parents):
            (target / one / "__init__.py").touch()
    (target / "__init__.py").write_text(_init(files))
    (target / "metadata.json").write_text(json.dumps(_metadata(identity, backend), indent=1) + "\n")
    return target


def reached(root: Path) -> list[Path]:
    """Return the files of this package that a file imports, directly or not, with itself."""
    found: dict[Path, None] = {}
    waiting = [root]
    while waiting:
        path = waiting.pop()
        if path in found or path == PACKAGE / "__init__.py":
            continue
        found[path] = None
        for statement in _imports(ast.parse(path.read_text())):
            module = statement.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in statement.names)]
            waiting += [file for name in names if (file := _file(name)) is not None]
    return sorted(found)


def _imports(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """Yield the imports from this package, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{NAME}."):
            yield node


def _file(module: str) -> Path | None:
    path = PACKAGE.parent / Path(*module.split("."))
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _place(path: Path) -> Path:
    return Path(LAYERS.name) if path == LAYERS else path.relative_to(PACKAGE)


def _cuda_sources(files: dict[Path, str]) -> Iterator[Path]:
    for folder in {place.parent for place in files if place.parts[0] == "ops"}:
        yield from (PACKAGE / folder).glob("*.cu")


def _rewritten(place: Path, text: str, identity: str) -> str:
    """Return a file with relative imports, and with the build's name as the namespace of torch's operators."""
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    up = "." * len(place.parts)
    for node in _imports(tree):
        absolute, relative = f"from {node.module} import", f"from {up}{(node.module or '')[len(NAME) + 1 :]} import"
        assert absolute in lines[node.lineno - 1], f"{place}, line {node.lineno}"
        lines[node.lineno - 1] = lines[node.lineno - 1].replace(absolute, relative)
    if PACKAGE / place == OPERATORS:
        (line,) = (n.lineno for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == NAMESPACE)
        lines[line - 1] = f'{NAMESPACE} = "{identity}"\n'
    return "".join(lines)


def _init(files: dict[Path, str]) -> str:
    """Return the root of the build: its layers, and the public functions of the operations it has."""
    modules = {".".join((NAME, *place.with_suffix("").parts)) for place in files}
    public = {name: module for name, module in public_names().items() if module in modules}
    imports = [f"from .{module[len(NAME) + 1 :]} import {name}" for name, module in sorted(public.items())]
    lines = [
        '"""Proven, fast GPU kernels for PyTorch."""',
        f'__version__ = "{__version__}"',
        "from . import layers",
        *imports,
        f"__all__ = {['layers', *sorted(public)]!r}",
    ]
    return "\n".join(lines) + "\n"


def _metadata(identity: str, backend: str) -> dict[str, object]:
    kind = "cuda" if backend == "universal" else backend
    about = {"name": NAME, "id": identity, "version": 1, "license": "Apache-2.0"}
    return {**about, "python-depends": [], "backend": {"type": kind}}

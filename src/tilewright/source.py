"""Op files read as text: their summary, kernels and public names, and a hash of the code that each kernel reaches.

Nothing is imported, so listing operations and marking stale records needs no torch. The hash of a kernel covers the
statement that registers it, the reference, and every module-level name and CUDA file they lead to, in the op file and
in the modules of `ops/` and `runtime/` that it imports from. Comments, docstrings, blank lines and bench cases do not
count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from tilewright.errors import FileBroken, FileMissing

PACKAGE = Path(__file__).parent
OPS = PACKAGE / "ops"
INCLUDE = OPS / "include"
TUNED = PACKAGE / "runtime" / "tuned"
PEERS = PACKAGE / "peers"
FOLLOWED = ("tilewright.ops.", "tilewright.runtime.")  # imports whose code counts
PUBLIC = "tilewright"  # the kernel that stands for the public function, whichever path its call takes


class OpSource:
    """One op file or helper module."""

    def __init__(self, path: Path):
        self._path, self._text = path, path.read_text()
        self._lines = _without_comments(self._text)
        self._tree = ast.parse(self._text)
        self.summary = (ast.get_docstring(self._tree) or "").partition("\n")[0]
        self._definitions: dict[str, list[ast.stmt]] = {}
        self._imports: dict[str, tuple[Path, str]] = {}
        self._modules: dict[str, Path] = {}
        self._kernels: dict[str, ast.stmt] = {}
        self._parts: dict[ast.AST, tuple[str, list[ast.AST]]] = {}
        self._imported = {name for statement in self._tree.body for name in _names_imported(statement)}
        for statement in self._tree.body:
            self._place(statement)

    @property
    def kernels(self) -> list[str]:
        """Return the kernel names in file order, after `eager` and `compile`, which stand for the reference."""
        return ["eager", "compile", *self._kernels] if "reference" in self._definitions else []

    def function_hash(self, name: str) -> str | None:
        """Return a short hash of the code that a module-level function reaches; None if there is no such function."""
        roots = self._definitions.get(name)
        return self._hash(roots) if roots else None

    def kernel_hash(self, kernel: str) -> str:
        """Return a short hash of the code that a kernel and the reference it is checked against reach."""
        roots = [*self._definitions["reference"]]
        if kernel in self._kernels:
            roots.append(self._kernels[kernel])
        return self._hash(roots)

    def kernel_code(self, kernel: str) -> str:
        """Return the code in `ops/` that the forward pass of a kernel reaches, definitions before uses.

        It lacks comments and docstrings. Of a dictionary of forms, only those that the registration names are reached.
        """
        root = self._kernels[kernel]
        constants = (node.value for node in ast.walk(root) if isinstance(node, ast.Constant))
        reached = self._reached([root], {value for value in constants if isinstance(value, str)})
        return "\n\n\n".join(code for code, file in reversed(reached.items()) if file.is_relative_to(OPS))

    def _hash(self, roots: list[ast.stmt]) -> str:
        return hashlib.sha256("\n".join(sorted(self._reached(roots))).encode()).hexdigest()[:16]

    def _reached(self, roots: list[ast.stmt], forms: Set[str] = frozenset()) -> dict[str, Path]:
        """Return the code that statements reach, each part with its file; with `forms`, of the forward pass only."""
        reached: dict[str, Path] = {}
        seen: set[tuple[int, str]] = set()
        for root in roots:
            self._reach(root, reached, seen, forms)
        return reached

    def _place(self, statement: ast.stmt) -> None:
        if name := _registered_kernel(statement):
            self._kernels[name] = statement
        elif isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(FOLLOWED):
            helper = PACKAGE.parent / (statement.module or "").replace(".", "/")
            for alias in statement.names:
                if helper.is_dir():  # the name is a module
                    self._modules[alias.asname or alias.name] = helper / f"{alias.name}.py"
                else:
                    self._imports[alias.asname or alias.name] = (helper.with_suffix(".py"), alias.name)
        else:
            for name in _names_bound(statement):
                if (
                    name not in self._imported
                ):  # a function decorated by `torch` or `operator` does not belong to these names
                    self._definitions.setdefault(name, []).append(statement)

    def _reach(self, statement: ast.AST, reached: dict[str, Path], seen: set[tuple[int, str]], forms: Set[str]) -> None:
        if forms and _registers_gradient(statement):
            return
        code, nodes = self._part(statement)
        reached[code] = self._path
        if chosen := _chosen(statement, forms):
            nodes = [node for value in chosen for node in ast.walk(value)]
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                reached.update(_file_text(node.value))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self._modules:
                key = id(self), f"{node.value.id}.{node.attr}"
                if key not in seen:
                    seen.add(key)
                    self._follow(self._modules[node.value.id], node.attr, reached, seen, forms)
            if not isinstance(node, ast.Name) or (id(self), node.id) in seen or node.id == "op":
                continue
            seen.add((id(self), node.id))
            if node.id in self._imports:
                self._follow(*self._imports[node.id], reached, seen, forms)
            for definition in self._definitions.get(node.id, []):
                self._reach(definition, reached, seen, forms)

    def _follow(
        self, helper: Path, name: str, reached: dict[str, Path], seen: set[tuple[int, str]], forms: Set[str]
    ) -> None:
        module = read(helper)
        for definition in module._definitions.get(name, []):
            module._reach(definition, reached, seen, forms)

    def _part(self, statement: ast.AST) -> tuple[str, list[ast.AST]]:
        """Return the code of a statement, and the nodes that may lead to other code."""
        if statement not in self._parts:  # most are reached by many kernels
            leading = (ast.Constant, ast.Attribute, ast.Name)
            nodes: list[ast.AST] = [node for node in ast.walk(statement) if isinstance(node, leading)]
            self._parts[statement] = self._code(statement), nodes
        return self._parts[statement]

    def _code(self, statement: ast.AST) -> str:
        decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(d.lineno for d in decorators)])  # type: ignore[attr-defined]
        skipped: set[int] = set()
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
                docstring = node.body[0]
                skipped.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
        last = statement.end_lineno  # type: ignore[attr-defined]
        lines = (self._lines[n - 1] for n in range(first, last + 1) if n not in skipped)
        return "\n".join(line for line in lines if line)


@functools.cache
def read(path: Path) -> OpSource:
    return OpSource(path)


@functools.cache
def op_files() -> dict[str, Path]:
    """Return the operations by name: every file below `ops/` whose name does not start with an underscore."""
    return {path.stem: path for path in sorted(OPS.rglob("*.py"), key=lambda path: path.stem) if path.stem[0] != "_"}


def module_name(path: Path) -> str:
    """Return the dotted name of a module of the package."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


@functools.cache
def public_names() -> dict[str, str]:
    """Return the public names of the operations, each with its module: what `__all__` of every op file lists."""
    found = {}
    for path in op_files().values():
        listed = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.M | re.S)
        found |= dict.fromkeys(ast.literal_eval(listed[1]) if listed else [], module_name(path))
    return found


def kernels(op: str) -> list[str]:
    """Return the current kernels of an operation; none if it is gone."""
    path = op_files().get(op)
    return read(path).kernels if path else []


@functools.cache
def kernel_hash(op: str, kernel: str) -> str | None:
    """Return the current hash of a kernel; None if it is gone."""
    if kernel in kernels(op) or kernel.startswith("compile"):
        return read(op_files()[op]).kernel_hash(kernel)
    return read(peer_files()[kernel]).function_hash(op) if kernel in peer_files() else None


@functools.cache
def peer_files() -> dict[str, Path]:
    """Return the peers by name: every file of `peers/`."""
    return {path.stem: path for path in sorted(PEERS.glob("*.py")) if not path.stem.startswith("_")}


def file_hash(path: Path) -> str:
    """Return the hash of a file as it is."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def tree_hash(folders: Sequence[str]) -> str:
    """Return a hash of the code in these folders of the package."""
    files = [path for folder in folders for path in sorted((PACKAGE / folder).rglob("*.py"))]
    return hashlib.sha256("".join(map(code_hash, files)).encode()).hexdigest()[:16]


def code_hash(path: Path, only: str = "") -> str:
    """Return a hash of the module-level definitions whose name contains `only`.

    Imports, comments, docstrings, formatting and the function `main` do not count.
    """
    kept = []
    for statement in ast.parse(path.read_text()).body:
        names = [name for name in _names_bound(statement) if name]
        if names and "main" not in names and any(only in name.lower() for name in names):
            kept.append(ast.dump(_without_docstrings(statement)))
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _registered_kernel(statement: ast.stmt) -> str | None:
    """Return 'x' for `@op.kernel("x") def …` and for `op.kernel("x")(…)`, and PUBLIC for `@op.public`."""
    calls: list[ast.AST] = []
    if isinstance(statement, ast.FunctionDef):
        calls = [*statement.decorator_list]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        calls = [statement.value.func]
    for call in calls:
        if ast.unparse(call) == "op.public":
            return PUBLIC
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "op.kernel":
            return ast.literal_eval(call.args[0])
    return None


def _registers_gradient(statement: ast.AST) -> bool:
    """Return whether this is a call like `softmax_forward.differentiate(_save, _backward)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "differentiate"


def _chosen(statement: ast.AST, forms: Set[str]) -> list[ast.expr]:
    """Return the values of a dictionary like `FORMS = {"tile": _tile, …}` that stand for these forms."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if not isinstance(value, ast.Dict):
        return []
    keys = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
    return [one for key, one in zip(keys, value.values, strict=True) if key in forms]


def _names_imported(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)


def _names_bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement defines or, as `softmax.differentiate(…)` does, extends."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
        for decorator in statement.decorator_list:
            yield _root_name(decorator)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
    elif isinstance(statement, ast.AnnAssign | ast.Expr):
        yield _root_name(statement.target if isinstance(statement, ast.AnnAssign) else statement.value)


def _root_name(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _without_comments(text: str) -> list[str]:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return [line.rstrip() for line in lines]


def _file_text(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the text of a file named in an op file, with its path: CUDA C++, or tuned configurations."""
    if name.endswith(".cu"):
        yield from ((text, OPS / name) for text in _cuda_text(OPS / name))
    elif name.endswith(".json") and (TUNED / name).exists():
        yield (TUNED / name).read_text(), TUNED / name


def _cuda_text(path: Path) -> Iterator[str]:
    """Yield the text of a CUDA file and of the headers it includes, without comments and blank lines."""
    text = path.read_text()
    for included in re.findall(r'#include "([^"]+)"', text):
        yield from _cuda_text(INCLUDE / included)
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    yield "\n".join(line.rstrip() for line in bare.splitlines() if line.strip())


def definitions(path: Path) -> dict[str, ast.stmt]:
    """Return what a user's file defines at module level, by name; nothing of it runs."""
    require_python_file(path)
    return {name: one for one in ast.parse(path.read_bytes()).body for name in _names_bound(one) if name}


def require_python_file(path: Path) -> None:
    """Raise unless the file exists and parses; nothing of it runs."""
    if not path.is_file():
        raise FileMissing(path)
    if path.suffix != ".py":
        raise FileBroken(path, None, "its name does not end in .py")
    try:
        ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise FileBroken(path, error.lineno, f"syntax error, {error.msg}") from None
    except ValueError:
        raise FileBroken(path, None, "not Python source text") from None
    except PermissionError:
        raise FileBroken(path, None, "no permission to read it") from None

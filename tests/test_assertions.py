"""Every test can fail: it asserts something itself, or calls a helper that does."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
EXAMPLES = ("problems", "submissions")  # files that tests read; they hold no tests
FILES = sorted(path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in EXAMPLES)
TREES = {path: ast.parse(path.read_text()) for path in FILES}
ASSERTING = {"raises", "warns", "fail", "opcheck", "gradcheck", "gradgradcheck"}


@pytest.fixture(autouse=True)
def interpreter():
    """Nothing runs: these tests read text."""


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions of a module and of its classes, without nested ones."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found += [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
    return found


def asserts(function: ast.AST, helpers: set[str]) -> bool:
    if any(isinstance(node, ast.Assert) for node in ast.walk(function)):
        return True
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
    return any(name in helpers or name.startswith("assert_") for name in names)


def with_helpers(tree: ast.Module, known: set[str]) -> set[str]:
    """The names of the known helpers and of those of this module that assert something, directly or through another."""
    found, before = {*known}, set()
    while found != before:
        before = {*found}
        found |= {f.name for f in functions(tree) if not f.name.startswith("test_") and asserts(f, before)}
    return found


def helpers_of(tree: ast.Module) -> set[str]:
    """The asserting helpers that a test module defines, or imports from a module below tests/."""
    modules = {path.stem: path for path in FILES}
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            theirs = with_helpers(TREES[modules[node.module]], ASSERTING)
            imported |= theirs & {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    imported |= with_helpers(TREES[modules[alias.name]], ASSERTING)
    return with_helpers(tree, ASSERTING | imported)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_every_test_asserts_something(path):
    tree = TREES[path]
    tests = [function for function in functions(tree) if function.name.startswith("test_")]
    helpers = helpers_of(tree)
    empty = [f"{path.relative_to(TESTS)}:{f.lineno}: {f.name}" for f in tests if not asserts(f, helpers)]
    if empty:
        pytest.fail("\n".join(["no assertion:", *empty]), pytrace=False)


def test_the_scan_finds_a_test_without_an_assertion():
    tree = ast.parse("def run(): pass\ndef judge(): assert x\ndef test_a(): run()\ndef test_b(): judge()")
    assert [f.name for f in functions(tree) if asserts(f, helpers_of(tree))] == ["judge", "test_b"]

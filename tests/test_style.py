"""The prose of the package: standard terms instead of the ones in tests/style/words.toml, and docstrings that say what
the code does."""

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tilewright

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PYTHON = sorted((ROOT / "src").rglob("*.py"))
TEXT = sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in {".cu", ".cuh", ".html", ".js", ".css"})
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

OTHERS = sorted(path for folder in ("tests", "scripts", "examples") for path in (ROOT / folder).rglob("*.py"))
OTHERS.remove(Path(__file__))  # quotes the expressions

GENERATED = re.compile(r"<!-- records: .*?<!-- end -->", re.DOTALL)  # tables that quote records
OPENERS = re.compile(
    r"(And|Again|As|But|By|For|From|If|In|Likewise|Not|Of|On|Or|That|Those|To|Unless|Until|Up|What|Whatever|Where"
    r"|Which|While|Who|Whom|Whose|With|Without)\b"
)

GLOSSARY = tomllib.loads((ROOT / "tests/style/words.toml").read_text())
PHRASES = {re.compile(rf"(?<!\w){phrase}(?!\w)", re.IGNORECASE): term for phrase, term in GLOSSARY["phrases"].items()}
ANY_PHRASE = re.compile("|".join(phrase.pattern for phrase in PHRASES), re.IGNORECASE)


@pytest.fixture(autouse=True)
def interpreter():
    """Nothing runs: these tests read text."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("src/tilewright/")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def tokens(path: Path) -> list[tokenize.TokenInfo]:
    return [*tokenize.generate_tokens(io.StringIO(path.read_text()).readline)]


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield comments with their lines; those on consecutive lines of their own are one."""
    first, last, text = 0, -1, ""
    for token in tokens(path):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        words = token.string.lstrip("#!: ")
        if line == last + 1 and not token.line[:column].strip():
            last, text = line, f"{text} {words}"
        else:
            if text:
                yield first, text
            first, last, text = line, line, words
    if text:
        yield first, text


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """String literals of several words; what an f-string inserts reads {}."""
    inserted = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inserted:
            text = node.value
        else:
            continue
        if " " in text:
            yield node.lineno, text


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        yield line, paragraph
        line += paragraph.count("\n")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix == ".py":
        yield from comments(path)
        yield from strings(parsed(path))
    else:
        keep_lines = GENERATED.sub(lambda block: "\n" * block.group().count("\n"), path.read_text())
        yield from paragraphs(keep_lines)


def report(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.parametrize("path", [*PYTHON, *TEXT, *PAGES, *OTHERS], ids=name_of)
def test_prose_uses_standard_terms(path):
    suspicious = [(line, text) for line, words in prose(path) if ANY_PHRASE.search(text := " ".join(words.split()))]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match.group()!r}; write: {term}"
        for line, text in suspicious
        for phrase, term in PHRASES.items()
        for match in phrase.finditer(text)
    ]
    report(found)


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_identifiers_use_standard_terms(path):
    words = GLOSSARY["names"]
    found = set()
    for token in tokens(path):
        if token.type == tokenize.NAME:
            for word in re.findall(r"[a-z]+|[A-Z][a-z]*", token.string):
                if word.lower() in words:
                    found.add(
                        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}; write: {words[word.lower()]}"
                    )
    report(sorted(found))


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_comments_name_their_subject(path):
    found = [
        f"{path.relative_to(ROOT)}:{line}: comment begins with 'of': {text}"
        for line, text in comments(path)
        if re.match(r"of\b", text)
    ]
    report(found)


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_docstrings_begin_with_a_sentence(path):
    """The first line is a whole sentence or noun phrase, and names what the code does or is."""
    found = []
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = (ast.get_docstring(node) or "").split("\n")[0]
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {first!r}"
        if first and not first.endswith((".", ".)", ".`")):
            found.append(f"{where} does not end with a period")
        if OPENERS.match(first):
            found.append(f"{where} begins with {first.split()[0]!r}")
    report(found)


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_modules_have_a_docstring(path):
    tree = parsed(path)
    assert not tree.body or path.name == "__main__.py" or ast.get_docstring(tree), f"{path.relative_to(ROOT)} has none"


@pytest.mark.parametrize("name", tilewright.__all__)
def test_public_names_have_a_docstring(name):
    assert inspect.getdoc(getattr(tilewright, name)), f"tilewright.{name} has none"


def test_the_glossary_finds_its_phrases_and_spares_good_english():
    def hits(text: str) -> list[str]:
        return [match.group() for phrase in PHRASES for match in phrase.finditer(text)]

    for bad in [
        "at most 49.2 KB of loads on their way an SM",
        "Binds: compute",
        "of nothing everything is right",
        "10 us a call",
        "the fewest clusters that are done as soon as so many",
        "bytes a clock from the L2",
        "all operations unless told.",
        "more blocks an SM",
        "the commands, one a file",
    ]:
        assert hits(bad), bad
    for good in [
        "the bytes each SM loads",
        "16 bytes per thread; each thread loads a row",
        "a kernel launches a block per row, 4 warps a block holds at most",
        "so many that int32 overflows, so many columns that it spills",
        "the elements a program reads",
        "the blocks an SM holds",
    ]:
        assert not hits(good), (good, hits(good))

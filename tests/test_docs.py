"""The pages say what is true: links resolve, commands exist, and functions call torch where the tables say so."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

import tilewright as tw
from tilewright import source
from tilewright.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def interpreter():
    """Override the suite's fixture: the tests of thresholds open the interpreter themselves."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)} links {target}"
        assert not anchor or anchor in anchors(found), f"{name_of(page)} links {target}; there is no such heading"


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name}" in readme, f"README.md does not link docs/{page.name}"


def commands(page: Path) -> Iterator[str]:
    """Yield the `tilewright` commands of a page, in console blocks and in inline code."""
    text = page.read_text()
    for block in re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from re.findall(r"^\$ (tilewright .*?)(?:  +#.*)?$", block, re.MULTILINE)
    yield from (code.replace("\n", " ") for code in re.findall(r"`(tilewright [a-z][^`]*)`", FENCE.sub("", text)))


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the words name and the words after it."""
    found: Any = get_command(app)
    while words and words[0] in getattr(found, "commands", ()):
        found, words = found.commands[words[0]], words[1:]
    if words and hasattr(found, "commands"):
        assert "list" in found.commands, f"no command named {words[0]}"  # a group of commands lists by default
        found = found.commands["list"]
    return found, words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_options_exist(page):
    text = page.read_text()
    for line in commands(page):
        if f"`src/tilewright/cli/{line.split()[1]}.py`:" in text:  # the page adds this command
            continue
        command, words = command_of(shlex.split(line)[1:])
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word) and word != "--help":
                assert word.partition("=")[0] in known, f"{name_of(page)}: `{line}` has an unknown option {word}"


def test_environment_variables_are_documented():
    read = set(re.findall(r"TILEWRIGHT_[A-Z]+", (source.PACKAGE / "settings.py").read_text()))
    page = (ROOT / "docs" / "environment.md").read_text()
    assert read == set(re.findall(r"TILEWRIGHT_[A-Z]+", page))


def test_the_citation_has_the_current_version():
    assert f"version: {tw.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {tw.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_shows_at_most_ten_results_and_none_that_is_stale():
    table = re.search(r"<!-- records: summary.*? -->\n(.*?)<!-- end -->", (ROOT / "README.md").read_text(), re.DOTALL)
    assert table is not None
    rows = [line for line in table[1].splitlines() if line.startswith("| ")][2:]
    assert 0 < len(rows) <= 10
    assert "stale" not in table[1]


def matrix(elements: int) -> torch.Tensor:
    return torch.randn(elements // 1024, 1024)


def normed(function: Callable[..., Any]) -> Callable[[int], Any]:
    return lambda elements: function(matrix(elements), (1024,))


def unary(function: Callable[..., Any]) -> Callable[[int], Any]:
    return lambda elements: function(matrix(elements))


def binary(function: Callable[..., Any]) -> Callable[[int], Any]:
    return lambda elements: function(matrix(elements), matrix(elements))


def reduced(function: Callable[..., Any]) -> Callable[[int], Any]:
    return lambda elements: function(matrix(elements), dim=-1)


REDUCTIONS = (
    "sum",
    "mean",
    "prod",
    "amax",
    "amin",
    "max",
    "min",
    "argmax",
    "argmin",
    "vector_norm",
    "var",
    "logsumexp",
)
CALLS: dict[str, Callable[[int], Any]] = {
    **{name: reduced(getattr(tw, name)) for name in (*REDUCTIONS, "softmax", "log_softmax", "cumsum")},
    **{name: normed(getattr(tw, name)) for name in ("rms_norm", "layer_norm")},
    **{name: unary(getattr(tw, name)) for name in ("relu", "silu", "gelu", "relu_squared")},
    **{name: binary(getattr(tw, name)) for name in ("add", "swiglu", "geglu", "reglu")},
    "add_rms_norm": lambda n: tw.add_rms_norm(matrix(n), matrix(n), (1024,)),
    "add_layer_norm": lambda n: tw.add_layer_norm(matrix(n), matrix(n), (1024,)),
    "masked_softmax": lambda n: tw.masked_softmax(matrix(n)),
    "dot": lambda n: tw.dot(torch.randn(n), torch.randn(n)),
    "unique": lambda n: tw.unique(torch.randint(100, (n,), dtype=torch.uint8)),
    "cross_entropy": lambda n: tw.cross_entropy(matrix(n), torch.zeros(n // 1024, dtype=torch.int64)),
    "matmul": lambda n: tw.matmul(matrix(n), torch.randn(1024, 16)),
    "linear": lambda n: tw.linear(matrix(n), torch.randn(16, 1024), activation="relu"),
    "gated_linear": lambda n: tw.gated_linear(matrix(n), *[torch.randn(16, 1024)] * 2, "relu_squared"),
    "grouped_linear": lambda n: tw.grouped_linear(matrix(n), torch.randn(1, 16, 1024), [n // 1024]),
    "scaled_dot_product_attention": lambda n: tw.scaled_dot_product_attention(*[torch.randn(1, 1, 64, 64)] * 3),
    "decode_attention": lambda n: tw.decode_attention(
        *[torch.randn(1, 1, 1, 64)] * 3, torch.ones(1, dtype=torch.int32)
    ),
    "mla_decode": lambda n: tw.mla_decode(
        torch.randn(1, 1, 1, 576), torch.randn(1, 1, 576), torch.ones(1, dtype=torch.int32)
    ),
    "merge_attention": lambda n: tw.merge_attention(*[torch.randn(4, 64), torch.randn(4)] * 2),
    "attention": lambda n: tw.attention(*[torch.randn(1, 1, 16, 16)] * 3, window=(4, 0)),
    "rope": lambda n: tw.rope(torch.randn(1, 2, 2, 64), None, torch.randn(2, 32), torch.randn(2, 32)),
}
# The optimizer, the low-bit layers and fp8 have tests of their own; 2^26 logits take too long here.
ELSEWHERE = {"AdamW", "linear_cross_entropy", "quantized_linear", "scaled_matmul", "sparse_linear"}


def stated_thresholds() -> Iterator[tuple[str, str]]:
    """Yield the functions of the table in speed.md with the first words of what it says about them."""
    table = (ROOT / "docs" / "speed.md").read_text().partition("| function | our kernel is used |\n|---|---|\n")[2]
    for row in table.partition("\n\n")[0].splitlines():
        _, functions, when, _ = row.split("|")
        yield from ((name, when.strip()) for name in re.findall(r"`(\w+)`", functions))


def test_the_table_of_thresholds_names_every_function():
    tools = {
        "apply",
        "audit",
        "benchmark",
        "check",
        "diff",
        "do_bench",
        "interpret",
        "job",
        "kernel",
        "revert",
        "trace",
    }
    tools |= {"QuantizedWeight", "SparseWeight", "load_quantized", "quantize", "sparsify"}  # run once per weight
    assert {name for name, _ in stated_thresholds()} == set(tw.__all__) - tools
    assert {name for name, _ in stated_thresholds()} == set(CALLS) | ELSEWHERE


def launches(call: Callable[[int], Any], elements: int) -> int:
    with tw.interpret() as run, torch.no_grad():
        call(elements)
    return len(run.launches)


@pytest.mark.parametrize(("name", "when"), [pair for pair in stated_thresholds() if pair[0] in CALLS])
def test_functions_call_torch_where_the_table_says(name, when):
    call = CALLS[name]
    if when.startswith(("never", "only with `bias=`")):
        assert not launches(call, 2**21)
    elif when.startswith("at every size"):
        assert launches(call, 1024)
    else:
        threshold = re.match(r"from 2\^(\d+) (?:elements|logits)", when)
        assert threshold is not None, f"what does '{when}' say about {name}?"
        smallest = 2 ** int(threshold[1])
        assert not launches(call, smallest - 1024)
        assert launches(call, smallest)


def named_files(page: Path) -> Iterator[str]:
    """Yield the files of the repository that a page names in inline code; those that it adds itself are left out."""
    text = page.read_text()
    for name in re.findall(
        r"`((?:src|tests|scripts|docs|examples|requirements|ops|runtime|workbench|worker|cli)/[\w./-]+)`", text
    ):
        if f"`{name}`:\n" not in text and not name.startswith("src/tilewright/runtime/tuned/"):
            yield name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page):
    for name in named_files(page):
        assert (ROOT / name).exists() or (source.PACKAGE / name).exists(), f"{name_of(page)} names {name}"


def samples(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the audits and inspections of a page that need no file it writes, with the output that the page shows."""
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        command, *shown = block.splitlines()
        needs_page = any(not (ROOT / word).exists() for word in command.split() if word.endswith(".py"))
        is_sample = re.match(r"\$ tilewright (audit|inspect) ", command) and shown and not shown[0].startswith("$")
        if is_sample and not needs_page:
            yield command.removeprefix("$ tilewright "), shown


SAMPLES = [(page, *sample) for page in PAGES for sample in samples(page)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command", "shown"), SAMPLES, ids=[command for _, command, _ in SAMPLES])
def test_output_shown_is_what_a_command_prints(page, command, shown):
    """A line "…" stands for any lines, and a line that ends so for any rest."""
    done = subprocess.run(
        [sys.executable, "-m", "tilewright", *shlex.split(command)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = iter(done.stdout.splitlines())
    for line in shown:
        found = line == "…" or any(
            got.startswith(line[:-1]) if line.endswith("…") else got.rstrip() == line for got in printed
        )
        assert found, f"{name_of(page)} shows a line that the command does not print (or not there): {line}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "printed", "code"),
    [
        ("check softmax FILE --quick", "right", 0),
        ("audit softmax FILE", "Moves 1.00x the minimum bytes", 0),
        ("explain softmax FILE", "Bottleneck: ", 1),  # rows of 256 are too short for one program each
    ],
)
def test_the_kernel_of_the_readme_works_without_a_gpu(command, printed, code, tmp_path):
    page = (ROOT / "README.md").read_text()
    found = re.search(r"in `my_softmax.py`:\n\n```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    file = tmp_path / "my_softmax.py"
    file.write_text(found[1])
    words = [str(file) if word == "FILE" else word for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-m", "tilewright", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert printed in done.stdout

"""scripts/generate.py: docs/api.md covers every public name and is up to date."""

import re
from pathlib import Path

import pytest

import tilewright
from tilewright import registry


@pytest.fixture(scope="module")
def script():
    return registry.load_module(Path(__file__).parent.parent / "scripts" / "generate.py")


@pytest.fixture(scope="module")
def page(script):
    return script.api_page(script.read_records())


def test_the_api_page_is_up_to_date(script, page):
    assert script.API.read_text() == page, "run `make pages`"


def test_the_type_stub_is_up_to_date(script):
    assert script.STUB.read_text() == script.stub(), "run `make pages`"


def test_every_public_name_has_an_entry_with_signature_and_docstring(page):
    entries = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=\n##|\Z)", page, re.MULTILINE | re.DOTALL))
    assert sorted(entries) == sorted(tilewright.__all__)
    for name, entry in entries.items():
        code, _, text = entry.removeprefix("```python\n").partition("\n```\n")
        assert code.startswith(f"tilewright.{name}("), name
        assert len(text.split()) > 3, f"{name} has no docstring"


def test_a_changed_docstring_or_signature_changes_the_page(script, page, monkeypatch):
    def softmax(input, dim=None, *, extra: int = 3) -> None:
        """Another text."""

    softmax.__module__ = tilewright.softmax.__module__
    monkeypatch.setattr(tilewright, "softmax", softmax)
    changed = script.api_page([])
    assert "tilewright.softmax(input, dim=None, *, extra: int = 3) -> None\n```\n\nAnother text." in changed
    assert "Another text." not in page


def test_a_long_signature_has_one_argument_per_line(script):
    def call(a: int, b: "list[str]", *args: str, key: float = 0.5, **others: int) -> None: ...

    assert (
        script._signature("call", call)
        == "call(a: int, b: list[str], *args: str, key: float = 0.5, **others: int) -> None"
    )
    lines = script._signature("x" * 90, call).splitlines()
    assert lines[1:] == [
        "    a: int,",
        "    b: list[str],",
        "    *args: str,",
        "    key: float = 0.5,",
        "    **others: int,",
        ") -> None",
    ]


def test_calls_that_run_torch_are_counted(script):
    calls = [{"op": "relu", "median_us": 1.0, "is_torchs": is_torchs} for is_torchs in (True, False, True)]
    assert script._torch_calls("relu", calls) == "Measured calls: 3, of which 2 run torch."
    assert script._torch_calls("relu", calls[:1]) == "Measured calls: 1, of which 1 runs torch."
    assert script._torch_calls("gelu", calls) == ""

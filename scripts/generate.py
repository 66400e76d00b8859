"""Regenerate everything that is derived: the tables of README.md and docs/*.md, docs/api.md and the type stub.

python scripts/generate.py             rewrite the files that are out of date
python scripts/generate.py --check     only list them; exit with status 1 if there are any
"""

import argparse
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tilewright
from tilewright import record, settings, source
from tilewright.report import markdown
from tilewright.report.formatting import provenance

ROOT = Path(__file__).parent.parent
API = ROOT / "docs" / "api.md"
STUB = ROOT / "src" / "tilewright" / "__init__.pyi"  # for type checkers: public names are found at run time
WIDTH = 100  # of a signature on one line
INTRODUCTION = """# API reference

`python scripts/generate.py` writes this page from signatures, docstrings and records; do not edit it.

Operations have the names and arguments of their torch counterparts. They run a kernel of Tilewright's where it is
eligible and wins, and torch elsewhere; "measured calls" counts the recorded calls of each, of all sizes.
"""
OPS = "tilewright.ops."
DECORATORS = ("interpret", "kernel")


def read_records() -> list[dict[str, Any]]:
    return [*record.latest([r for path in settings.record_files() for r in record.read(path).records])]


def api_page(records: list[dict[str, Any]]) -> str:
    """Return docs/api.md: every public name with its signature and docstring."""
    public = {name: getattr(tilewright, name) for name in sorted(tilewright.__all__, key=str.lower)}
    classes = [name for name, found in public.items() if isinstance(found, type)]
    operations = [n for n, found in public.items() if n not in classes and found.__module__.startswith(OPS)]
    others = [name for name in public if name not in (*classes, *operations)]
    groups = {
        "Operations": operations,
        "Workbench functions": [name for name in others if name not in DECORATORS],
        "Decorators and context managers": [name for name in others if name in DECORATORS],
        "Classes": classes,
    }
    timings = [r for r in records if r["kind"] == "timing" and r["kernel"] == source.PUBLIC and not record.is_stale(r)]
    parts = [INTRODUCTION, *provenance("Calls measured on", timings, "torch", "triton"), ""]
    for group, names in groups.items():
        links = textwrap.fill(", ".join(f"[`{name}`](#{name.lower()})" for name in names), 120, break_on_hyphens=False)
        parts += [f"## {group}\n", f"{links}\n", *(_entry(name, public[name], timings) for name in names)]
    return "\n".join(parts)


def stub() -> str:
    """Return the type stub of the package: every public name imported from its module."""
    names = sorted(tilewright._public_names().items(), key=lambda item: item[1])
    imports = "\n".join(f"from {module} import {name} as {name}" for name, module in names)
    return f"{imports}\n\n__version__: str\n"


def _entry(name: str, found: Any, timings: list[dict[str, Any]]) -> str:
    paths = [_torch_calls(name, timings)] if found.__module__.startswith(OPS) else []
    parts = [f"### {name}", f"```python\n{_signature(f'tilewright.{name}', found)}\n```", inspect.getdoc(found), *paths]
    if isinstance(found, type):
        parts += [f"```python\n{_signature(method, fn)}\n```\n\n{inspect.getdoc(fn)}" for method, fn in _methods(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _torch_calls(name: str, timings: list[dict[str, Any]]) -> str:
    """Say how many measured calls of a public function run torch."""
    mine = [r for r in timings if r["op"] == name and r["median_us"]]
    on_torch = sum(bool(r.get("is_torchs")) for r in mine)
    if not mine:
        return ""
    return f"Measured calls: {len(mine)}, of which {on_torch or 'none'} run{'s' if on_torch == 1 else ''} torch."


def _methods(found: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, method in vars(found).items():
        if inspect.isfunction(method) and not name.startswith("_") and method.__doc__:
            yield name, method


def _signature(name: str, found: Callable[..., Any]) -> str:
    """Return the signature as it is written, one argument per line where it is long."""
    signature = inspect.signature(found)
    arguments, kinds = [], [p.kind for p in signature.parameters.values()]
    for number, parameter in enumerate(signature.parameters.values()):
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if is_keyword and parameter.KEYWORD_ONLY not in kinds[:number] and parameter.VAR_POSITIONAL not in kinds:
            arguments.append("*")
        arguments.append(_argument(parameter))
    returned = (
        "" if signature.return_annotation is signature.empty else f" -> {_annotation(signature.return_annotation)}"
    )
    line = f"{name}({', '.join(arguments)}){returned}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returned}"


def _argument(parameter: inspect.Parameter) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = star + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    return (
        text
        if parameter.default is parameter.empty
        else (f"{text} = {parameter.default!r}" if ":" in text else f"{text}={parameter.default!r}")
    )


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def generate() -> dict[Path, str]:
    """Return the current text of every derived file."""
    records = read_records()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = {page: page.read_text() for page in pages if page != API}
    filled = {page: markdown.fill(text, records) for page, text in texts.items() if markdown.BLOCK.search(text)}
    return filled | {API: api_page(records), STUB: stub()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a file is out of date")
    args = parser.parse_args()
    changed = {path: text for path, text in generate().items() if not path.exists() or path.read_text() != text}
    for path, text in changed.items():
        print(f"{path.relative_to(ROOT)}: {'out of date' if args.check else 'written'}")
        if not args.check:
            path.write_text(text)
    sys.exit(1 if changed and args.check else 0)


if __name__ == "__main__":
    main()

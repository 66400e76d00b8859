"""`tilewright report`"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright import settings
from tilewright.cli.shared import one_line, recorded, say_next
from tilewright.errors import BadBlock, CannotRead, CannotWrite, CorruptRecords, FileMissing, NewerRecords, NoTimings


def report(
    records: Annotated[
        list[Path] | None, typer.Argument(metavar="[RECORDS]...", help="Files of JSON lines; all recorded unless told.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the site is to stand.")] = Path("site"),
    fill: Annotated[
        list[Path] | None,
        typer.Option(metavar="PAGE", help="Make the tables of this Markdown page anew instead; may be repeated."),
    ] = None,
) -> None:
    """Build an HTML site from recorded timings: a page an operation, the roofline, and the raw records."""
    with nullcontext(_read(records)) if records else recorded() as found:
        if fill:
            _fill(fill, found)
        elif any(r["kind"] in ("timing", "sweep") for r in found):
            _build(found, out)
        else:
            raise NoTimings(records[0] if records else settings.results_dir() / "timings.jsonl")


def _build(found: list[dict[str, Any]], out: Path) -> None:
    from tilewright.report import site

    try:
        site.build(found, out)
    except OSError as error:
        raise CannotWrite(error.filename or out, error.strerror or one_line(error)) from None
    print(out / "index.html")
    say_next(f"open {out / 'index.html'} in a browser")


def _fill(pages: list[Path], found: list[dict[str, Any]]) -> None:
    from tilewright.report import markdown

    for page in pages:
        if not page.is_file():
            raise FileMissing(page, "a Markdown page")
        try:
            page.write_text(markdown.fill(page.read_text(), found))
        except markdown.Unfillable as error:
            raise BadBlock(page, str(error)) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CannotWrite(page, one_line(error)) from None
        print(f"{page}: made anew")


def _read(paths: list[Path]) -> list[dict[str, Any]]:
    """The newest records of these files."""
    from tilewright.record import latest, read

    found: list[dict[str, Any]] = []
    for path in paths:
        if not path.is_file():
            raise FileMissing(path, "a file of records")
        file = read(path)
        for number in file.torn:
            print(f"tilewright: {path}, line {number} was cut off while written; skipped", file=sys.stderr)
        if file.newer:
            raise NewerRecords(path, file.newer)
        if file.corrupt and not file.records:
            raise CannotRead(path, "none of its lines is a record")
        if file.corrupt:
            raise CorruptRecords(path, file.corrupt)
        found += file.records
    return list(latest(found))

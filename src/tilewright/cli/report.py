"""The command `tilewright report`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright import settings
from tilewright.cli.options import AsJson
from tilewright.cli.shared import newest_records, one_line, read_records, say_next
from tilewright.errors import CannotWrite, FileMissing, InvalidPageBlock, NoTimings
from tilewright.record import TRAIN_STEP


def report(
    records: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RECORDS", help="Files of JSON lines.", show_default="the results folder"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write the site to.")] = Path("site"),
    fill: Annotated[
        list[Path] | None,
        typer.Option(metavar="PAGE", help="Update the tables of this Markdown page instead. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build an HTML site from records: a page per operation, the roofline and the raw data."""
    with nullcontext(_read(records)) if records else newest_records() as found:
        if fill:
            _fill(fill, found, as_json)
        elif any(r["kind"] in ("timing", "sweep", TRAIN_STEP) for r in found):
            _build(found, out, as_json)
        else:
            raise NoTimings(records[0] if records else settings.results_dir() / "timings.jsonl")


def _build(found: list[dict[str, Any]], out: Path, as_json: bool) -> None:
    from tilewright.report import site

    try:
        files = site.build(found, out)
    except OSError as error:
        raise CannotWrite(error.filename or out, error.strerror or one_line(error)) from None
    if as_json:
        for file in files:
            print(json.dumps({"file": str(file), "bytes": file.stat().st_size}))
        return
    print(f"Wrote {len(files)} files to {out}.")
    say_next(f"open {out / 'index.html'} in a browser")


def _fill(pages: list[Path], found: list[dict[str, Any]], as_json: bool) -> None:
    from tilewright.report import markdown

    for page in pages:
        if not page.is_file():
            raise FileMissing(page, "a Markdown page")
        try:
            old = page.read_text()
            new = markdown.fill(old, found)
            page.write_text(new)
        except markdown.BlockError as error:
            raise InvalidPageBlock(page, str(error)) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CannotWrite(page, one_line(error)) from None
        if as_json:
            print(json.dumps({"file": str(page), "changed": new != old}))
        else:
            print(f"{page}: {'updated' if new != old else 'unchanged'}")


def _read(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the newest record of each call in these files."""
    from tilewright.record import latest

    for path in paths:
        if not path.is_file():
            raise FileMissing(path, "a file of records")
    return list(latest([record for path in paths for record in read_records(path)]))

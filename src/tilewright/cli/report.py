"""`tilewright report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.shared import one_line, recorded
from tilewright.errors import BadBlock


def report(
    pages: Annotated[list[Path], typer.Argument(metavar="PAGE...", help="Markdown pages with records blocks.")],
) -> None:
    """Make the tables of Markdown pages anew from the recorded timings."""
    from tilewright.errors import CannotWrite, FileMissing
    from tilewright.report import markdown

    with recorded() as records:
        for page in pages:
            if not page.is_file():
                raise FileMissing(page, "a Markdown page")
            try:
                page.write_text(markdown.fill(page.read_text(), records))
            except markdown.Unfillable as error:
                raise BadBlock(page, str(error)) from None
            except (OSError, UnicodeDecodeError) as error:
                raise CannotWrite(page, one_line(error)) from None
            print(f"{page}: made anew")

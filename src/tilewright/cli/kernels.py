"""The command `tilewright kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.options import Command
from tilewright.cli.shared import require_choice, say_next
from tilewright.errors import CannotWrite

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)


@app.callback(help="Build our layers for Hugging Face's `kernels`.")
def kernels() -> None: ...


@app.command(short_help="Write build/torch-cuda with our layers into a folder.", cls=Command)
def build(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the kernel repository.")],
    backend: Annotated[
        str, typer.Option("--backend", metavar="NAME", help="cuda, rocm, or universal, which loads anywhere.")
    ] = "cuda",
) -> None:
    """Write our layers and everything they need as a build that `kernels.get_local_kernel` loads."""
    from tilewright.workbench.hub import BACKENDS
    from tilewright.workbench.hub import build as write

    require_choice("--backend", backend, BACKENDS)
    try:
        target = write(folder, backend)
    except OSError as error:
        raise CannotWrite(folder, error.strerror or str(error)) from None
    print(f"wrote {sum(path.is_file() for path in target.rglob('*'))} files to {target}")
    say_next(f"kernels.get_local_kernel(Path({str(folder)!r})).layers")

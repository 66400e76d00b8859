"""The command `tilewright mcp`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.arena import PACKAGES
from tilewright.errors import MissingPackage

if TYPE_CHECKING:
    from tilewright.agents.arenas import Arena


def mcp(
    arena: Annotated[
        str | None,
        typer.Option(metavar="URL|DIR", help="Also offer an arena: a server, or a data folder to serve from here."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Let the judges of an arena in a DIR check a few cases only.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, metavar="INTEGER", help="Tool calls that run at once.")] = 2,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", min=1, metavar="SECONDS", help="Time limit of a tool call, after which it is stopped."
        ),
    ] = 600,
) -> None:
    """Serve the workbench to coding agents, by the Model Context Protocol over standard input and output."""
    if not importlib.util.find_spec("mcp"):
        raise MissingPackage("tilewright mcp", "tilewright[mcp]")
    if arena is not None:
        require_arena("--arena")
    from tilewright.agents.pool import Pool
    from tilewright.agents.server import build

    build(Pool(jobs, seconds), _open(arena, quick) if arena is not None else None).run("stdio")


def require_arena(what: str) -> None:
    """Raise unless the packages of an arena are installed."""
    if not all(importlib.util.find_spec(name) for name in PACKAGES):
        raise MissingPackage(what, "tilewright[arena]")


def _open(where: str, quick: bool) -> Arena:
    from tilewright.agents.arenas import Arena

    return Arena(where, is_quick=quick)

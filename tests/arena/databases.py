"""A PostgreSQL server for tests, where one is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = "/usr/lib/postgresql"  # where Debian keeps the programs that only the server needs
UNPRIVILEGED = "nobody"  # initdb refuses to run as root


def _program(name: str) -> str | None:
    versions = sorted(Path(FOLDERS).glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(versions[-1]) if versions else None)


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """Run a server, and yield the URL of an empty database. Skip the test where none is installed."""
    initdb, pg_ctl = _program("initdb"), _program("pg_ctl")
    if not initdb or not pg_ctl or importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs PostgreSQL's server and psycopg")
    folder = Path(tempfile.mkdtemp(prefix="tilewright-postgresql-"))  # pytest's folders are closed to other users
    options: dict[str, str] = {}
    if os.getuid() == 0:
        shutil.chown(folder, UNPRIVILEGED)
        options["user"] = UNPRIVILEGED

    def run(*command: str) -> None:
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, **options)  # type: ignore[call-overload]

    data = str(folder / "data")
    run(initdb, "-D", data, "-U", "arena", "--auth", "trust", "--no-sync", "--encoding", "UTF8")
    server = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
    run(pg_ctl, "-D", data, "-w", "-l", str(folder / "log"), "-o", server, "start")
    try:
        yield f"postgresql+psycopg://arena@/postgres?host={folder}"
    finally:
        run(pg_ctl, "-D", data, "-w", "-m", "immediate", "stop")
        shutil.rmtree(folder)

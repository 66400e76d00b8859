"""The server of an arena: one process, one database, one data folder."""

from __future__ import annotations

import contextlib
import fcntl
import re
import resource
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import uvicorn
from sqlalchemy.exc import OperationalError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from tilewright import sandbox
from tilewright.arena import api, archive, pages, web
from tilewright.arena.auth import LOCAL_HOSTS
from tilewright.arena.errors import ArenaExposed, ArenaInUse, NoTokens, PasswordExposed, PortInUse
from tilewright.arena.service import Arena
from tilewright.arena.store import LEASE_SECONDS, Store, sqlite_url
from tilewright.errors import CannotWrite, TilewrightError

STATIC = Path(__file__).parent / "static"
REQUEST_SECONDS = 60.0  # in which a request has to arrive
OTHER_FILES = 256  # that this process opens beside its connections
PASSWORD = re.compile(r"[^/]*//[^/@]*:[^/@]")  # begins the URL of a database


class Protocol(H11Protocol):
    """HTTP that ends connections whose request does not arrive in time, and refuses more than it has files for.

    Otherwise slow clients would take every file that this process may open.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.abort()
        self.loop.call_later(REQUEST_SECONDS, self._end_if_slow, None)

    def _end_if_slow(self, last: RequestResponseCycle | None) -> None:
        """Close if no request has begun since the last one, and none is being answered."""
        request: RequestResponseCycle | None = self.cycle
        is_waiting = request is None or request.response_complete or request.more_body
        if is_waiting and request is last:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(REQUEST_SECONDS, self._end_if_slow, request)


def max_connections() -> int:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(files // 2, files - OTHER_FILES)


def application(arena: Arena) -> Starlette:
    """Return the ASGI application of an arena."""
    routes = [*api.ROUTES, *pages.ROUTES, Mount("/static", StaticFiles(directory=STATIC))]
    answered = (TilewrightError, ClientDisconnect, HTTPException, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(answered, web.answer_error)
    handlers |= dict.fromkeys((OperationalError, OSError), web.answer_storage_error)
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(web.Gate, arena=arena)])
    app.state.arena, app.state.watchers, app.state.pages = arena, api.Watchers(), pages
    arena.store.on_change = app.state.watchers.notify
    return app


def open_store(folder: Path, url: str | None = None, lease_seconds: float = LEASE_SECONDS) -> Store:
    """Open the database of a data folder, or the one at a URL."""
    _make(folder)
    return Store(url or sqlite_url(folder.resolve()), lease_seconds=lease_seconds)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # other users must not read unpublished code
    except OSError as error:
        raise CannotWrite(folder, error.strerror or str(error)) from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Hold the lock of a data folder: Linux releases it when the process ends, however it ends."""
    _make(folder)
    try:
        lock = (folder / "server.lock").open("a")
    except OSError as error:
        raise CannotWrite(folder, error.strerror or str(error)) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ArenaInUse(folder) from None
        yield lock


def serve(
    folder: Path,
    host: str,
    port: int,
    workers: int,
    url: str | None = None,
    lease_seconds: float = LEASE_SECONDS,
    worker_options: Sequence[str] = (),
) -> None:
    """Serve until interrupted. `workers` judges of this machine are started beside the server."""
    if workers:
        _require_hidden(folder.resolve())
        if url and PASSWORD.match(url):
            raise PasswordExposed
    with locked(folder):
        store, token = open_store(folder, url, lease_seconds), secrets.token_urlsafe(32)
        arena = Arena(store, token)
        if host not in LOCAL_HOSTS and not arena.guard.has_tokens:
            raise NoTokens(host)
        with store.held(), _listen(host, port) as listener, _workers(listener, workers, token, worker_options):
            name = f"[{host}]" if ":" in host and "[" not in host else host
            print(f"The arena is at http://{name}:{listener.getsockname()[1]} (data in {folder})", flush=True)
            threading.Thread(target=archive.seeds, daemon=True).start()  # before the first reader waits for it
            options: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
            uvicorn.Server(uvicorn.Config(application(arena), http=Protocol, **options)).run(sockets=[listener])
        store.close()


def _require_hidden(folder: Path) -> None:
    """Raise if the sandbox lets submissions read the data folder, as it does below /usr, /opt and Python's folders."""
    readable = {*sandbox.runtime()} - {Path.cwd()}  # which `python -m` adds, but not for a judge
    if exposed := next((path for path in sorted(readable) if folder.is_relative_to(path.resolve())), None):
        raise ArenaExposed(folder, exposed)


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), port))
        except OSError as error:
            raise PortInUse(host, port, error.strerror or str(error)) from None
        listener.listen(512)
        yield listener


@contextlib.contextmanager
def _workers(listener: socket.socket, count: int, token: str, options: Sequence[str]) -> Iterator[None]:
    """Run judges of this machine as child processes; one that ends is started again."""
    address, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, f"[{address}]" if ":" in address else address)
    ending = threading.Event()

    def run(number: int) -> None:
        command = [sys.executable, "-m", "tilewright", "arena", "worker", "--server", f"http://{host}:{port}"]
        command += ["--token", "-", "--name", f"{socket.gethostname()} {number + 1}", *options]
        while not ending.is_set():
            child = subprocess.Popen(command, stdin=subprocess.PIPE)
            assert child.stdin
            child.stdin.write(f"{token}\n".encode())
            child.stdin.flush()  # it stays open: a worker ends when it is closed
            while child.poll() is None and not ending.wait(0.2):
                pass
            child.stdin.close()
            if child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(10)
            child.kill()
            child.wait()
            ending.wait(1.0)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join()

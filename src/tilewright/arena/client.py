"""A client of an arena's JSON API, for the command line, for workers and for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tilewright.arena.errors import ArenaNotReachable, ArenaRefused, BadSubmission, LeaseLost
from tilewright.arena.service import decoded
from tilewright.errors import FileMissing

DEFAULT_SERVER = "http://127.0.0.1:8640"
SECONDS = 30.0
MAX_READ = 2**20  # bytes of a file; the server's limit is lower
FINISHED = ("ranked", "refused")


class Client:
    def __init__(self, server: str = DEFAULT_SERVER, token: str = ""):
        self.server = server.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=self.server, headers=headers, timeout=SECONDS, trust_env=False)
        except (httpx.InvalidURL, ValueError) as error:
            raise ArenaNotReachable(server, str(error)) from None

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def problems(self) -> list[dict[str, Any]]:
        return self.request("GET", "/api/problems")["problems"]

    def problem(self, name: str) -> dict[str, Any]:
        return self.request("GET", f"/api/problems/{quote(name, safe='')}")

    def submit(
        self, problem: str, code: str, name: str = "", derived_from: int | None = None, publish: bool = False
    ) -> dict[str, Any]:
        """Submit code and return its number and states."""
        body = {"name": name, "code": code, "derived_from": derived_from, "publish": publish}
        return self.request("POST", f"/api/problems/{quote(problem, safe='')}/submissions", body)

    def submission(self, number: int) -> dict[str, Any]:
        return self.request("GET", f"/api/submissions/{number}")

    def board(self, problem: str, board: str, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        address = f"/api/problems/{quote(problem, safe='')}/boards/{quote(board, safe='')}"
        return self.request("GET", f"{address}?limit={limit}&offset={offset}")

    def archive(self, **query: Any) -> list[dict[str, Any]]:
        """Search the archive: by `problem`, `technique`, `min_share` and words `q`."""
        given = "&".join(f"{key}={quote(str(value), safe='')}" for key, value in query.items() if value is not None)
        return self.request("GET", f"/api/archive?{given}")["kernels"]

    def states(self, number: int, seconds: float | None = None) -> Iterator[list[dict[str, Any]]]:
        """Yield the states of a submission whenever they change, until it is finished or the time is over."""
        deadline = time.monotonic() + seconds if seconds is not None else None
        seen = None
        while True:
            jobs = self.submission(number)["jobs"]
            states = [{key: job[key] for key in ("board", "state", "reason")} for job in jobs]
            if states != seen:
                yield states
                seen = states
            if all(job["state"] in FINISHED for job in states) or (deadline and time.monotonic() > deadline):
                return
            time.sleep(0.5)

    def request(self, method: str, address: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request; raise ArenaRefused with the server's line, or ArenaNotReachable."""
        try:
            answer = self._http.request(method, address, json=body if method == "POST" else None)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ArenaNotReachable(self.server, str(error) or type(error).__name__) from None
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ArenaNotReachable(self.server, f"it answered with status {answer.status_code} and no JSON")
        if answer.status_code == 409 and "/jobs/" in address:
            raise LeaseLost(int(address.split("/")[3]))
        if answer.status_code >= 400:
            raise ArenaRefused(str(content.get("error", f"status {answer.status_code}")), answer.status_code)
        return content

    def download(self, address: str) -> Iterator[bytes]:
        """Yield the parts of a file."""
        try:
            with self._http.stream("GET", address) as answer:
                if answer.status_code >= 400:
                    content = json.loads(answer.read())
                    raise ArenaRefused(content["error"], answer.status_code)
                yield from answer.iter_bytes()
        except httpx.HTTPError as error:
            raise ArenaNotReachable(self.server, str(error) or type(error).__name__) from None


def read_code(path: Path) -> str:
    """Return the code in a file, after the checks that the server makes."""
    if not path.is_file():
        raise FileMissing(path)
    if path.suffix != ".py":
        raise BadSubmission(f"the name of {path} does not end in .py")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_READ)
    except OSError as error:
        raise BadSubmission(f"{path} cannot be read ({error.strerror})") from None
    if len(data) == MAX_READ:
        raise BadSubmission(f"{path} has {path.stat().st_size} bytes, which is too large")
    return decoded(data)

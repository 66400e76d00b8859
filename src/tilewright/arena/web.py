"""HTTP of an arena: who is asking, what may be asked, and answers to errors in one line."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import exc
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewright.arena.auth import LOCAL_HOSTS, SESSION_DAYS
from tilewright.arena.errors import (
    ArenaRefused,
    BadSubmission,
    LeaseLost,
    NotAllowed,
    ProblemClosed,
    TooManyRequests,
    UnknownArchived,
    UnknownBoard,
    UnknownProblem,
    UnknownSubmission,
)
from tilewright.arena.service import Arena
from tilewright.arena.store import Row
from tilewright.errors import TilewrightError

COOKIE = "arena"
log = logging.getLogger("uvicorn.error")
MAX_BODY = {"default": 2**20, "result": 2**24}  # bytes
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATUS = {
    NotAllowed: 403,
    UnknownProblem: 404,
    UnknownArchived: 404,
    UnknownBoard: 404,
    UnknownSubmission: 404,
    LeaseLost: 409,
    ProblemClosed: 409,
    TooManyRequests: 429,
    BadSubmission: 400,
}
KINDS = {str: "a string", int: "an integer", bool: "true or false", dict: "an object"}
DISK_FULL = "the arena's disk is full, and nothing was stored; try again later"


def arena(request: Request) -> Arena:
    return request.app.state.arena


async def account(request: Request) -> Row | None:
    """Return the account of a request: of its token, or of its session."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip() if scheme.lower() == "bearer" else ""
    found = await run_in_threadpool(arena(request).guard.account, token, request.cookies.get(COOKIE, ""))
    if token and found is None:
        raise ArenaRefused("this token is not valid; ask the administrator for another", 401)
    return found


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await run_in_threadpool(function, *args, **kwargs)


async def json_body(request: Request) -> dict[str, Any]:
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise ArenaRefused("the request needs the content type application/json", 415)
    try:
        found = json.loads(await request.body(), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ArenaRefused("the request is not a JSON object")
    return found


def _finite(text: str) -> float:
    """Return a number, or raise for one that JSON cannot express: it could be stored, but never be sent."""
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def field(body: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return a field of a request; raise if it has another type, or if it is missing and has no default."""
    value = body.get(name)
    if value is None:
        if default is None:
            raise ArenaRefused(f"the field '{name}' is missing")
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ArenaRefused(f"the field '{name}' is not {KINDS[kind]}")
    return value


def number(text: str, what: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise ArenaRefused(f"'{text[:40]}' is not the number of a {what}", 404)
    return int(text)


def new_session() -> str:
    return secrets.token_urlsafe(32)


def set_cookie(request: Request, response: Response, session: str) -> None:
    is_https = request.url.scheme == "https"
    # Not "strict": a page reached by a link from another site would not get the cookie, and would replace it.
    response.set_cookie(COOKIE, session, httponly=True, samesite="lax", secure=is_https, max_age=SESSION_DAYS * 86400)


def explain(error: Exception) -> tuple[int, str]:
    """Return the status and the line that answer an error."""
    if isinstance(error, ArenaRefused):
        return error.status, str(error)
    if isinstance(error, TilewrightError):
        return STATUS.get(type(error), 400), str(error)
    if isinstance(error, HTTPException):
        return error.status_code, {404: "there is no such page", 405: "this address takes another method"}.get(
            error.status_code, error.detail
        )
    if isinstance(error, ClientDisconnect):
        return 499, "the client has disconnected, and nothing was stored"
    if isinstance(error, exc.OperationalError | OSError) and "full" in str(error).lower():
        return 507, DISK_FULL
    return 500, f"the server failed ({type(error).__name__}); nothing was stored"


async def answer_error(request: Request, error: Exception) -> Response:
    status, line = explain(error)
    headers = {"Retry-After": str(max(1, round(error.seconds)))} if isinstance(error, TooManyRequests) else None
    if request.url.path.startswith("/api/") or "pages" not in request.app.state._state:
        return JSONResponse({"error": line}, status, headers)
    page = await request.app.state.pages.error(request, status, line)
    page.headers.update(headers or {})
    return page


async def answer_storage_error(request: Request, error: Exception) -> Response:
    """Answer, and log in one line, that the disk is full: workers ask every few seconds. Raise any other error."""
    if explain(error)[1] != DISK_FULL:
        raise error
    log.warning(DISK_FULL)
    return await answer_error(request, error)


class Gate:
    """Refuses requests by their headers, before a body is read, and adds security headers to every answer."""

    def __init__(self, app: ASGIApp, arena: Arena):
        self._app, self._arena = app, arena

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                added = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message["headers"], *((k, v) for k, v in added if k not in present)]
            await send(message)

        request = Request(scope, receive)
        if refusal := await run_in_threadpool(self._refusal, request):
            status, line = refusal
            answer = await answer_error(request, ArenaRefused(line, status))
            answer.headers["Connection"] = "close"
            await _answer_before_the_body(answer, scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not _is_local(host) and not self._arena.guard.has_tokens:
            return 403, "this arena has no tokens, so it answers on localhost only"
        if request.method not in ("POST", "PUT", "DELETE", "PATCH"):
            return None
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, "a page of another site sent this request"
        length = request.headers.get("content-length", "")
        if not length.isdecimal():
            return 411, "the request needs a Content-Length"
        limit = MAX_BODY["result" if request.url.path.endswith("/result") else "default"]
        if int(length) > limit:
            return 413, f"the request has {int(length)} bytes, and the limit is {limit}; submit one Python file"
        return None


async def _answer_before_the_body(answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, and drop the body. If the connection closed under it, most clients would not read the answer."""

    async def send_unfinished(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await answer(scope, receive, send_unfinished)
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.body", "body": b""})


def _is_local(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in LOCAL_HOSTS
    except ValueError:  # not an address
        return False

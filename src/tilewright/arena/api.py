"""The JSON API of an arena: problems, submissions, boards and the archive for anyone, jobs for workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tilewright.arena import archive, exchange, problems
from tilewright.arena.board import PAGE
from tilewright.arena.errors import ArenaRefused, TooManyRequests, UnknownFormat
from tilewright.arena.service import Arena
from tilewright.arena.store import Row
from tilewright.arena.tables import FINISHED
from tilewright.arena.web import account, arena, call, field, json_body, number

PUBLIC = ("name", "kind", "description", "cases", "dtype", "boards", "rule", "threshold", "deadline", "private")
MAX_WATCHERS = 500
KEEP_ALIVE_SECONDS = 15.0


async def list_problems(request: Request) -> Response:
    found = await call(arena(request).store.problems, await account(request))
    return JSONResponse({"problems": [{key: one[key] for key in PUBLIC} for one in found]})


async def show_problem(request: Request) -> Response:
    found = await call(arena(request).store.problem, request.path_params["name"], await account(request))
    statement = await call(problems.statement, found)
    more = {"entry_point": problems.entry_point(found).name, "statement": statement}
    return JSONResponse({key: found[key] for key in PUBLIC} | more)


async def submit(request: Request) -> Response:
    who, body = await account(request), await json_body(request)
    done = await call(
        arena(request).submit,
        who,
        request.path_params["name"],
        field(body, "name", str, ""),
        field(body, "code", str).encode("utf-8", "surrogatepass"),
        derived_from=field(body, "derived_from", int) if body.get("derived_from") is not None else None,
        published=field(body, "publish", bool, False),
    )
    return JSONResponse(done | {"url": f"/submissions/{done['id']}"}, 201 if done["is_new"] else 200)


async def show_submission(request: Request) -> Response:
    wanted = number(request.path_params["id"], "submission")
    return JSONResponse(await call(arena(request).submission, await account(request), wanted))


async def watch(request: Request) -> Response:
    """Send the states of a submission as server-sent events until it is finished."""
    wanted = number(request.path_params["id"], "submission")
    await call(arena(request).submission, await account(request), wanted)
    watchers: Watchers = request.app.state.watchers
    if watchers.count >= MAX_WATCHERS:
        raise TooManyRequests("watchers", KEEP_ALIVE_SECONDS)
    return StreamingResponse(_events(request, watchers, wanted), media_type="text/event-stream")


async def _events(request: Request, watchers: Watchers, wanted: int) -> AsyncIterator[str]:
    store, sent = arena(request).store, None
    with watchers.watching(wanted) as changed:
        while True:
            changed.clear()
            states = await call(store.states, wanted)
            public = [{key: job.get(key) for key in ("board", "state", "ahead")} for job in states]
            if public != sent:
                yield f"data: {json.dumps(public)}\n\n"
                sent = public
            if all(job["state"] in FINISHED for job in states):
                return
            try:
                await asyncio.wait_for(changed.wait(), KEEP_ALIVE_SECONDS)
            except asyncio.TimeoutError:
                yield ": still here\n\n"


class Watchers:
    """Wakes the watchers of a submission when its state changes, from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[int, set[asyncio.Event]] = {}

    @property
    def count(self) -> int:
        return sum(map(len, self._events.values()))

    @contextlib.contextmanager
    def watching(self, submission: int) -> Any:
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        self._events.setdefault(submission, set()).add(event)
        try:
            yield event
        finally:
            self._events[submission].discard(event)
            if not self._events[submission]:
                del self._events[submission]

    def notify(self, submission: int) -> None:
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, submission)

    def _wake(self, submission: int) -> None:
        for event in self._events.get(submission, ()):
            event.set()


async def show_board(request: Request) -> Response:
    service, who = arena(request), await account(request)
    problem = await call(service.store.problem, request.path_params["name"], who)
    board = service.boards.require(problem, request.path_params["board"])
    first = number(request.query_params.get("offset", "0"), "row")
    count = min(number(request.query_params.get("limit", str(PAGE)), "row"), 1000)
    ranked = await call(service.boards.ranked, problem, board)
    rows = [one.entry | {"rank": one.rank or None, "is_tied": one.is_tied} for one in ranked[first : first + count]]
    for row in rows:
        del row["problem"], row["job"]
    return JSONResponse({"problem": problem["name"], "board": board, "entries": rows, "total": len(ranked)})


async def search_archive(request: Request) -> Response:
    found = await call(_search, arena(request), await account(request), request.query_params)
    return JSONResponse({"kernels": found[: archive.LIMIT], "total": len(found)})


def _search(service: Arena, who: Row | None, query: Mapping[str, str]) -> list[dict[str, Any]]:
    try:
        share = float(query.get("min_share") or 0.0)
    except ValueError:
        raise ArenaRefused("min_share is not a number") from None
    options = {"problem": query.get("problem", ""), "technique": query.get("technique", "")}
    return archive.search(service, who, min_share=share, words=query.get("q", ""), **options)


async def show_archived(request: Request) -> Response:
    wanted, board = request.path_params["id"], request.query_params.get("board", "")
    return JSONResponse(await call(archive.kernel, arena(request), await account(request), wanted, board))


async def export_archive(request: Request) -> Response:
    service, who = arena(request), await account(request)
    form = request.query_params.get("format", "jsonl")
    kernels = archive.everything(service, who)
    if form == "jsonl":
        return StreamingResponse(archive.as_json_lines(kernels), media_type="application/x-ndjson")
    if form != "parquet":
        raise UnknownFormat(form, ("jsonl", "parquet"))
    return Response(await call(archive.as_parquet, kernels), media_type="application/vnd.apache.parquet")


async def export_board(request: Request) -> Response:
    service, who = arena(request), await account(request)
    problem = await call(service.store.problem, request.path_params["name"], who)
    board = service.boards.require(problem, request.path_params["board"])
    form = request.query_params.get("format", "jsonl")
    parts = await call(exchange.export, service, problem, board, form)
    return StreamingResponse(parts, media_type=exchange.FORMATS[form])


async def lease(request: Request) -> Response:
    who, body = await account(request), await json_body(request)
    gpu = body.get("gpu")
    job = await call(arena(request).lease, who, field(body, "worker", str, "worker"), gpu if gpu else None)
    return JSONResponse({"job": job})


async def renew(request: Request) -> Response:
    who, body, job = await account(request), await json_body(request), number(request.path_params["id"], "job")
    state = field(body, "state", str) if body.get("state") else None
    await call(arena(request).report, who, job, field(body, "lease", str), state)
    return JSONResponse({})


async def give_back(request: Request) -> Response:
    who, body, job = await account(request), await json_body(request), number(request.path_params["id"], "job")
    reason, counts = field(body, "reason", str, ""), field(body, "counts", bool, True)
    await call(arena(request).give_back, who, job, field(body, "lease", str), reason, counts)
    return JSONResponse({})


async def finish(request: Request) -> Response:
    who, body, job = await account(request), await json_body(request), number(request.path_params["id"], "job")
    state = await call(arena(request).finish, who, job, field(body, "lease", str), field(body, "result", dict))
    return JSONResponse({"state": state})


async def status(request: Request) -> Response:
    return JSONResponse({"jobs": await call(arena(request).store.queue_length)})


ROUTES = [
    Route("/api/problems", list_problems),
    Route("/api/problems/{name}", show_problem),
    Route("/api/problems/{name}/submissions", submit, methods=["POST"]),
    Route("/api/problems/{name}/boards/{board}", show_board),
    *(Route(f"{start}/problems/{{name}}/boards/{{board}}/export", export_board) for start in ("", "/api")),
    Route("/api/archive", search_archive),
    *(Route(f"{start}/archive/export", export_archive) for start in ("", "/api")),
    Route("/api/archive/{id}", show_archived),
    Route("/api/submissions/{id}", show_submission),
    Route("/api/submissions/{id}/events", watch),
    Route("/api/jobs/lease", lease, methods=["POST"]),
    Route("/api/jobs/{id}/renew", renew, methods=["POST"]),
    Route("/api/jobs/{id}/back", give_back, methods=["POST"]),
    Route("/api/jobs/{id}/result", finish, methods=["POST"]),
    Route("/api/status", status),
]

"""The web pages of an arena. Jinja escapes everything that a template inserts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2
import sqlalchemy as sa
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tilewright import source
from tilewright.arena import archive, problems
from tilewright.arena import tables as t
from tilewright.arena.board import PAGE, chart
from tilewright.arena.errors import ArenaRefused, TooManyRequests
from tilewright.arena.service import TECHNIQUES, is_closed
from tilewright.arena.web import COOKIE, account, arena, call, new_session, number, set_cookie

FOLDER = Path(__file__).parent
SITE_CSS = FOLDER.parent / "report" / "site" / "page.css"
RECENT = 20
RULES = {
    "geomean": "geometric mean of the times",
    "share": "share of the ceiling",
    "fast_p": "share of the cases more than {p:g} times faster than eager",
}


@functools.cache
def _templates() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(FOLDER / "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.ChainableUndefined)
    environment.filters |= {"us": _microseconds, "share": _share, "times": _times, "day": lambda date: date[:10]}
    environment.filters["minute"] = lambda date: t.parse_date(date).strftime("%Y-%m-%d %H:%M UTC")
    environment.filters |= {"figure": _figure, "sentence": lambda text: text[:1].upper() + text[1:]}
    return environment


async def render(request: Request, name: str, status: int = 200, **values: Any) -> Response:
    """Render a template with the account, and with a session whose forms it may post."""
    who, session = values.pop("who", None), request.cookies.get(COOKIE, "")
    given = session or new_session()
    values |= {
        "who": who,
        "has_tokens": await call(lambda: arena(request).guard.has_tokens),
        "form_token": arena(request).guard.form_token(given),
        "path": request.url.path,
    }
    text = await call(lambda: _templates().get_template(name).render(values))
    response = HTMLResponse(text, status)
    if not session and status == 200:  # an error answers a form of another site, too, which came without the cookie
        set_cookie(request, response, given)
    return response


async def error(request: Request, status: int, line: str) -> Response:
    who = await call(arena(request).guard.account, "", request.cookies.get(COOKIE, ""))
    return await render(request, "error.html", status, who=who, line=line, code=status)


async def index(request: Request) -> Response:
    who, service = await account(request), arena(request)
    found = await call(service.store.problems, who)
    rows = [{"problem": one, "boards": [await _board_summary(request, one, b) for b in one["boards"]]} for one in found]
    jobs = await call(service.store.queue_length)
    recent = await call(_recent, request, [one["id"] for one in found])
    return await render(request, "index.html", who=who, rows=rows, jobs=jobs, recent=recent)


async def problem(request: Request) -> Response:
    who, service = await account(request), arena(request)
    found = await call(service.store.problem, request.path_params["name"], who)
    boards = [await _board_summary(request, found, board) for board in found["boards"]]
    statement = await call(problems.statement, found)
    values = {"problem": found, "rule": _rule(found), "boards": boards, "statement": statement}
    values["is_closed"] = is_closed(found)
    values |= {"kind": problems.KINDS[found["kind"]], "entry": problems.entry_point(found)}
    return await render(request, "problem.html", who=who, **values)


async def submit(request: Request) -> Response:
    who, form = await account(request), await _own_form(request)
    given = form.get("file")
    name, data = given if isinstance(given, tuple) and given[0] else ("", str(form.get("code", "")).encode())
    parent = str(form.get("derived_from", "")).strip().lstrip("#")
    done = await call(
        arena(request).submit,
        who,
        request.path_params["name"],
        str(form.get("name", "")).strip() or name,
        data,
        derived_from=number(parent, "submission") if parent else None,
        published=form.get("publish") == "yes",
    )
    return RedirectResponse(f"/submissions/{done['id']}", 303)


async def submission(request: Request) -> Response:
    who, service = await account(request), arena(request)
    wanted = number(request.path_params["id"], "submission")
    found = await call(service.submission, who, wanted)
    states = {job["id"]: job for job in await call(service.store.states, wanted)}
    for job in found["jobs"]:
        job["ahead"] = states[job["id"]].get("ahead")
    children = await call(_children, request, wanted)
    is_live = any(job["state"] not in t.FINISHED for job in found["jobs"])
    is_ranked = any(job["state"] == t.RANKED for job in found["jobs"])
    values = {"submission": found, "children": children, "is_live": is_live, "is_ranked": is_ranked}
    return await render(request, "submission.html", who=who, **values)


async def publish(request: Request) -> Response:
    who, form = await account(request), await _own_form(request)
    wanted = number(request.path_params["id"], "submission")
    await call(arena(request).publish, who, wanted, form.get("publish") == "yes")
    return RedirectResponse(f"/submissions/{wanted}", 303)


async def board(request: Request) -> Response:
    who, service = await account(request), arena(request)
    found = await call(service.store.problem, request.path_params["name"], who)
    name = service.boards.require(found, request.path_params["board"])
    ranked = await call(service.boards.ranked, found, name)
    history = await call(service.boards.history, found, name)
    pages = max(1, -(-len(ranked) // PAGE))
    page = min(max(1, number(request.query_params.get("page", "1"), "page")), pages)
    shown = ranked[(page - 1) * PAGE : page * PAGE]
    published = await call(_published, request, [one.entry["submission"] for one in shown])
    values = {"problem": found, "board": name, "rule": _rule(found), "ranked": shown, "total": len(ranked)}
    values |= {"history": history, "chart": chart(history, t.now()), "published": published}
    values |= {"page": page, "pages": pages}
    values["gpu"] = problems.Board.parse(name)
    return await render(request, "board.html", who=who, **values)


async def show_archive(request: Request) -> Response:
    who, given = await account(request), request.query_params
    percent = given.get("min_share", "").strip()
    query = {"problem": given.get("problem", ""), "technique": given.get("technique", "")}
    found = await call(
        archive.search, arena(request), who, min_share=_percent(percent), words=given.get("q", ""), **query
    )
    names = sorted({one["name"] for one in await call(arena(request).store.problems, who)} | {*source.op_files()})
    values = {"kernels": found[: archive.LIMIT], "total": len(found), "names": names, "techniques": [*TECHNIQUES]}
    values["query"] = query | {"min_share": percent, "q": given.get("q", "")}
    return await render(request, "archive.html", who=who, **values)


async def show_kernel(request: Request) -> Response:
    who, board = await account(request), request.query_params.get("board", "")
    found = await call(archive.kernel, arena(request), who, request.path_params["id"], board)
    return await render(request, "kernel.html", who=who, kernel=found)


def _percent(text: str) -> float:
    try:
        return float(text or 0.0) / 100
    except ValueError:
        raise ArenaRefused(f"'{text[:40]}' is not a number") from None


async def login(request: Request) -> Response:
    if request.method == "GET":
        return await render(request, "login.html", who=await account(request))
    form = await _own_form(request)
    address = request.client.host if request.client else ""
    if wait := arena(request).login_limit.wait_seconds(address):
        raise TooManyRequests("attempts to log in", wait)
    session = await call(arena(request).guard.log_in, str(form.get("token", "")).strip())
    if session is None:
        raise ArenaRefused("this token is not valid; ask the administrator for another", 401)
    response = RedirectResponse("/", 303)
    set_cookie(request, response, session)
    return response


async def logout(request: Request) -> Response:
    await _own_form(request)
    await call(arena(request).guard.log_out, request.cookies.get(COOKIE, ""))
    response = RedirectResponse("/", 303)
    response.delete_cookie(COOKIE)
    return response


async def css(request: Request) -> Response:
    text = SITE_CSS.read_text(encoding="utf-8") + (FOLDER / "static" / "arena.css").read_text(encoding="utf-8")
    return Response(text, media_type="text/css", headers={"Cache-Control": "max-age=3600"})


async def _own_form(request: Request) -> dict[str, str | tuple[str, bytes]]:
    """Return a posted form, if a page of this session sent it; a file as its name and content."""
    async with request.form(max_files=1, max_fields=10, max_part_size=2**20) as form:
        found: dict[str, str | tuple[str, bytes]] = {}
        for name, value in form.items():
            is_file = isinstance(value, UploadFile)
            found[name] = (value.filename or "", await value.read()) if is_file else str(value)
    if not arena(request).guard.is_own_form(request.cookies.get(COOKIE, ""), str(found.get("form_token", ""))):
        raise ArenaRefused("this form has expired; load the page again", 403)
    return found


async def _board_summary(request: Request, found: dict[str, Any], name: str) -> dict[str, Any]:
    boards = arena(request).boards
    ranked = await call(boards.ranked, found, name)
    return {"name": name, "count": len(ranked), "leader": await call(boards.leader, found, name)}


def _recent(request: Request, visible: list[int]) -> list[dict[str, Any]]:
    query = sa.select(t.jobs.c.submission, t.jobs.c.board, t.jobs.c.state, t.jobs.c.changed)
    query = query.add_columns(t.submissions.c.name, t.submissions.c.author, t.problems.c.name.label("problem"))
    query = query.join(t.submissions, t.submissions.c.id == t.jobs.c.submission)
    query = query.join(t.problems, t.problems.c.id == t.jobs.c.problem).where(t.jobs.c.problem.in_(visible))
    return arena(request).store.rows(query.order_by(t.jobs.c.id.desc()).limit(RECENT))


def _children(request: Request, number: int) -> list[int]:
    query = sa.select(t.submissions.c.id).where(t.submissions.c.derived_from == number)
    return [row["id"] for row in arena(request).store.rows(query.order_by(t.submissions.c.id).limit(50))]


def _published(request: Request, numbers: list[int | None]) -> set[int]:
    wanted = [number for number in numbers if number]
    query = sa.select(t.submissions.c.id).where(t.submissions.c.id.in_(wanted), t.submissions.c.published)
    return {row["id"] for row in arena(request).store.rows(query)}


def _rule(found: dict[str, Any]) -> str:
    return RULES[found["rule"]].format(p=found["threshold"])


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _figure(value: object) -> str:
    """Return a number as text, or nothing for any other answer that a submission's process may have given."""
    return f"{value:.3g}" if isinstance(value, int | float) else ""


ROUTES = [
    Route("/", index),
    Route("/problems/{name}", problem),
    Route("/problems/{name}/submit", submit, methods=["POST"]),
    Route("/problems/{name}/boards/{board}", board),
    Route("/submissions/{id}", submission),
    Route("/submissions/{id}/publish", publish, methods=["POST"]),
    Route("/archive", show_archive),
    Route("/archive/{id}", show_kernel),
    Route("/login", login, methods=["GET", "POST"]),
    Route("/logout", logout, methods=["POST"]),
    Route("/arena.css", css),
]

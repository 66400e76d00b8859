"""The tools of the MCP server that talk to an arena: submit, read a submission and a board, search the archive."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
from anyio.to_thread import run_sync
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import ToolAnnotations
from pydantic import Field

from tilewright.agents.answers import (
    ArchiveAnswer,
    ArchivedKernel,
    BoardAnswer,
    BoardEntry,
    BoardResult,
    SubmissionAnswer,
)
from tilewright.agents.arenas import Arena, evidence, is_finished
from tilewright.agents.prompt import shortened
from tilewright.arena.client import Client, read_code
from tilewright.errors import OneKernelNeeded

POLL_SECONDS = 1.0
ENTRIES = 20
READ_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=True)
Problem = Annotated[str, Field(description="Name of a problem of the arena; list_problems lists them.")]


def add_arena_tools(server: MCPServer[Any], arena: Arena) -> None:
    """Add the tools for an arena to a server."""

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, idempotent_hint=True, open_world_hint=True))
    async def submit(
        ctx: Context[Any, Any],
        problem: Problem,
        code: Annotated[str | None, Field(description="Source text of the kernel.")] = None,
        file: Annotated[str | None, Field(description="Path of a Python file with the kernel.")] = None,
        name: Annotated[str, Field(description="Name on the board.")] = "",
        derived_from: Annotated[int | None, Field(description="Submission that this one is derived from.")] = None,
        publish: Annotated[bool, Field(description="Publish the code once it is ranked.")] = False,
        wait: Annotated[float, Field(description="Seconds to wait for the verdict.", ge=0, le=3600)] = 300.0,
    ) -> SubmissionAnswer:
        """Submit a kernel to the arena, which checks it with secret seeds, times it and ranks it."""
        if (code is None) == (file is None):
            raise OneKernelNeeded("code or file")
        text = code if code is not None else await run_sync(read_code, Path(file or ""))
        client = await _client(arena)
        more = partial(client.submit, problem, text, name or Path(file or "agent.py").name, derived_from, publish)
        number = (await run_sync(more))["id"]
        return _submission(client, await _wait(ctx, client, number, wait))

    @server.tool(annotations=READ_ONLY)
    async def read_submission(
        ctx: Context[Any, Any],
        submission: Annotated[int, Field(description="Number of the submission.", ge=1)],
        wait: Annotated[float, Field(description="Seconds to wait for the verdict.", ge=0, le=3600)] = 0.0,
    ) -> SubmissionAnswer:
        """Return the state of a submission, and its verdict with the evidence if it is judged."""
        client = await _client(arena)
        return _submission(client, await _wait(ctx, client, submission, wait))

    @server.tool(annotations=READ_ONLY)
    async def read_board(
        problem: Problem,
        board: Annotated[str | None, Field(description="GPU such as h200 or `h200 predicted`. Default: first.")] = None,
        limit: Annotated[int, Field(description="Entries to return.", ge=1, le=100)] = ENTRIES,
    ) -> BoardAnswer:
        """Return the best entries of a board: rank, author, time with its interval, share of the ceiling."""
        client = await _client(arena)
        boards = (await run_sync(client.problem, problem))["boards"]
        found = await run_sync(partial(client.board, problem, board or boards[0], limit))
        others = [one for one in boards if one != found["board"]]
        return BoardAnswer(problem, found["board"], others, [_entry(one) for one in found["entries"]], found["total"])

    @server.tool(annotations=READ_ONLY)
    async def search_archive(
        problem: Annotated[str | None, Field(description="Only kernels of this problem.")] = None,
        technique: Annotated[str | None, Field(description="Only kernels with this technique, e.g. atomics.")] = None,
        min_share: Annotated[float | None, Field(description="Least share of the ceiling.", ge=0, le=1)] = None,
        words: Annotated[str | None, Field(description="Words in the name or the code.")] = None,
        limit: Annotated[int, Field(description="Kernels to return.", ge=1, le=50)] = 5,
    ) -> ArchiveAnswer:
        """Search ranked kernels and ours, with their code, the largest share of the ceiling first."""
        client = await _client(arena)
        query = {"problem": problem, "technique": technique, "min_share": min_share, "q": words}
        found = await run_sync(partial(client.archive, **query))
        advice = "derive a kernel and submit it with derived_from" if found else "search with fewer conditions"
        return ArchiveAnswer([_archived(one) for one in found[:limit]], advice)


async def _client(arena: Arena) -> Client:
    return await run_sync(lambda: arena.client)


async def _wait(ctx: Context[Any, Any], client: Client, number: int, seconds: float) -> dict[str, Any]:
    """Return a submission once it is judged, or after some seconds; report its states as progress."""
    seen: list[str] = []
    with anyio.move_on_after(seconds):
        while not is_finished(found := await run_sync(client.submission, number)):
            states = ", ".join(f"{job['board']}: {job['state']}" for job in found["jobs"])
            if states not in seen[-1:]:
                seen.append(states)
                await ctx.report_progress(len(seen), None, states)
            await anyio.sleep(POLL_SECONDS)
    return await run_sync(client.submission, number)


def _submission(client: Client, found: dict[str, Any]) -> SubmissionAnswer:
    results = []
    for job in found["jobs"]:
        timing = (job["result"] or {}).get("timing") or {}
        figures = (timing.get("us"), timing.get("share"), timing.get("over_eager"))
        results.append(BoardResult(job["board"], job["state"], job["reason"], *figures, evidence(job)))
    done, ranked = is_finished(found), any(one.state == "ranked" for one in results)
    advice = f"call read_submission with submission {found['id']} to wait for the verdict"
    if done:
        advice = "call read_board for its rank" if ranked else "fix the reason, then submit again"
    address = f"{client.server}/submissions/{found['id']}"
    return SubmissionAnswer(found["id"], found["problem_name"], done, results, address, advice)


def _entry(one: dict[str, Any]) -> BoardEntry:
    same = ("rank", "is_tied", "author", "name", "us", "low_us", "high_us", "submission", "date")
    return BoardEntry(**{key: one[key] for key in same}, share_of_ceiling=one["share"], speedup=one["over_eager"])


def _archived(one: dict[str, Any]) -> ArchivedKernel:
    same = ("id", "problem", "board", "author", "name", "techniques", "us", "derived_from")
    figures = {"share_of_ceiling": one["share"], "speedup": one["over_eager"]}
    return ArchivedKernel(**{key: one[key] for key in same}, **figures, code=shortened(one["code"]))

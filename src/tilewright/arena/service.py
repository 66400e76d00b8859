"""The rules of an arena, apart from HTTP: accept submissions, hand out jobs, take results, hide what is private."""

from __future__ import annotations

import io
import math
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa

from tilewright.arena import tables as t
from tilewright.arena.auth import ADMIN, RIGHTS, SUBMIT, WORKER, Guard, RateLimit
from tilewright.arena.board import Boards, figures
from tilewright.arena.errors import (
    ArenaRefused,
    BadSubmission,
    NotAllowed,
    ProblemClosed,
    TooManyRequests,
    UnknownSubmission,
)
from tilewright.arena.problems import Board
from tilewright.arena.store import Row, Store

MAX_CODE = 2**18  # bytes
MAX_NAME = 80  # characters
MAX_NUMBER = 2**31 - 1  # the largest a submission can have
MAX_QUEUED = 2000  # jobs of one account
ARCHIVES = {b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "a gzip archive", b"\x7fELF": "a binary"}


@dataclass
class Arena:
    store: Store
    worker_token: str = ""
    submission_limit: RateLimit = field(default_factory=lambda: RateLimit(60, 3600.0))
    login_limit: RateLimit = field(default_factory=lambda: RateLimit(10, 60.0))

    def __post_init__(self) -> None:
        self.guard = Guard(self.store, self.worker_token)
        self.boards = Boards(self.store)

    # Submissions

    def submit(
        self,
        account: Row | None,
        problem_name: str,
        name: str,
        data: bytes,
        *,
        derived_from: int | None = None,
        published: bool = False,
    ) -> dict[str, Any]:
        """Accept a submission, or raise an error that says what to fix."""
        account = self.require(account, SUBMIT, "submitting")
        problem = self.store.problem(problem_name, account)
        if is_closed(problem):
            raise ProblemClosed(problem["name"], problem["deadline"])
        code = decoded(data)
        if account["role"] != ADMIN and (wait := self.submission_limit.wait_seconds(account["id"])):
            raise TooManyRequests(f"submissions: {self.submission_limit.count} per hour", wait)
        if self.store.queued_of(account["id"]) >= MAX_QUEUED:
            raise TooManyRequests("queued submissions", 600)
        if derived_from is not None:
            self.submission(account, derived_from)  # raises if there is none that the author may see
        name = printable(name)[:MAX_NAME] or f"{problem['name']}.py"
        more = {"derived_from": derived_from, "published": published, "techniques": techniques(code)}
        number, is_new = self.store.submit(problem, account, name, code, **more)
        return {"id": number, "is_new": is_new, "states": self.store.states(number)}

    def submission(self, account: Row | None, number: int) -> dict[str, Any]:
        """Return what an account may see of a submission: all for its author and administrators.

        Others see the code if it was published and ranked, and neither evidence nor reasons.
        """
        found = self.store.submission(number) if 0 < number <= MAX_NUMBER else None
        if found is None or found["problem_name"] not in [one["name"] for one in self.store.problems(account)]:
            raise UnknownSubmission(number)
        is_own = self.owns(account, found)
        del found["code_hash"]  # by which a guess of the code could be confirmed
        ranked = any(job["state"] == t.RANKED for job in found["jobs"])
        if not is_own and not (found["published"] and ranked):
            found["code"] = None
        for job in found["jobs"]:
            del job["lease"]
            if not is_own:
                job |= {"reason": "", "result": None, "worker": ""}
        return found | {"is_own": is_own}

    def owns(self, account: Row | None, submission: Mapping[str, Any]) -> bool:
        return account is not None and (account["role"] == ADMIN or account["id"] == submission["account"])

    def publish(self, account: Row | None, number: int, published: bool) -> None:
        if not self.submission(account, number)["is_own"]:
            raise NotAllowed("publishing this submission")
        with self.store.write() as connection:
            mine = t.submissions.update().where(t.submissions.c.id == number)
            connection.execute(mine.values(published=published))

    # Jobs

    def lease(self, account: Row | None, worker: str, gpu: str | None) -> dict[str, Any] | None:
        """Return a job with everything that a worker needs, or None if there is none for it."""
        self.require(account, WORKER, "judging")
        everything = {board for one in self.store.rows(sa.select(t.problems.c.boards)) for board in one["boards"]}
        boards = [board for board in everything if Board.parse(board).is_predicted or board == gpu]
        job = self.store.lease(boards, printable(worker)[:MAX_NAME]) if boards else None
        if job is None:
            return None
        problem = self.store.first(sa.select(t.problems).where(t.problems.c.id == job["problem"]))
        assert problem
        submission = self.store.submission(job["submission"])
        leader = self.boards.leader(problem, job["board"])
        return {
            "job": job["id"],
            "lease": job["lease"],
            "renew_seconds": self.store.lease_seconds / 4,
            "board": job["board"],
            "problem": {key: problem[key] for key in ("name", "kind", "files", "cases", "dtype", "rule", "threshold")},
            "submission": {"id": submission["id"], "code": submission["code"]},
            "leader": leader and self._leader(leader, Board.parse(job["board"])),
        }

    def report(self, account: Row | None, job: int, lease: str, state: str | None) -> None:
        self.require(account, WORKER, "judging")
        self.store.renew(job, lease, state)

    def give_back(self, account: Row | None, job: int, lease: str, reason: str, counts: bool) -> None:
        self.require(account, WORKER, "judging")
        self.store.give_back(job, lease, printable(reason)[:300], counts=counts)

    def finish(self, account: Row | None, number: int, lease: str, result: dict[str, Any]) -> str:
        """Store the result of a job and return its state. Reporting it again changes nothing."""
        self.require(account, WORKER, "judging")
        job = self.store.job(number)
        if job is None or job["state"] in t.FINISHED:
            self.store.finish(number, lease, result, None, "")  # raises, or changes nothing
            return job["state"] if job else ""
        problem = self.store.first(sa.select(t.problems).where(t.problems.c.id == job["problem"]))
        assert problem
        entry = None
        _require_figures(result)
        if result["ranked"]:
            leader = self.boards.leader(problem, job["board"])
            if self._was_overtaken(job, result, leader):
                self.store.give_back(number, lease, "the leader changed; it is timed against the new one", counts=False)
                return t.QUEUED
            entry = self._entry(problem, job, result)
        self.store.finish(number, lease, result, entry, printable(result["reason"])[:500])
        return t.RANKED if entry else t.REFUSED

    def require(self, account: Row | None, right: str, what: str) -> Row:
        if account is None or right not in RIGHTS[account["role"]]:
            raise NotAllowed(what)
        return account

    def _leader(self, entry: Row, board: Board) -> dict[str, Any]:
        leader = {"id": entry["submission"]} | {key: entry[key] for key in ("us", "low_us", "high_us", "share", "fast")}
        if not board.is_predicted and entry["submission"]:
            leader["code"] = self.store.submission(entry["submission"])["code"]
        return leader

    def _was_overtaken(self, job: Row, result: Mapping[str, Any], leader: Row | None) -> bool:
        """Return whether a measured result that claims first place was compared with an entry that no longer leads."""
        if Board.parse(job["board"]).is_predicted or leader is None:
            return False
        return bool(result.get("confirmed")) and result.get("leader") != leader["submission"]

    def _entry(self, problem: Row, job: Row, result: Mapping[str, Any]) -> Row:
        submission = self.store.submission(job["submission"])
        leaders = self.boards.history(problem, job["board"])  # the one it was timed beside may have lost its place
        leader = next((one for one in leaders if one["submission"] == result.get("leader")), None)
        return figures(result["timing"], problem["threshold"], leader) | {
            "problem": problem["id"],
            "board": job["board"],
            "job": job["id"],
            "submission": submission["id"],
            "author": submission["author"],
            "name": submission["name"],
            "gpu": (result.get("gpu") or {}).get("name") or job["board"],
            "date": t.now(),
            "verified": True,
        }


def is_closed(problem: Mapping[str, Any]) -> bool:
    """Return whether the deadline of a problem is over."""
    return bool(problem["deadline"]) and datetime.now(timezone.utc) > t.parse_date(problem["deadline"])


def _require_figures(result: Mapping[str, Any]) -> None:
    """Raise unless a result says what it has to say, in numbers that can be ranked."""
    try:
        valid = isinstance(result["ranked"], bool) and isinstance(result["reason"], str)
        if result["ranked"]:
            timing, cases = result["timing"], result["timing"]["cases"]
            names = [one[key] for one in cases for key in ("case", "dtype")]
            times = [one[key] for one in (timing, *cases) for key in ("us", "low", "high")]
            others = [timing[key] for key in ("share", "over_eager", "over_compile")]
            others += [one[key] for one in cases for key in ("floor_us", "eager_us", "compile_us")]
            others += [(timing.get("against_leader") or {}).get(key) for key in ("ratio", "low", "high")]
            figures = [*times, *(one for one in others if one is not None)]
            valid = valid and bool(cases) and all(isinstance(name, str) for name in names)
            valid = valid and all(0 < one < math.inf for one in figures)
    except (KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ArenaRefused("the result lacks `ranked`, `reason` or a figure, or a figure is not a positive number")


def decoded(data: bytes) -> str:
    """Return submitted bytes as Python source, or raise BadSubmission."""
    if len(data) > MAX_CODE:
        raise BadSubmission(f"it has {len(data)} bytes, and the limit is {MAX_CODE}")
    if what := next((what for magic, what in ARCHIVES.items() if data.startswith(magic)), None):
        raise BadSubmission(f"it is {what}")
    if b"\0" in data:
        raise BadSubmission("it has a null byte")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise BadSubmission(f"byte {error.start} is not UTF-8") from None
    if not text.strip():
        raise BadSubmission("it is empty")
    return text


def printable(text: str) -> str:
    """Return the text in one line without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text)).strip()[:1000]


# Words in a kernel's source that name a technique, for the archive.
TECHNIQUES = {
    "triton": ("@triton.jit",),
    "gluon": ("@gluon.jit",),
    "cuda": ("load_inline", "__global__"),
    "torch.compile": ("torch.compile",),
    "autotune": ("triton.autotune",),
    "tensor cores": ("tl.dot", "wgmma", "warpgroup_mma", "tcgen05_mma", "mma.sync", "mma_sync"),
    "atomics": ("tl.atomic", "atomicAdd"),
    "persistent": ("num_programs", "persistent"),
    "split reduction": ("split_k", "SPLIT", "partials", "partial_"),
    "TMA": ("make_tensor_descriptor", "tma."),
    "online softmax": ("online",),
    "vectorised": ("max_contiguous", "multiple_of"),
    "pipelined": ("num_stages",),
}


LINE_STARTS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def techniques(code: str) -> list[str]:
    """Return the techniques that code names, comments and docstrings aside."""
    return named_techniques(_without_comments(code))


def named_techniques(code: str) -> list[str]:
    return [name for name, words in TECHNIQUES.items() if any(word in code for word in words)]


def _without_comments(code: str) -> str:
    """Return the code without comments and docstrings, or as it is if it is not valid.

    By tokens, since `ast.parse` fails now and then in Python 3.11 if several threads are in it.
    """
    kept, before = [], tokenize.NEWLINE
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type in (tokenize.COMMENT, tokenize.NL):
                continue
            if token.type != tokenize.STRING or before not in LINE_STARTS:
                kept.append(token.string)
            before = token.type
    except (tokenize.TokenError, SyntaxError):
        return code
    return "".join(kept)

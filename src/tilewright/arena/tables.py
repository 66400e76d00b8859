"""The tables of an arena's database."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa

SCHEMA = "1"
QUEUED, CHECKING, TIMING, RANKED, REFUSED = "queued", "checking", "timing", "ranked", "refused"
RUNNING = (CHECKING, TIMING)
FINISHED = (RANKED, REFUSED)

metadata = sa.MetaData()


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer, primary_key=True, autoincrement=True)


def _text(name: str, **options: Any) -> sa.Column[str]:
    given: dict[str, Any] = {"default": ""} | options
    return sa.Column(name, sa.Text, nullable=False, **given)


settings = sa.Table("settings", metadata, _text("key", primary_key=True), _text("value"))
accounts = sa.Table(
    "accounts",
    metadata,
    _id(),
    _text("name", unique=True),
    _text("role"),
    _text("token_hash", unique=True),
    _text("created"),
    sa.Column("revoked", sa.Boolean, nullable=False, default=False),
)
sessions = sa.Table(
    "sessions",
    metadata,
    _text("session_hash", primary_key=True),
    sa.Column("account", sa.ForeignKey("accounts.id"), nullable=False),
    _text("created"),
)
problems = sa.Table(
    "problems",
    metadata,
    _id(),
    _text("name", unique=True),
    _text("kind"),  # op, kernelbench, gpu-mode, … : see problems.py
    _text("description"),
    sa.Column("files", sa.JSON, nullable=False),  # if it is no Op: text by relative path
    sa.Column("cases", sa.JSON, nullable=False),  # as --case takes them
    _text("dtype"),
    sa.Column("boards", sa.JSON, nullable=False),
    _text("rule"),
    sa.Column("threshold", sa.Float, nullable=False, default=1.0),  # p of fast_p
    _text("deadline"),  # ISO date and time, or empty
    sa.Column("private", sa.Boolean, nullable=False, default=False),
    _text("created"),
)
members = sa.Table(  # who sees a private problem
    "members",
    metadata,
    sa.Column("problem", sa.ForeignKey("problems.id"), primary_key=True),
    sa.Column("account", sa.ForeignKey("accounts.id"), primary_key=True),
)
submissions = sa.Table(
    "submissions",
    metadata,
    _id(),
    sa.Column("problem", sa.ForeignKey("problems.id"), nullable=False, index=True),
    sa.Column("account", sa.Integer, nullable=False),
    _text("author"),
    _text("name"),
    _text("code"),
    _text("code_hash"),
    sa.Column("published", sa.Boolean, nullable=False, default=False),
    sa.Column("derived_from", sa.Integer),
    sa.Column("techniques", sa.JSON, nullable=False),
    _text("created"),
    sa.Index("same_code", "problem", "account", "code_hash"),
)
jobs = sa.Table(  # one per submission and board
    "jobs",
    metadata,
    _id(),
    sa.Column("submission", sa.ForeignKey("submissions.id"), nullable=False, index=True),
    sa.Column("problem", sa.ForeignKey("problems.id"), nullable=False),
    sa.Column("account", sa.Integer, nullable=False),
    _text("board"),
    _text("state"),
    sa.Column("turn", sa.Integer, nullable=False),  # the order of the queue
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    _text("lease"),  # secret of the worker that has the job
    _text("worker"),
    _text("reason"),
    sa.Column("result", sa.JSON),
    _text("changed"),
    sa.Index("queue", "state", "turn"),
)
entries = sa.Table(  # one per place on a board; imported ones have no job
    "entries",
    metadata,
    _id(),
    sa.Column("problem", sa.ForeignKey("problems.id"), nullable=False),
    _text("board"),
    sa.Column("job", sa.ForeignKey("jobs.id"), unique=True),
    sa.Column("submission", sa.ForeignKey("submissions.id")),
    _text("author"),
    _text("name"),
    sa.Column("us", sa.Float, nullable=False),  # geometric mean over the cases
    sa.Column("low_us", sa.Float, nullable=False),
    sa.Column("high_us", sa.Float, nullable=False),
    sa.Column("share", sa.Float),  # ceiling / time
    sa.Column("over_eager", sa.Float),  # time of eager / time of this
    sa.Column("over_compile", sa.Float),
    sa.Column("fast", sa.Float),  # share of the cases in which it is more than p times faster than eager
    _text("gpu"),
    _text("date"),
    sa.Column("verified", sa.Boolean, nullable=False, default=True),
    _text("origin"),
    sa.Index("of_board", "problem", "board"),
)


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def parse_date(text: str) -> datetime:
    """Return a stored date; one without a zone is in UTC."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)

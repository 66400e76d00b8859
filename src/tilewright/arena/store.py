"""The queue and everything else that an arena keeps, in SQLite or PostgreSQL.

A submission has one job per board, with the states queued, checking, timing, and ranked or refused. A worker that takes
a job gets a lease: a secret under which it reports the result once. Leases run out by the monotonic clock of the one
server, so that a wall clock that jumps neither ends a lease nor keeps one alive.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc

from tilewright.arena import tables as t
from tilewright.arena.errors import (
    ArenaDatabase,
    ArenaInUse,
    BadAccount,
    LeaseLost,
    ProblemChanged,
    UnknownProblem,
    UnknownSubmission,
)
from tilewright.arena.tables import CHECKING, FINISHED, QUEUED, RANKED, REFUSED, RUNNING, now

LEASE_SECONDS = 60.0
MAX_ATTEMPTS = 3
BUSY_SECONDS = 30
ADVISORY_LOCK = 8640  # that the server of an arena holds in PostgreSQL
JUDGED_BY = ("kind", "files", "cases", "dtype", "threshold")  # a change makes entries of a problem incomparable
Row = dict[str, Any]


def sqlite_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'arena.sqlite'}"


class Store:
    def __init__(self, url: str, monotonic: Callable[[], float] = time.monotonic, lease_seconds: float = LEASE_SECONDS):
        self._monotonic, self.lease_seconds = monotonic, lease_seconds
        self._writing = threading.Lock()
        self._deadlines: dict[int, float] = {}  # when leases run out, by job
        self.on_change: Callable[[int], None] = lambda submission: None
        options: dict[str, Any] = {"connect_args": {"timeout": BUSY_SECONDS}} if url.startswith("sqlite") else {}
        try:
            self.engine = sa.create_engine(url, pool_size=20, max_overflow=40, **options)
            if self.engine.dialect.name == "sqlite":
                event.listen(self.engine, "connect", _configure_sqlite)
                event.listen(self.engine, "begin", _begin_sqlite)
        except (exc.SQLAlchemyError, ImportError) as error:
            raise ArenaDatabase(re.sub("//[^/]*@", "//***@", url), explain(error)) from None
        try:
            with self.write() as connection:
                t.metadata.create_all(connection)
            self._require_schema()
        except exc.SQLAlchemyError as error:
            self.close()
            raise ArenaDatabase(self.engine.url, explain(error)) from None
        except ArenaDatabase:
            self.close()
            raise

    def _require_schema(self) -> None:
        found = self.setting("schema", lambda: t.SCHEMA)
        if found != t.SCHEMA:
            raise ArenaDatabase(self.engine.url, f"its schema is {found}, and this version reads {t.SCHEMA}")

    def close(self) -> None:
        self.engine.dispose()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of a PostgreSQL database, which has one server. For SQLite, the data folder has a lock."""
        if self.engine.dialect.name != "postgresql":
            yield
            return
        with self.engine.connect() as connection:  # PostgreSQL releases the lock when the connection ends
            if not connection.execute(sa.select(sa.func.pg_try_advisory_lock(ADVISORY_LOCK))).scalar():
                raise ArenaInUse(self.engine.url)
            connection.commit()
            try:
                yield
            finally:
                connection.execute(sa.select(sa.func.pg_advisory_unlock(ADVISORY_LOCK)))

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Open a transaction that changes the database. It is complete after the block, or has not happened."""
        with self._writing, self.engine.connect().execution_options(is_write=True) as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        with self.engine.connect() as connection, connection.begin():
            yield connection

    def rows(self, query: sa.Select) -> list[Row]:
        with self.read() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def first(self, query: sa.Select) -> Row | None:
        found = self.rows(query.limit(1))
        return found[0] if found else None

    def setting(self, key: str, default: Callable[[], str]) -> str:
        """Return a setting; store the default if there is none."""
        found = self.first(sa.select(t.settings.c.value).where(t.settings.c.key == key))
        if found is None:
            with self.write() as connection, contextlib.suppress(exc.IntegrityError):
                connection.execute(t.settings.insert().values(key=key, value=default()))
            found = self.first(sa.select(t.settings.c.value).where(t.settings.c.key == key))
        assert found
        return found["value"]

    # Problems and submissions

    def add_problem(self, fields: Mapping[str, Any], member_names: Sequence[str] = ()) -> int:
        """Add a problem, or replace one of the same name; one with submissions keeps its files and cases."""
        with self.write() as connection:
            same_name = sa.select(t.problems).where(t.problems.c.name == fields["name"])
            old = connection.execute(same_name).mappings().first()
            if old is None:
                number = connection.execute(t.problems.insert().values(created=now(), **fields)).inserted_primary_key[0]  # type: ignore[index]
            else:
                number = old["id"]
                changed = [key for key in JUDGED_BY if key in fields and fields[key] != old[key]]
                submitted = sa.select(t.submissions.c.id).where(t.submissions.c.problem == number).limit(1)
                if changed and connection.execute(submitted).first():
                    raise ProblemChanged(old["name"], changed)
                connection.execute(t.problems.update().where(t.problems.c.id == number).values(**fields))
                dropped = (
                    t.jobs.c.problem == number,
                    t.jobs.c.state == QUEUED,
                    t.jobs.c.board.not_in(fields["boards"]),
                )
                refused = {"state": REFUSED, "reason": "its board was removed", "changed": now()}
                connection.execute(t.jobs.update().where(*dropped).values(**refused))
            connection.execute(t.members.delete().where(t.members.c.problem == number))
            accounts = sa.select(t.accounts.c.name, t.accounts.c.id).where(t.accounts.c.name.in_(member_names))
            members = {row.name: row.id for row in connection.execute(accounts)}
            for name in dict.fromkeys(member_names):
                if name not in members:
                    raise BadAccount(name, "there is no such account; make it with `tilewright arena token add`")
                connection.execute(t.members.insert().values(problem=number, account=members[name]))
            return int(number)

    def problem(self, name: str, account: Row | None) -> Row:
        """Return a problem that the account may see."""
        visible = self.problems(account)
        found = next((one for one in visible if one["name"] == name), None)
        if found is None:
            raise UnknownProblem(name, [one["name"] for one in visible])
        return found

    def problems(self, account: Row | None) -> list[Row]:
        query = sa.select(t.problems).order_by(t.problems.c.name)
        if account is None or account["role"] == "submit":
            mine = sa.select(t.members.c.problem).where(t.members.c.account == (account["id"] if account else -1))
            query = query.where(sa.or_(~t.problems.c.private, t.problems.c.id.in_(mine)))
        return self.rows(query)

    def submit(self, problem: Row, account: Row, name: str, code: str, **more: Any) -> tuple[int, bool]:
        """Store a submission and queue a job per board; return its number and whether it is new.

        The same code of the same author for the same problem is the same submission; submitted again, it is queued for
        the boards that were added since.
        """
        digest = hashlib.sha256(code.encode()).hexdigest()
        values = {"problem": problem["id"], "account": account["id"], "code_hash": digest}
        with self.write() as connection:
            same = sa.select(t.submissions.c.id).where(*(t.submissions.c[key] == v for key, v in values.items()))
            number = known = connection.execute(same).scalar()
            if number is None:
                parent = more.get("derived_from")
                exists = sa.select(t.submissions.c.id).where(t.submissions.c.id == parent)
                if parent is not None and connection.execute(exists).scalar() is None:
                    raise UnknownSubmission(parent)
                row = values | {"author": account["name"], "name": name, "code": code, "created": now()}
                inserted = connection.execute(t.submissions.insert().values({"techniques": []} | row | more))
                number = inserted.inserted_primary_key[0]  # type: ignore[index]
            present = connection.execute(sa.select(t.jobs.c.board).where(t.jobs.c.submission == number)).scalars().all()
            for board in (board for board in problem["boards"] if board not in present):
                job = {"submission": number, "problem": problem["id"], "account": account["id"], "board": board}
                job |= {"state": QUEUED, "turn": self._next_turn(connection, **job), "changed": now()}
                connection.execute(t.jobs.insert().values(job))
        self.on_change(int(number))
        return int(number), known is None

    def _next_turn(self, connection: sa.Connection, *, account: int, board: str, **_: Any) -> int:
        """Return the turn of an author's next job on a board: after it every other author there has had one.

        Jobs on other boards do not count: one that no worker serves would keep its authors waiting everywhere.
        """
        jobs = t.jobs.c
        first = connection.execute(sa.select(sa.func.min(jobs.turn)).where(jobs.state == QUEUED)).scalar() or 0
        mine = (jobs.state == QUEUED, jobs.account == account, jobs.board == board)
        last = connection.execute(sa.select(sa.func.max(jobs.turn)).where(*mine)).scalar()
        return first if last is None else max(first, last + 1)

    def submission(self, number: int) -> Row:
        """Return a submission with its jobs and the name of its problem."""
        joined = sa.select(t.submissions, t.problems.c.name.label("problem_name")).join(t.problems)
        found = self.first(joined.where(t.submissions.c.id == number))
        if found is None:
            raise UnknownSubmission(number)
        found["jobs"] = self.rows(sa.select(t.jobs).where(t.jobs.c.submission == number).order_by(t.jobs.c.id))
        return found

    def states(self, number: int) -> list[Row]:
        """Return the state of each job of a submission, without results, and its position in the queue."""
        jobs = t.jobs.c
        found = self.rows(
            sa.select(jobs.id, jobs.board, jobs.state, jobs.reason, jobs.attempts, jobs.turn, jobs.changed)
            .where(jobs.submission == number)
            .order_by(jobs.id)
        )
        for job in (job for job in found if job["state"] == QUEUED):
            before = sa.or_(jobs.turn < job["turn"], sa.and_(jobs.turn == job["turn"], jobs.id < job["id"]))
            ahead = self.first(sa.select(sa.func.count().label("n")).where(jobs.state == QUEUED, before))
            job["ahead"] = ahead["n"] if ahead else 0
        return found

    # Jobs

    def lease(self, boards: Sequence[str], worker: str) -> Row | None:
        """Return the next queued job of these boards, or None. The caller owns it until its lease runs out."""
        self.expire()
        jobs = t.jobs.c
        with self.write() as connection:
            query = sa.select(jobs.id).where(jobs.state == QUEUED, jobs.board.in_(boards))
            number = connection.execute(query.order_by(jobs.turn, jobs.id).limit(1)).scalar()
            if number is None:
                return None
            lease = secrets.token_urlsafe(24)
            values = {"state": CHECKING, "lease": lease, "worker": worker, "attempts": jobs.attempts + 1}
            connection.execute(t.jobs.update().where(jobs.id == number).values(**values, changed=now()))
            job = dict(connection.execute(sa.select(t.jobs).where(jobs.id == number)).mappings().one())
            self._deadlines[number] = self._monotonic() + self.lease_seconds
        self.on_change(job["submission"])
        return job

    def renew(self, job: int, lease: str, state: str | None = None) -> None:
        """Extend a lease; with `state`, report that the job is now checked or timed."""
        found = self._leased(job, lease)
        self._deadlines[job] = self._monotonic() + self.lease_seconds
        if state in RUNNING and state != found["state"]:
            with self.write() as connection:
                mine = t.jobs.update().where(t.jobs.c.id == job, t.jobs.c.lease == lease, t.jobs.c.state.in_(RUNNING))
                connection.execute(mine.values(state=state, changed=now()))
            self.on_change(found["submission"])

    def give_back(self, job: int, lease: str, reason: str, *, counts: bool = True) -> None:
        """Queue a job again whose worker could not finish it; refuse it after MAX_ATTEMPTS."""
        self._leased(job, lease)
        self._requeue(job, lease, reason, counts)

    def finish(self, job: int, lease: str, result: Row, entry: Row | None, reason: str) -> bool:
        """Store the result of a job and its board entry; return False if this lease has already reported it."""
        jobs = t.jobs.c
        with self.write() as connection:
            found = connection.execute(sa.select(t.jobs).where(jobs.id == job)).mappings().first()
            if found is None or not is_same_secret(found["lease"], lease) or found["state"] == QUEUED:
                raise LeaseLost(job)
            if found["state"] in FINISHED:
                return False
            state = RANKED if entry else REFUSED
            values = {"state": state, "reason": reason, "result": result, "changed": now()}
            connection.execute(t.jobs.update().where(jobs.id == job).values(**values))
            if entry:
                connection.execute(t.entries.insert().values(**entry))
        self._deadlines.pop(job, None)
        self.on_change(found["submission"])
        return True

    def job(self, number: int) -> Row | None:
        return self.first(sa.select(t.jobs).where(t.jobs.c.id == number))

    def expire(self) -> None:
        """Queue jobs again whose lease has run out. A restarted server gives every lease its full time again."""
        running = self.rows(sa.select(t.jobs.c.id, t.jobs.c.lease).where(t.jobs.c.state.in_(RUNNING)))
        for job in running:
            deadline = self._deadlines.setdefault(job["id"], self._monotonic() + self.lease_seconds)
            if self._monotonic() > deadline:
                self._requeue(job["id"], job["lease"], "its worker has not answered", counts=True)

    def queue_length(self) -> dict[str, int]:
        query = sa.select(t.jobs.c.state, sa.func.count().label("n")).group_by(t.jobs.c.state)
        return {row["state"]: row["n"] for row in self.rows(query)}

    def queued_of(self, account: int) -> int:
        query = sa.select(sa.func.count().label("n")).where(t.jobs.c.state == QUEUED, t.jobs.c.account == account)
        found = self.first(query)
        return found["n"] if found else 0

    def _leased(self, job: int, lease: str) -> Row:
        found = self.job(job)
        if found is None or found["state"] not in RUNNING or not is_same_secret(found["lease"], lease):
            raise LeaseLost(job)
        return found

    def _requeue(self, job: int, lease: str, reason: str, counts: bool) -> None:
        jobs = t.jobs.c
        with self.write() as connection:
            found = connection.execute(sa.select(t.jobs).where(jobs.id == job, jobs.lease == lease)).mappings().first()
            if found is None or found["state"] not in RUNNING:
                return  # another thread was first
            attempts = found["attempts"] - (not counts)
            values = {"state": QUEUED, "lease": "", "worker": "", "attempts": attempts, "reason": reason}
            if attempts >= MAX_ATTEMPTS:
                values |= {"state": REFUSED, "reason": f"not judged in {attempts} attempts: {reason}"}
            connection.execute(t.jobs.update().where(jobs.id == job).values(**values, changed=now()))
        self._deadlines.pop(job, None)
        self.on_change(found["submission"])


def is_same_secret(secret: str, given: str) -> bool:
    """Compare in a time that does not depend on the content. `given` may be any text."""
    return hmac.compare_digest(secret.encode(), given.encode(errors="surrogatepass"))


def geomean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _configure_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions begin in _begin_sqlite
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    is_write = connection.get_execution_options().get("is_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")


def explain(error: BaseException) -> str:
    """Return the reason of a failure in one line, as the database gave it."""
    original = getattr(error, "orig", None) or error
    return str(original).strip().partition("\n")[0]

"""Accounts: tokens, browser sessions, protection against forged requests, and rate limits.

Tokens and sessions are random, and only their hashes are stored. Without any token the arena serves its own machine
only, and everybody there is the administrator.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from tilewright.arena import tables as t
from tilewright.arena.errors import BadAccount
from tilewright.arena.store import Row, Store, is_same_secret

SUBMIT, WORKER, ADMIN = "submit", "worker", "admin"
ROLES = (SUBMIT, WORKER, ADMIN)
RIGHTS = {SUBMIT: {SUBMIT}, WORKER: {WORKER}, ADMIN: {SUBMIT, WORKER, ADMIN}}
LOCAL: Row = {"id": 0, "name": "local", "role": ADMIN}  # everybody, on an arena without tokens
SESSION_DAYS = 30
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "[::1]")
NAME = re.compile(r"[\w.@-]{1,64}")


def add_token(store: Store, name: str, role: str) -> str:
    """Create an account, or renew a revoked one, and return its token, which cannot be read again."""
    if role not in ROLES:
        raise BadAccount(name, f"its role is one of {', '.join(ROLES)}")
    if not NAME.fullmatch(name) or name == LOCAL["name"]:
        raise BadAccount(name, "a name has 1 to 64 letters, digits, dots, dashes or @, and is not 'local'")
    token = f"tw_{secrets.token_urlsafe(32)}"
    values = {"name": name, "role": role, "token_hash": hashed(token), "created": t.now(), "revoked": False}
    try:
        with store.write() as connection:
            renewed = t.accounts.update().where(t.accounts.c.name == name, t.accounts.c.revoked).values(values)
            if not connection.execute(renewed).rowcount:
                connection.execute(t.accounts.insert().values(values))
    except exc.IntegrityError:
        raise BadAccount(name, "it exists; revoke it first, or choose another name") from None
    return token


def revoke(store: Store, name: str) -> None:
    """Disable an account and end its sessions. Its submissions stay."""
    with store.write() as connection:
        found = connection.execute(sa.select(t.accounts.c.id).where(t.accounts.c.name == name)).scalar()
        if found is None:
            raise BadAccount(name, "there is no such account")
        connection.execute(t.accounts.update().where(t.accounts.c.id == found).values(revoked=True))
        connection.execute(t.sessions.delete().where(t.sessions.c.account == found))


def listed(store: Store) -> list[Row]:
    columns = (t.accounts.c.name, t.accounts.c.role, t.accounts.c.created, t.accounts.c.revoked)
    return store.rows(sa.select(*columns).order_by(t.accounts.c.id))


def hashed(secret: str) -> str:
    """Return a hash of a random secret; 256 random bits need no slow hash."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


class Guard:
    """Identifies the author of a request."""

    def __init__(self, store: Store, worker_token: str = ""):
        self._store = store
        self._worker_token = worker_token  # for the workers that the server started itself
        self._secret = store.setting("secret", lambda: secrets.token_hex(32)).encode()

    @property
    def has_tokens(self) -> bool:
        """Return whether an account exists. A revoked one counts: revoking the last must not open the arena to all."""
        return self._store.first(sa.select(t.accounts.c.id)) is not None

    def account(self, token: str, session: str) -> Row | None:
        """Return the account of a token or a session; the local one on an arena without tokens."""
        if token and self._worker_token and is_same_secret(self._worker_token, token):
            return {"id": -1, "name": "this machine", "role": WORKER}
        accounts = sa.select(t.accounts.c.id, t.accounts.c.name, t.accounts.c.role).where(~t.accounts.c.revoked)
        if token:
            return self._store.first(accounts.where(t.accounts.c.token_hash == hashed(token)))
        if not self.has_tokens:
            return LOCAL
        joined = accounts.join(t.sessions, t.sessions.c.account == t.accounts.c.id)
        mine = joined.where(t.sessions.c.session_hash == hashed(session), t.sessions.c.created > _oldest_session())
        return self._store.first(mine) if session else None

    def log_in(self, token: str) -> str | None:
        """Return a new session for a token, or None if the token is not valid."""
        account = self.account(token, "") if token else None
        if account is None or account["id"] < 1:
            return None
        session = secrets.token_urlsafe(32)
        with self._store.write() as connection:
            connection.execute(t.sessions.delete().where(t.sessions.c.created <= _oldest_session()))
            values = {"session_hash": hashed(session), "account": account["id"], "created": t.now()}
            connection.execute(t.sessions.insert().values(values))
        return session

    def log_out(self, session: str) -> None:
        with self._store.write() as connection:
            connection.execute(t.sessions.delete().where(t.sessions.c.session_hash == hashed(session)))

    def form_token(self, session: str) -> str:
        """Return the token that a form of this session must carry."""
        return hmac.new(self._secret, session.encode(), hashlib.sha256).hexdigest()

    def is_own_form(self, session: str, token: str) -> bool:
        return bool(session) and is_same_secret(self.form_token(session), token)


def _oldest_session() -> str:
    """Return the moment before which a session has ended."""
    return (datetime.now(timezone.utc) - timedelta(days=SESSION_DAYS)).isoformat(timespec="seconds")


class RateLimit:
    """Allows `count` events per `seconds` and key, by a clock that does not jump."""

    def __init__(self, count: int, seconds: float, monotonic: Callable[[], float] = time.monotonic):
        self.count, self.seconds = count, seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._events: dict[Any, deque[float]] = {}

    def wait_seconds(self, key: Any) -> float:
        """Count an event and return 0, or return the seconds until the next one is allowed."""
        moment = self._monotonic()
        with self._lock:
            if len(self._events) > 10_000:  # forget idle keys
                self._events = {k: e for k, e in self._events.items() if e and moment - e[-1] < self.seconds}
            events = self._events.setdefault(key, deque())
            while events and moment - events[0] >= self.seconds:
                events.popleft()
            if len(events) >= self.count:
                return self.seconds - (moment - events[0])
            events.append(moment)
            return 0.0

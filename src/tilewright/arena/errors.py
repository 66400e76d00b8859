"""One class per mistake that a user of the arena can make, as in `tilewright.errors`."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.errors import TilewrightError, nearest


class ArenaDatabase(TilewrightError):
    def __init__(self, url: object, why: str):
        super().__init__(f"the arena's database {url} cannot be used: {why}; give another --data or --database")


class ArenaExposed(TilewrightError):
    def __init__(self, folder: object, readable: object):
        super().__init__(
            f"submissions could read '{folder}', since every process may read {readable}; choose another --data, or "
            "judge on other machines with --workers 0"
        )


class PasswordExposed(TilewrightError):
    def __init__(self) -> None:
        super().__init__(
            "submissions could read the password in --database, as every process may read the command lines of others; "
            "put it into ~/.pgpass or $PGPASSWORD, or judge on other machines with --workers 0"
        )


class ArenaInUse(TilewrightError):
    def __init__(self, folder: object):
        super().__init__(f"another server uses '{folder}'; stop it, or give this one another --data or --database")


class ArenaNotReachable(TilewrightError):
    def __init__(self, url: str, why: str):
        super().__init__(
            f"no arena answers at {url} ({why}); start one with `tilewright arena serve`, or give --server"
        )


class ArenaRefused(TilewrightError):
    """A request that an arena refused; the message is the server's, `status` its HTTP status."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class BadSubmission(TilewrightError):
    def __init__(self, why: str):
        super().__init__(f"this cannot be submitted: {why}; submit one Python file in UTF-8")


class LeaseLost(TilewrightError):
    def __init__(self, job: int):
        super().__init__(f"this worker's lease on job {job} has ended; its result is not used")


class UnknownProblem(TilewrightError):
    def __init__(self, name: str, known: Iterable[str]):
        known = [*known]
        what = nearest(name, known) if known else "add one with `tilewright arena problem add`"
        super().__init__(f"this arena has no problem named '{name}'; {what}")


class UnknownBoard(TilewrightError):
    def __init__(self, problem: str, name: str, known: Iterable[str]):
        super().__init__(f"{problem} has no board named '{name}'; {nearest(name, known)}")


class BadBoard(TilewrightError):
    def __init__(self, name: str):
        super().__init__(f"no board can be named '{name}'; give a GPU such as h200, or 'h200 predicted'")


class UnknownSubmission(TilewrightError):
    def __init__(self, number: object):
        super().__init__(
            f"this arena has no submission {number} that you may see; the arena's first page lists the latest"
        )


class UnknownArchived(TilewrightError):
    def __init__(self, name: str):
        super().__init__(f"the archive has no kernel '{name[:80]}' that you may see; search it for others")


class CannotAddProblem(TilewrightError):
    def __init__(self, target: str, why: str):
        super().__init__(f"{target} cannot be added: {why}")


class ProblemChanged(TilewrightError):
    def __init__(self, name: str, changed: Iterable[str]):
        super().__init__(
            f"problem '{name}' has submissions, so its {', '.join(changed)} cannot change: times of different problems "
            "cannot be compared; add it under another --name"
        )


class UnknownRule(TilewrightError):
    def __init__(self, name: str, known: Iterable[str]):
        super().__init__(f"no ranking rule named '{name}'; {nearest(name, known)}")


class NotAllowed(TilewrightError):
    def __init__(self, what: str):
        super().__init__(
            f"{what} needs a token with the right to do so; an administrator makes one with "
            "`tilewright arena token add`"
        )


class BadAccount(TilewrightError):
    def __init__(self, name: str, why: str):
        super().__init__(f"account '{name}': {why}")


class TooManyRequests(TilewrightError):
    def __init__(self, what: str, seconds: float):
        super().__init__(f"too many {what}; try again in {max(1, round(seconds))} s")
        self.seconds = seconds


class ProblemClosed(TilewrightError):
    def __init__(self, name: str, deadline: str):
        super().__init__(f"{name} has taken no submissions since {deadline}; choose another problem")


class NoTokens(TilewrightError):
    def __init__(self, host: str):
        super().__init__(
            f"an arena without tokens listens on localhost only, not on {host}; make a token first: "
            "tilewright arena token add NAME --role admin"
        )


class PortInUse(TilewrightError):
    def __init__(self, host: str, port: int, why: str):
        super().__init__(f"cannot listen on {host}:{port}: {why}; give another --port")


class BadDeadline(TilewrightError):
    def __init__(self, text: str):
        super().__init__(f"cannot read the date '{text}'; write it like 2027-01-31T18:00+01:00")


class UnknownFormat(TilewrightError):
    def __init__(self, name: str, known: Iterable[str]):
        super().__init__(f"no format named '{name}'; {nearest(name, known)}")


class CannotImport(TilewrightError):
    def __init__(self, path: object, line: int, why: str):
        where = f"{path}, line {line}" if line else str(path)
        super().__init__(f"{where} cannot be imported: {why}; nothing was imported")

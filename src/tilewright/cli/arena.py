"""The commands `tilewright arena`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tilewright import settings, source
from tilewright.arena.errors import ArenaDatabase, CannotAddProblem, ProblemChanged
from tilewright.cli.options import AsJson, Command
from tilewright.cli.shared import console, say_next, table, warn
from tilewright.errors import CannotWrite, MissingPackage

if TYPE_CHECKING:
    from tilewright.arena.client import Client
    from tilewright.arena.store import Store

Data = Annotated[Path, typer.Option("--data", metavar="DIR", help="Data folder of the arena.")]
Database = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="PostgreSQL, e.g. postgresql+psycopg://HOST/NAME, not SQLite."),
]
Server = Annotated[str, typer.Option("--server", metavar="URL", help="Address of the arena.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", metavar="TOKEN", help="Token; - reads it from stdin.", show_default="$TILEWRIGHT_ARENA_TOKEN"
    ),
]
ADMINISTRATOR = {"id": 0, "name": "local", "role": "admin"}
DATA, SERVER = Path("arena"), "http://127.0.0.1:8640"
PACKAGES = ("starlette", "uvicorn", "jinja2", "multipart", "sqlalchemy", "httpx")

app = typer.Typer(no_args_is_help=True, help="Judge submitted kernels in isolation, rank and publish them.")
problem_app = typer.Typer(no_args_is_help=True, help="Add and list the problems of an arena.")
token_app = typer.Typer(no_args_is_help=True, help="Make, list and revoke the tokens of an arena.")
app.add_typer(problem_app, name="problem", short_help="Add and list problems.")
app.add_typer(token_app, name="token", short_help="Make, list and revoke tokens.")


@app.callback()
def _require_packages() -> None:
    import importlib.util

    if not all(importlib.util.find_spec(name) for name in PACKAGES):
        raise MissingPackage("tilewright arena", "tilewright[arena]")


@app.command(short_help="Serve an arena: web pages, JSON API and judges.", cls=Command)
def serve(
    data: Data = DATA,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="INTEGER", help="Port.")] = 8640,
    workers: Annotated[int, typer.Option(min=0, metavar="INTEGER", help="Judges on this machine.")] = 1,
    database: Database = None,
    quick: Annotated[bool, typer.Option("--quick", help="The judges check a few cases. Takes seconds.")] = False,
    lease: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="A silent worker loses its job after this time.")
    ] = 60.0,
) -> None:
    """Serve an arena from a data folder. Without tokens it listens on localhost only."""
    from tilewright.arena.server import serve as run

    run(data, host, port, workers, database, lease, ["--quick"] if quick else [])


@app.command(short_help="Pull jobs from an arena and judge them on this machine.", cls=Command)
def worker(
    server: Server = SERVER,
    token: Token = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Name of this worker.", show_default="host name")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Check a few cases. Takes seconds.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Exit when there is no job.")] = False,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="Run submissions even where they cannot be isolated.")
    ] = False,
) -> None:
    """Judge submissions. Without a GPU, check by the interpreter and predict the time."""
    secret = _token(token)
    from tilewright.arena.worker import JudgeProcess, Worker

    gpu = _gpu()
    options = {"device": "cuda" if gpu else "cpu", "depth": "quick" if quick else "default"}
    judge = JudgeProcess(options | {"requires_isolation": not trusted})
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: _interrupt())
    if token == "-":  # the server closes the pipe when it ends
        threading.Thread(target=lambda: (sys.stdin.read(), ending.set(), os.kill(os.getpid(), 15)), daemon=True).start()
    try:
        with _client(server, secret) as client:
            Worker(client, judge, name, gpu, say=lambda line: print(line, flush=True)).run(ending, once=once)
    finally:
        judge.close()


@app.command(short_help="Submit a kernel to an arena.", cls=Command)
def submit(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="Name of the problem.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Python file with the kernel.")],
    server: Server = SERVER,
    token: Token = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Name on the board.", show_default="file name")
    ] = "",
    derived_from: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Submission that this one is derived from.")
    ] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Publish the code once it is ranked.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the verdict.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a kernel. With --wait, exits with 1 if it is refused."""
    from tilewright.arena.client import read_code

    code = read_code(file)
    with _client(server, _token(token)) as client:
        done = client.submit(problem, code, name or file.name, derived_from, publish)
        if not as_json:
            what = "submitted" if done["is_new"] else "was submitted before"
            print(f"#{done['id']} {what}: {client.server}{done['url']}")
        states: list[dict[str, Any]] = []
        for states in client.states(done["id"]) if wait else ():
            if not as_json:
                print(", ".join(f"{one['board']}: {one['state']} {one['reason']}".rstrip() for one in states))
        if as_json:
            print(json.dumps(client.submission(done["id"])))
        if any(one["state"] == "refused" for one in states):
            raise typer.Exit(1)


@app.command(short_help="Show a board.", cls=Command)
def board(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="Name of the problem.")],
    name: Annotated[
        str | None, typer.Argument(metavar="BOARD", help="e.g. h200, or 'h200 predicted'.", show_default="the first")
    ] = None,
    server: Server = SERVER,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show the entries of a board, the best first."""
    with _client(server, _token(token)) as client:
        chosen = name or client.problem(problem)["boards"][0]
        found = client.board(problem, chosen)
    if as_json:
        for entry in found["entries"]:
            print(json.dumps(entry))
        return
    shown = table(
        "rank", "author", "name", right=("us", "ceiling", "over eager"), last=("date",), title=f"{problem}, {chosen}"
    )
    for e in found["entries"]:
        rank = f"{e['rank']}{'=' if e['is_tied'] else ''}" if e["rank"] else "unverified"
        share = f"{e['share']:.0%}" if e["share"] else ""
        speed = f"{e['over_eager']:.2f}x" if e["over_eager"] else ""
        shown.add_row(rank, e["author"], e["name"], f"{e['us']:.4g}", share, speed, e["date"][:10])
    console().print(shown)


@app.command(short_help="Download a board, or the archive.", cls=Command)
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    problem: Annotated[str | None, typer.Argument(metavar="PROBLEM", help="Problem.", show_default="archive")] = None,
    board_name: Annotated[
        str | None, typer.Option("--board", "-b", metavar="BOARD", help="Board.", show_default="the first")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="jsonl, csv or traces; jsonl or parquet of the archive.")
    ] = "jsonl",
    server: Server = SERVER,
    token: Token = None,
) -> None:
    """Write a board, or the whole archive, to a file."""
    from urllib.parse import quote

    with _client(server, _token(token)) as client:
        address = f"/api/archive/export?format={quote(form)}"
        if problem:
            chosen = board_name or client.problem(problem)["boards"][0]
            start = f"/api/problems/{quote(problem, safe='')}/boards/{quote(chosen, safe='')}"
            address = f"{start}/export?format={quote(form)}"
        part = file.with_name(f"{file.name}.part")
        try:
            with part.open("wb") as out:
                for data in client.download(address):
                    out.write(data)
            part.replace(file)
        except OSError as error:
            raise CannotWrite(file, error.strerror or str(error)) from None
        finally:
            part.unlink(missing_ok=True)
    print(f"wrote {file}")


@app.command("import", short_help="Add the results of another board as unverified.", cls=Command)
def import_board(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="Name of the problem.")],
    board_name: Annotated[str, typer.Argument(metavar="BOARD", help="Board that gets the entries.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines, CSV, or flashinfer-bench traces.")],
    origin: Annotated[str, typer.Option(metavar="NAME", help="Where the results come from.", show_default="file")] = "",
    data: Data = DATA,
    database: Database = None,
) -> None:
    """Add the results of another board, each once. They are shown as unverified and have no rank."""
    from tilewright.arena import exchange
    from tilewright.arena.service import Arena

    with _store(data, database) as store:
        arena = Arena(store)
        found = store.problem(problem, ADMINISTRATOR)
        chosen = arena.boards.require(found, board_name)
        count = exchange.import_entries(arena, found, chosen, file, origin or file.name)
    print(f"imported {count} new {'entry' if count == 1 else 'entries'} as unverified")


@problem_app.command("add", short_help="Add operations or problem files.", cls=Command)
def add_problem(
    targets: Annotated[
        list[str], typer.Argument(metavar="OP|PATH", help="Operation, problem file, or folder of problems.")
    ],
    data: Data = DATA,
    database: Database = None,
    board_names: Annotated[
        list[str] | None,
        typer.Option(
            "--board",
            "-b",
            metavar="BOARD",
            help="h200, or 'h200 predicted'. Repeatable.",
            show_default="this GPU, or 'h200 predicted'",
        ),
    ] = None,
    case: Annotated[list[str] | None, typer.Option("--case", "-c", metavar="CASE", help="Timed case.")] = None,
    rule: Annotated[str, typer.Option("--rule", metavar="RULE", help="geomean, share or fast_p.")] = "geomean",
    threshold: Annotated[float, typer.Option("-p", min=0.0, metavar="P", help="Threshold of fast_p.")] = 1.0,
    deadline: Annotated[str, typer.Option(metavar="DATE", help="Last moment, e.g. 2027-01-31T18:00+01:00.")] = "",
    private: Annotated[
        list[str] | None, typer.Option("--private", metavar="NAME", help="Show it to this account only. Repeatable.")
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name, if not that of the file.")] = "",
) -> None:
    """Add problems, or replace those of the same name. One that does not load is reported and left out."""
    from tilewright.arena import problems

    boards = board_names or [_gpu() or f"h200{problems.PREDICTED}"]
    until = problems.parse_deadline(deadline)
    failed, paths = 0, [path for given in targets for path in _expanded(given)]
    if name and len(paths) > 1:
        raise typer.BadParameter(f"--name takes one problem, and these are {len(paths)}.")
    with _store(data, database) as store:
        for target in paths:
            try:
                fields = problems.describe(
                    target,
                    boards=boards,
                    cases=case or [],
                    rule=rule,
                    threshold=threshold,
                    deadline=until,
                    private=bool(private),
                    name=name,
                )
                store.add_problem(fields, private or [])
            except (CannotAddProblem, ProblemChanged) as error:
                warn(str(error))
                failed += 1
                continue
            print(f"added {fields['name']}: {fields['description']}")
    from tilewright import hardware

    for board in map(problems.Board.parse, boards):
        if not board.is_predicted and board.gpu not in hardware.DATASHEETS:
            warn(f"no GPU named '{board.gpu}' is known; its board waits until a worker on such a GPU pulls its jobs")
    if failed:
        raise typer.Exit(2)
    say_next(f"tilewright arena serve --data {data}")


@problem_app.command("list", short_help="List the problems.", cls=Command)
def list_problems(data: Data = DATA, database: Database = None, as_json: AsJson = False) -> None:
    """List the problems of an arena."""
    shown = table("problem", "kind", "rule", "boards", last=("deadline", "private"))
    with _store(data, database) as store:
        for one in store.problems(ADMINISTRATOR):
            if as_json:
                print(json.dumps({key: value for key, value in one.items() if key != "files"}))
            private = "yes" if one["private"] else ""
            shown.add_row(one["name"], one["kind"], one["rule"], ", ".join(one["boards"]), one["deadline"], private)
    if not as_json:
        console().print(shown)


@token_app.command("add", short_help="Make a token.", cls=Command)
def add_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the account.")],
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="submit, worker or admin.")] = "submit",
    data: Data = DATA,
    database: Database = None,
) -> None:
    """Make an account, or renew a revoked one; print its token, which is not stored and cannot be shown again."""
    from tilewright.arena import auth

    with _store(data, database) as store:
        print(auth.add_token(store, name, role))


@token_app.command("list", short_help="List the accounts.", cls=Command)
def list_tokens(data: Data = DATA, database: Database = None) -> None:
    """List the accounts of an arena."""
    from tilewright.arena import auth

    shown = table("account", "role", "created", last=("state",))
    with _store(data, database) as store:
        for one in auth.listed(store):
            shown.add_row(one["name"], one["role"], one["created"][:10], "revoked" if one["revoked"] else "")
    console().print(shown)


@token_app.command("revoke", short_help="Revoke a token.", cls=Command)
def revoke_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the account.")],
    data: Data = DATA,
    database: Database = None,
) -> None:
    """Revoke the token of an account and end its sessions. Its submissions stay."""
    from tilewright.arena import auth

    with _store(data, database) as store:
        auth.revoke(store, name)
    print(f"revoked {name}")


@contextlib.contextmanager
def _store(data: Path, database: str | None) -> Iterator[Store]:
    from sqlalchemy.exc import OperationalError

    from tilewright.arena.server import open_store
    from tilewright.arena.store import explain

    store = open_store(data, database)
    try:
        yield store
    except OperationalError as error:  # a full disk, or a database that may only be read
        raise ArenaDatabase(store.engine.url, explain(error)) from None
    finally:
        store.close()


def _client(server: str, token: str) -> Client:
    from tilewright.arena.client import Client

    return Client(server, token)


def _token(given: str | None) -> str:
    if given and given != "-":
        _hide_token(given)
    return sys.stdin.readline().strip() if given else settings.arena_token()


def _hide_token(token: str) -> NoReturn:
    """Start this program again with the token in a pipe: every process can read the arguments of every other."""
    out, into = os.pipe()
    os.write(into, f"{token}\n".encode())
    os.dup2(out, 0)
    words = [("-" if word == token else word.replace(f"--token={token}", "--token=-")) for word in sys.argv[1:]]
    os.set_inheritable(into, True)  # at its end the worker would stop
    os.execv(sys.executable, [sys.executable, "-m", "tilewright", *words])


def _interrupt() -> None:
    raise KeyboardInterrupt


def _gpu() -> str | None:
    from tilewright import hardware
    from tilewright.cli.shared import GPU_DEVICES

    if not any(os.path.exists(path) for path in GPU_DEVICES) or not hardware.has_gpu():
        return None
    return hardware.current_gpu()["gpu"]


def _expanded(target: str) -> list[str]:
    """Return the problems that a target names: a folder without task.yml holds several."""
    path = Path(target)
    if target in source.op_files() or not path.is_dir() or (path / "task.yml").is_file():
        return [target]
    found = [str(one.parent) for one in sorted(path.rglob("task.yml"))]
    found = found or [str(one) for one in sorted(path.rglob("definitions/**/*.json"))]
    return found or [str(one) for one in sorted(path.rglob("*.py"))] or [target]

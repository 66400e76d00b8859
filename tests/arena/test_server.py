"""Pages and API: bad input is answered in one line, private things stay private, output is escaped."""

import contextlib
import csv
import io
import json
import socket
import sqlite3
import time

import pytest
import sqlalchemy as sa
from sqlalchemy import exc
from starlette.testclient import TestClient
from typer.testing import CliRunner

from arena.arenas import BOARD, CODE, judged, problem_fields, result, running
from tilewright import source
from tilewright.arena import archive, auth, exchange, server, web
from tilewright.arena import tables as t
from tilewright.arena.auth import RateLimit
from tilewright.arena.errors import (
    ArenaDatabase,
    ArenaExposed,
    ArenaInUse,
    BadAccount,
    CannotImport,
    PasswordExposed,
    ProblemChanged,
    UnknownProblem,
)
from tilewright.arena.server import application, locked, open_store, serve
from tilewright.arena.service import MAX_CODE, Arena, named_techniques, techniques
from tilewright.cli import app
from tilewright.errors import CannotWrite


@pytest.fixture
def arena(tmp_path):
    arena = Arena(open_store(tmp_path))
    arena.store.add_problem(problem_fields())
    yield arena
    arena.store.close()


@pytest.fixture
def client(arena):
    with TestClient(application(arena), base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def post(client, code=CODE, headers=None, problem="softmax", **more):
    return client.post(f"/api/problems/{problem}/submissions", json={"code": code, **more}, headers=headers)


def one_line(answer, status):
    assert answer.status_code == status, answer.text
    line = answer.json()["error"]
    assert line
    assert "\n" not in line
    return line


def test_a_submission_is_judged_and_ranked(client, arena):
    number = post(client, name="mine.py").json()["id"]
    job = client.post("/api/jobs/lease", json={"worker": "w", "gpu": None}).json()["job"]
    assert job["submission"] == {"id": number, "code": CODE}
    assert client.post("/api/jobs/lease", json={"worker": "w"}).json() == {"job": None}
    done = client.post(f"/api/jobs/{job['job']}/result", json={"lease": job["lease"], "result": result(8.0)})
    assert done.json() == {"state": "ranked"}
    again = client.post(f"/api/jobs/{job['job']}/result", json={"lease": job["lease"], "result": result(1.0)})
    assert again.json() == {"state": "ranked"}
    assert "code_hash" not in client.get(f"/api/submissions/{number}").json()
    (entry,) = client.get(f"/api/problems/softmax/boards/{BOARD}").json()["entries"]
    assert (entry["rank"], entry["us"], entry["name"]) == (1, 8.0, "mine.py")
    page = client.get(f"/submissions/{number}").text
    assert "Isolation: seccomp." in page
    assert "mine.py" in client.get(f"/problems/softmax/boards/{BOARD}").text


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("x" * (MAX_CODE + 1), "limit"),
        ("PK\x03\x04 and more", "zip"),
        ("a = 1\0", "null byte"),
        ("  \n", "empty"),
        ("\ud800", "UTF-8"),
    ],
)
def test_a_bad_submission_is_answered_in_one_line(client, arena, code, why):
    body = json.dumps({"code": code})
    headers = {"Content-Type": "application/json"}
    assert why in one_line(client.post("/api/problems/softmax/submissions", content=body, headers=headers), 400)
    assert arena.store.queue_length() == {}


def test_a_hundred_megabytes_are_refused_before_they_are_read(tmp_path):
    with running(tmp_path) as (address, arena):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            head = f"POST /api/problems/softmax/submissions HTTP/1.1\r\nHost: {host}:{port}\r\n"
            raw.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {100 * 2**20}\r\n\r\n".encode())
            assert b"413" in raw.recv(4096)
        with socket.create_connection((host, int(port))) as raw:  # and without a length
            raw.sendall(f"{head}Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            assert b"411" in raw.recv(4096)
        assert arena.store.queue_length() == {}


def test_a_client_that_sends_everything_first_reads_why_it_was_refused(tmp_path):
    with running(tmp_path) as (address, _):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            head = f"POST /api/problems/softmax/submissions HTTP/1.1\r\nHost: {host}:{port}\r\n"
            raw.sendall(f"{head}Content-Length: {2**24}\r\n\r\n".encode() + b"x" * 2**24)
            assert b"413" in raw.recv(4096)


@pytest.mark.parametrize("sent", ["", "GET / HTTP/1.1\r\nHo", "POST /login HTTP/1.1\r\nContent-Length: 9\r\n\r\nx"])
def test_a_client_too_slow_to_send_a_request_is_disconnected(tmp_path, monkeypatch, sent):
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.1)
    with running(tmp_path) as (address, _):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as raw:
            raw.sendall(sent.encode())
            received = [*iter(lambda: raw.recv(4096), b"")]  # until it is closed; the timeout would raise
    assert not any(b"200 OK" in part for part in received)


def test_connections_leave_files_for_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "max_connections", lambda: 1)
    with running(tmp_path) as (address, _):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as first:
            with socket.create_connection((host, int(port))) as second, contextlib.suppress(ConnectionResetError):
                assert second.recv(4096) == b""
            first.sendall(f"GET /api/status HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            assert b"200" in first.recv(4096)


def test_a_client_that_disconnects_leaves_nothing_behind(tmp_path):
    with running(tmp_path) as (address, arena):
        host, port = address.removeprefix("http://").split(":")
        head = f"POST /api/problems/softmax/submissions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        head += 'Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"code": "x'
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(head.encode())
        judged(arena, CODE)
        with socket.create_connection((host, int(port))) as raw:  # while it watches
            raw.sendall(f"GET /api/submissions/1/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            assert b"ranked" in raw.recv(4096) + raw.recv(4096)
        assert arena.store.queue_length() == {"ranked": 1}


def test_a_full_disk_is_answered_and_logged_in_one_line(client, arena, monkeypatch):
    logged = []
    monkeypatch.setattr(web.log, "warning", logged.append)
    with arena.store.write() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    sa.event.listen(arena.store.engine, "connect", lambda c, _: c.execute(f"PRAGMA max_page_count={pages + 2}"))
    arena.store.engine.dispose()
    with TestClient(client.app, base_url="http://localhost") as strict:  # raises what the server would log with a stack
        assert "disk is full" in one_line(post(strict, "#" * 200_000), 507)
    assert logged == [web.DISK_FULL]
    assert post(client, "x = 1").status_code == 201


def test_other_errors_of_the_database_keep_their_stack(arena, monkeypatch):
    def locked(*_, **__):
        raise sa.exc.OperationalError("select 1", {}, Exception("database is locked"))

    monkeypatch.setattr(arena.store, "submit", locked)
    with TestClient(application(arena), base_url="http://localhost") as strict, pytest.raises(sa.exc.OperationalError):
        post(strict)


def test_two_submissions_with_the_same_name_are_two(client):
    first, second = (post(client, f"x = {n}", name="same.py").json()["id"] for n in (1, 2))
    assert (first, second) == (1, 2)
    assert post(client, "x = 1", name="other.py").json()["id"] == first


@pytest.mark.parametrize(
    ("method", "address", "body", "status"),
    [
        ("GET", "/api/problems/softmaks", None, 404),
        ("GET", "/api/submissions/99", None, 404),
        ("GET", "/api/submissions/x", None, 404),
        ("GET", "/api/problems/softmax/boards/h900", None, 404),
        ("GET", "/api/problems/softmax/boards/h200 predicted/export?format=xls", None, 400),
        ("GET", "/api/archive?min_share=many", None, 400),
        ("GET", "/api/nothing", None, 404),
        ("POST", "/api/problems/softmax/submissions", {}, 400),
        ("POST", "/api/problems/softmax/submissions", {"code": 7}, 400),
        ("POST", "/api/problems/softmax/submissions", {"code": None}, 400),
        ("POST", "/api/problems/softmax/submissions", {"code": "x", "derived_from": 99}, 404),
        ("POST", "/api/problems/softmax/submissions", {"code": "x", "derived_from": 10**30}, 404),
        ("POST", "/api/problems/softmax/submissions", {"code": "x", "derived_from": -1}, 404),
        ("POST", "/api/problems/softmax/submissions", {"code": "x", "derived_from": True}, 400),
        ("GET", "/api/submissions/999999999999999", None, 404),
        ("POST", "/api/problems/softmax/submissions", ["x"], 400),
        ("POST", "/api/jobs/7/result", {"lease": "x", "result": {"ranked": False}}, 409),
        ("POST", "/api/jobs/7/renew", {"lease": None}, 400),
        ("POST", "/api/problems", {}, 405),
    ],
)
def test_a_bad_request_is_answered_in_one_line(client, method, address, body, status):
    one_line(client.request(method, address, json=body), status)


@pytest.mark.parametrize(
    "spoiled",
    [
        {},
        {"ranked": True, "reason": ""},
        {"ranked": True, "reason": "", "timing": None},
        {"ranked": "yes", "reason": ""},
        result(float("nan")),
        result(float("inf")),
        result(-1.0),
        result() | {"timing": result()["timing"] | {"cases": []}},
        result() | {"timing": result()["timing"] | {"against_leader": {"ratio": 0, "low": 0, "high": 0}}},
        result() | {"timing": result()["timing"] | {"cases": [{"us": 1.0, "low": 1.0, "high": 1.0}]}},
    ],
)
def test_a_result_without_usable_figures_is_refused(client, arena, spoiled):
    post(client)
    job = client.post("/api/jobs/lease", json={}).json()["job"]
    body = json.dumps({"lease": job["lease"], "result": spoiled})
    headers = {"Content-Type": "application/json"}
    one_line(client.post(f"/api/jobs/{job['job']}/result", content=body, headers=headers), 400)
    assert arena.store.queue_length() == {"checking": 1}
    good = {"lease": job["lease"], "result": result()}
    assert client.post(f"/api/jobs/{job['job']}/result", json=good).json() == {"state": "ranked"}


def test_an_error_lists_some_of_many_names():
    line = str(UnknownProblem("xyz", [f"{n}_KernelBench" for n in range(250)]))
    assert line.endswith(" and 190 others")
    assert len(line) < 1200


def test_secrets_are_compared_whatever_they_are(client, arena):
    post(client)
    job = client.post("/api/jobs/lease", json={}).json()["job"]["job"]
    for lease in ("é", "\ud800", ""):
        body = json.dumps({"lease": lease})
        headers = {"Content-Type": "application/json"}
        one_line(client.post(f"/api/jobs/{job}/renew", content=body, headers=headers), 409)
    arena.guard = auth.Guard(arena.store, "the worker's token")
    one_line(client.get("/api/problems", headers={"Authorization": b"Bearer \xe9"}), 401)
    assert client.get("/", headers={"Cookie": b"arena=\xe9"}).status_code == 200


def test_long_names_are_cut(client):
    number = post(client, name="n" * 5000).json()["id"]
    assert client.get(f"/api/submissions/{number}").json()["name"] == "n" * 80


def test_pages_answer_errors_too(client):
    for address, status in (("/nothing", 404), ("/problems/none", 404), ("/submissions/0x1", 404)):
        answer = client.get(address)
        assert answer.status_code == status
        assert '<p class="error">' in answer.text
    unbounded = client.post("/login", content=b"x", headers={"Content-Type": "multipart/form-data"})
    assert unbounded.status_code == 400
    assert '<p class="error">Missing boundary' in unbounded.text
    large = client.post("/problems/softmax/submit", content=b"x" * 2**21)
    assert large.status_code == 413
    assert '<p class="error">The request has 2097152 bytes' in large.text


def test_a_page_beyond_the_last_is_the_last(client, arena):
    judged(arena, "x = 1", name="mine.py")
    assert "mine.py" in client.get(f"/problems/softmax/boards/{BOARD}?page=99").text


def test_a_data_folder_is_closed_to_other_users(tmp_path):
    open_store(tmp_path / "data").close()
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0


def test_a_second_server_on_the_same_folder_is_refused(tmp_path):
    with locked(tmp_path), pytest.raises(ArenaInUse, match="another server"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_data_folder_that_submissions_could_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArenaExposed, match="choose another --data"):
        serve(tmp_path / "data", "127.0.0.1", 0, workers=1)
    assert not (tmp_path / "data").exists()


def test_a_password_that_submissions_could_read_is_refused(tmp_path):
    for name in ("arena:secret@localhost", ":secret@/arena"):
        with pytest.raises(PasswordExposed, match="pgpass"):
            serve(tmp_path, "127.0.0.1", 0, workers=1, url=f"postgresql+psycopg://{name}/arena")
    with pytest.raises(ArenaDatabase):  # it gets as far as the database
        serve(tmp_path, "127.0.0.1", 0, workers=1, url="postgresql+psycopg://arena@localhost:1/arena")


def test_a_link_to_a_readable_folder_hides_nothing(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.syspath_prepend(tmp_path / "link")
    with pytest.raises(ArenaExposed):
        serve(tmp_path / "link" / "data", "127.0.0.1", 0, workers=1)


def test_a_data_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "server.lock").mkdir(parents=True)
    for folder in ("file", "folder"):
        with pytest.raises(CannotWrite), locked(tmp_path / folder):
            pass


# Accounts


@pytest.fixture
def tokens(arena):
    return {role: auth.add_token(arena.store, role, role) for role in ("submit", "worker", "admin")} | {
        "other": auth.add_token(arena.store, "other", "submit")
    }


def test_tokens_are_hashed_and_decide_rights(client, arena, tokens):
    stored = json.dumps(arena.store.rows(sa.select(t.accounts)))
    assert not any(token in stored for token in tokens.values())
    assert one_line(post(client), 403)
    assert one_line(post(client, headers=bearer("tw_wrong")), 401)
    assert one_line(post(client, headers=bearer(tokens["worker"])), 403)
    assert post(client, headers=bearer(tokens["submit"])).status_code == 201
    assert one_line(client.post("/api/jobs/lease", json={}, headers=bearer(tokens["submit"])), 403)
    assert client.post("/api/jobs/lease", json={}, headers=bearer(tokens["worker"])).json()["job"]
    auth.revoke(arena.store, "submit")
    assert one_line(post(client, headers=bearer(tokens["submit"])), 401)
    with pytest.raises(BadAccount):
        auth.add_token(arena.store, "admin", "admin")
    with pytest.raises(BadAccount):
        auth.add_token(arena.store, "<script>", "admin")


def test_a_command_names_a_database_that_cannot_be_written(tmp_path, monkeypatch):
    def read_only(*_):
        raise exc.OperationalError("insert", {}, sqlite3.OperationalError("attempt to write a readonly database"))

    monkeypatch.setattr(auth, "add_token", read_only)
    done = CliRunner().invoke(app, ["arena", "token", "add", "ann", "--data", str(tmp_path)])
    assert isinstance(done.exception, ArenaDatabase)
    assert "attempt to write a readonly database; give another --data" in str(done.exception)


def test_revoking_the_last_token_opens_nothing(client, arena):
    first = auth.add_token(arena.store, "only", "admin")
    number = post(client, headers=bearer(first)).json()["id"]
    auth.revoke(arena.store, "only")
    assert one_line(post(client, "x = 2"), 403)
    assert client.get("/", headers={"Host": "arena.example"}).status_code == 200
    second = bearer(auth.add_token(arena.store, "only", "submit"))
    assert client.get(f"/api/submissions/{number}", headers=second).json()["is_own"], "it is the same account"
    assert one_line(post(client, headers=bearer(first)), 401)


def test_others_see_neither_code_nor_evidence(client, arena, tokens):
    number = post(client, headers=bearer(tokens["submit"])).json()["id"]
    worker = bearer(tokens["worker"])
    job = client.post("/api/jobs/lease", json={}, headers=worker).json()["job"]
    finished = {"lease": job["lease"], "result": result()}
    client.post(f"/api/jobs/{job['job']}/result", json=finished, headers=worker)
    address = f"/api/submissions/{number}"
    for headers in (bearer(tokens["other"]), None):
        seen = client.get(address, headers=headers).json()
        assert seen["code"] is None
        assert seen["jobs"][0]["result"] is None
        assert CODE.strip() not in client.get(f"/submissions/{number}", headers=headers).text
        assert all(k["author"] == "tilewright" for k in archive.everything(arena, {"id": 4, "role": "submit"}))
    own = client.get(address, headers=bearer(tokens["submit"])).json()
    assert own["code"] == CODE
    assert own["jobs"][0]["result"]["verdict"]["isolation"] == ["seccomp"]
    assert "lease" not in own["jobs"][0]
    arena.publish({"id": 1, "role": "submit"}, number, True)
    seen = client.get(address, headers=bearer(tokens["other"])).json()
    assert (seen["code"], seen["jobs"][0]["result"]) == (CODE, None)


def test_a_private_problem_is_invisible_to_others(client, arena, tokens):
    arena.store.add_problem(problem_fields(name="secret", private=True), ["submit"])
    member, other = bearer(tokens["submit"]), bearer(tokens["other"])
    number = post(client, headers=member, problem="secret").json()["id"]
    assert "secret" in client.get("/", headers=member).text
    for headers in (other, None):
        assert "secret" not in client.get("/", headers=headers).text
        for address in ("/api/problems/secret", f"/api/submissions/{number}", f"/api/problems/secret/boards/{BOARD}"):
            assert "secret" not in one_line(client.get(address, headers=headers), 404).replace("named 'secret'", "")
    assert one_line(post(client, headers=other, problem="secret"), 404)
    assert one_line(post(client, headers=other, derived_from=number), 404)


def test_a_private_problem_names_accounts_that_exist(arena):
    with pytest.raises(BadAccount, match="no such account"):
        arena.store.add_problem(problem_fields(name="secret", private=True), ["nobody"])
    stored = arena.store.problems({"id": 0, "role": "admin"})
    assert [one["name"] for one in stored] == ["softmax"]


def test_forms_of_other_sites_are_refused(client, tokens):
    token = client.get("/login").text.split('name="form_token" value="')[1].split('"')[0]
    for forged in ("x" * 64, "é", ""):
        assert client.post("/login", data={"token": tokens["submit"], "form_token": forged}).status_code == 403
    assert client.post("/login", data={"token": "tw_no", "form_token": token}).status_code == 401
    logged_in = client.post("/login", data={"token": tokens["submit"], "form_token": token}, follow_redirects=False)
    assert logged_in.status_code == 303
    cookie = logged_in.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie, "a link on another site must not log anybody out"
    page = client.get("/problems/softmax").text
    own = page.split('name="form_token" value="')[1].split('"')[0]
    assert client.post("/problems/softmax/submit", data={"code": CODE, "form_token": token}).status_code == 403
    evil = {"Origin": "http://evil.example"}
    answer = client.post("/problems/softmax/submit", data={"code": CODE, "form_token": own}, headers=evil)
    assert answer.status_code == 403
    outside = client.post("/logout", headers=evil | {"Cookie": ""})  # a browser sends no cookie with it
    assert "set-cookie" not in outside.headers, "it would log the person out"
    assert "Log out" in client.get("/nothing").text
    done = client.post("/problems/softmax/submit", data={"code": CODE, "form_token": own}, follow_redirects=False)
    assert done.headers["location"] == "/submissions/1"


def test_a_session_ends(client, arena, tokens):
    session = arena.guard.log_in(tokens["submit"])
    assert arena.guard.account("", session)["name"] == "submit"
    with arena.store.write() as connection:
        connection.execute(t.sessions.update().values(created="2020-01-01T00:00:00+00:00"))
    assert arena.guard.account("", session) is None
    arena.guard.log_in(tokens["submit"])
    assert len(arena.store.rows(sa.select(t.sessions))) == 1, "the ended one is gone"


def test_without_tokens_only_this_machine_is_served(client):
    assert client.get("/", headers={"Host": "localhost:8640"}).status_code == 200
    for host in ("evil.example", "localhost.evil.example", "[::1", ""):
        assert "localhost only" in one_line(client.get("/api/problems", headers={"Host": host}), 403)
    for origin in ("http://evil.example", "http://[::1", "null"):
        assert one_line(client.post("/api/jobs/lease", json={}, headers={"Origin": origin}), 403)
    plain = client.post(
        "/api/problems/softmax/submissions", content='{"code": "x"}', headers={"Content-Type": "text/plain"}
    )
    assert one_line(plain, 415)  # what a page of another site can send without a preflight


def test_submissions_are_limited_per_account(client, arena, tokens):
    arena.submission_limit = RateLimit(2, 3600.0)
    mine = bearer(tokens["submit"])
    assert [post(client, f"x = {n}", mine).status_code for n in range(3)] == [201, 201, 429]
    assert post(client, "x = 9", bearer(tokens["other"])).status_code == 201


def test_a_rate_limit_forgets():
    now = [0.0]
    limit = RateLimit(2, 10.0, lambda: now[0])
    assert [limit.wait_seconds("a"), limit.wait_seconds("a"), limit.wait_seconds("a")] == [0.0, 0.0, 10.0]
    assert limit.wait_seconds("b") == 0.0
    now[0] = 10.0
    assert limit.wait_seconds("a") == 0.0


def test_a_closed_problem_takes_no_submissions(client, arena):
    arena.store.add_problem(problem_fields(deadline="2020-01-01T00:00:00+00:00"))
    assert "has taken no submissions" in one_line(post(client), 409)
    page = client.get("/problems/softmax").text
    assert "closed since 2020-01-01 00:00 UTC" in page
    assert "<form" not in page


def test_a_problem_with_submissions_stays_what_it_is(client, arena):
    arena.store.add_problem(problem_fields(cases=["M=8,N=8"], boards=[BOARD, "a100"]))
    number = post(client).json()["id"]
    with pytest.raises(ProblemChanged, match="its cases cannot change"):
        arena.store.add_problem(problem_fields(boards=[BOARD]))
    arena.store.add_problem(problem_fields(cases=["M=8,N=8"], rule="share", boards=[BOARD]))
    states = [(job["board"], job["state"]) for job in arena.store.states(number)]
    assert states == [(BOARD, "queued"), ("a100", "refused")]


def test_the_advice_for_every_case_is_shown(client, arena):
    post(client)
    job = client.post("/api/jobs/lease", json={}).json()["job"]
    about = {"case": "M=4,N=8", "dtype": "bfloat16", "bottleneck": "memory", "launches": []}
    cases = [about | {"summary": ["Moves twice the bytes."], "advice": [word]} for word in ("cache rows", "use TMA")]
    body = {"lease": job["lease"], "result": result() | {"analysis": {"cases": cases, "isolation": []}}}
    assert client.post(f"/api/jobs/{job['job']}/result", json=body).json() == {"state": "ranked"}
    page = client.get("/submissions/1").text
    assert "Next: cache rows." in page
    assert "Next: use TMA." in page


EVIL = "<script>alert(1)</script>\"'"


def test_output_is_escaped(client, arena):
    number = judged(arena, f"# {EVIL}\n", name=EVIL)
    second = arena.submit(arena.guard.account("", ""), "softmax", EVIL, b"y = 1")["id"]
    job = arena.lease(arena.guard.account("", ""), EVIL, None)
    arena.finish(arena.guard.account("", ""), job["job"], job["lease"], {"ranked": False, "reason": EVIL})
    board = f"/problems/softmax/boards/{BOARD}"
    for address in ("/", board, f"/submissions/{number}", f"/submissions/{second}", "/archive", f"/archive/{number}"):
        answer = client.get(address)
        assert answer.status_code == 200
        assert "<script>alert" not in answer.text
        assert "&lt;script&gt;" in answer.text
        assert "script-src 'self'" in answer.headers["content-security-policy"]


def test_a_forged_analysis_is_only_text(client, arena):
    """It comes from the process of the submission, which may answer anything of the right form."""
    launch = {"kernel": EVIL, "registers": EVIL, "spills": None}
    case = {"case": "M=4", "us": 1.0, "summary": [EVIL], "advice": [], "bottleneck": EVIL, "launches": [launch]}
    odd = [{"flops": EVIL, "intensity": None, "ridge": []}, {"flops": 2e6, "intensity": 0.25, "ridge": 4}, None]
    number = arena.submit(arena.guard.account("", ""), "softmax", "a.py", b"y = 1")["id"]
    job = arena.lease(arena.guard.account("", ""), "w", None)
    found = result() | {"analysis": {"cases": [case | {"roofline": one} for one in odd]}}
    arena.finish(arena.guard.account("", ""), job["job"], job["lease"], found)
    page = client.get(f"/submissions/{number}").text
    assert "<script>alert" not in page
    assert '<td class="number">0.25<td class="number">4<td class="number">2\n' in page


def test_states_are_sent_as_events(client, arena):
    post(client)
    account = arena.guard.account("", "")
    job = arena.lease(account, "w", None)
    arena.finish(account, job["job"], job["lease"], {"ranked": False, "reason": "wrong"})
    with client.stream("GET", "/api/submissions/1/events") as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data:")]
    assert json.loads(lines[-1].removeprefix("data:")) == [{"board": BOARD, "state": "refused", "ahead": None}]


# Exchange and archive


def test_exports_and_imports(client, arena, tmp_path):
    judged(arena, "x = 1", 10.0, name="=cmd()", published=True)
    judged(arena, "x = 2", 20.0, derived_from=1)
    board = f"/api/problems/softmax/boards/{BOARD}/export"
    lines = client.get(f"{board}?format=jsonl").text
    assert [json.loads(line)["us"] for line in lines.splitlines()] == [10.0, 20.0]
    rows = [*csv.DictReader(io.StringIO(client.get(f"{board}?format=csv").text))]
    assert rows[0]["name"] == "'=cmd()"
    traces = client.get(f"{board}?format=traces").text
    first = json.loads(traces.splitlines()[0])
    assert first["workload"]["axes"] == {"M": 4, "N": 8}
    assert first["evaluation"]["performance"] == {
        "latency_ms": 0.01, "reference_latency_ms": 0.02, "speedup_factor": 2.0
    }  # fmt: skip
    problem = arena.store.problem("softmax", None)
    for name, text, count in (("a.jsonl", lines, 2), ("b.jsonl", traces, 2), ("c.csv", "us,author\n3,eve\n", 1)):
        (tmp_path / name).write_text(text)
        assert exchange.import_entries(arena, problem, BOARD, tmp_path / name, "elsewhere") == count
        assert exchange.import_entries(arena, problem, BOARD, tmp_path / name, "elsewhere") == 0, "each once"
    entries = client.get(f"/api/problems/softmax/boards/{BOARD}").json()["entries"]
    assert [(e["rank"], e["verified"]) for e in entries] == [(1, True), (2, True)] + [(None, False)] * 5
    assert arena.boards.leader(problem, BOARD)["us"] == 10.0


BAD_LINES = ("{", '{"us": "fast"}', '{"us": -1}', '{"us": 1}\n[]', '{"us": 1, "date": "soon"}')
BAD_TABLES = ("author\nann\n", "us,author\n1," + 200_000 * "x")


@pytest.mark.parametrize(("name", "text"), [*(("a.jsonl", x) for x in BAD_LINES), *(("a.csv", x) for x in BAD_TABLES)])
def test_a_bad_import_changes_nothing(arena, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    problem = arena.store.problem("softmax", None)
    with pytest.raises(CannotImport, match="nothing was imported"):
        exchange.import_entries(arena, problem, BOARD, tmp_path / name, "elsewhere")
    assert arena.boards.ranked(problem, BOARD) == []


def test_the_archive_finds_kernels_by_problem_technique_and_share(client, arena):
    judged(arena, "import triton\n@triton.jit\ndef f(): pass", 6.0, published=True)
    judged(arena, "x = 2", 50.0, published=True, derived_from=1)
    found = client.get("/api/archive?problem=softmax&technique=triton&min_share=0.5").json()["kernels"]
    assert "1" in [one["id"] for one in found]
    assert "2" not in [one["id"] for one in found]
    assert all(one["share"] >= 0.5 and one["problem"] == "softmax" for one in found)
    ours = [one for one in found if one["author"] == "tilewright"]
    assert ours
    assert "tl.load" in ours[0]["code"]
    assert client.get("/api/archive?q=nowhere-to-be-found").json()["kernels"] == []
    lines = client.get("/api/archive/export").text.splitlines()
    last = json.loads(lines[-1])
    assert (last["derived_from"], set(last)) == ("1", set(archive.COLUMNS))
    assert client.get(f"/archive/{ours[0]['id']}").status_code == 200
    evidence = client.get("/api/archive/1").json()
    assert evidence["verdict"]["isolation"] == ["seccomp"]
    assert evidence["timing"][0]["us"] == 6.0
    assert one_line(client.get("/api/archive/99"), 404)


def test_techniques_of_our_kernels_are_those_of_the_form_that_is_timed():
    matmul = source.read(source.op_files()["matmul"])
    found = {name: named_techniques(matmul.kernel_code(name)) for name in ("cuda-naive", "triton", "gluon-pingpong")}
    assert "cuda" in found["cuda-naive"]
    assert not {"triton", "gluon", "tensor cores", "TMA"} & {*found["cuda-naive"]}
    assert "tensor cores" in found["triton"]
    assert "TMA" not in found["triton"]
    assert {"gluon", "tensor cores", "TMA"} <= {*found["gluon-pingpong"]}


def test_techniques_are_those_of_the_code():
    code = '"""Unlike torch.compile."""\nimport triton  # not persistent\n@triton.jit\ndef f(x):\n    tl.dot(x, x)\n'
    assert techniques(code) == ["triton", "tensor cores"]
    assert techniques('SOURCE = "__global__ void f() {}"') == ["cuda"]
    assert techniques("def scale(x, gamma):\n    'A tl.dot.'\n    return x * gamma.float()\n") == []
    assert techniques("@triton.jit def broken(") == ["triton"]


def test_the_archive_is_one_parquet_file(client, arena):
    parquet = pytest.importorskip("pyarrow.parquet")
    judged(arena, "x = 2", 50.0, published=True)
    table = parquet.read_table(io.BytesIO(client.get("/api/archive/export?format=parquet").content))
    assert set(table.column_names) == set(archive.COLUMNS)
    assert table.num_rows == len(client.get("/api/archive/export").text.splitlines())


def test_entries_of_another_process_are_found_in_any_order(arena):
    problem = arena.store.problem("softmax", None)
    row = {"problem": problem["id"], "board": BOARD, "date": t.now(), "verified": False}
    for number, count in ((1, 1), (5, 2), (3, 3)):
        with arena.store.write() as connection:
            times = dict.fromkeys(("us", "low_us", "high_us"), float(number))
            connection.execute(t.entries.insert().values(id=number, **row, **times))
        ranked = arena.boards.ranked(problem, BOARD)
        assert len(ranked) == count
        assert arena.boards.ranked(problem, BOARD) is ranked, "it is cached"
    assert [one.entry["id"] for one in ranked] == [1, 3, 5]


@pytest.mark.slow
def test_a_board_of_ten_thousand_entries_is_fast(client, arena):
    problem = arena.store.problem("softmax", None)
    row = {"problem": problem["id"], "board": BOARD, "author": "a", "name": "n", "share": 0.5, "gpu": "h200"}
    many = [row | {"us": 10.0 + n, "low_us": 9.9 + n, "high_us": 10.1 + n, "date": t.now()} for n in range(10_000)]
    with arena.store.write() as connection:
        connection.execute(t.entries.insert(), [one | {"verified": True} for one in many])
    times = []
    for _ in range(4):
        judged(arena, f"x = {len(times)}")
        started = time.perf_counter()
        assert client.get(f"/problems/softmax/boards/{BOARD}").status_code == 200
        times.append(time.perf_counter() - started)
    assert min(times) < 0.3
    assert "Page 101 of 101" in client.get(f"/problems/softmax/boards/{BOARD}?page=101").text

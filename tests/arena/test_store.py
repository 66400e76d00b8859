"""The queue: nothing is lost, nothing is judged twice, and clocks that jump change nothing."""

import threading

import pytest
import sqlalchemy as sa

from arena.databases import postgresql
from tilewright.arena import tables as t
from tilewright.arena.errors import ArenaDatabase, ArenaInUse, LeaseLost, UnknownSubmission
from tilewright.arena.store import LEASE_SECONDS, MAX_ATTEMPTS, Store, sqlite_url

ALICE, BOB = {"id": 1, "name": "alice", "role": "submit"}, {"id": 2, "name": "bob", "role": "submit"}
BOARD = "h200 predicted"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="module")
def server():
    with postgresql() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request, tmp_path, clock):
    url = request.getfixturevalue("server") if request.param == "postgresql" else sqlite_url(tmp_path)
    store = Store(url, clock)
    store.add_problem(problem_fields())
    yield store
    if request.param == "postgresql":
        t.metadata.drop_all(store.engine)
    store.close()


def only_sqlite(store):
    if store.engine.dialect.name != "sqlite":
        pytest.skip("the file of a database")


def problem_fields(**more):
    fields = {"name": "softmax", "kind": "op", "description": "", "files": {"entry": "softmax"}, "cases": []}
    return fields | {"dtype": "", "boards": [BOARD], "rule": "geomean", "deadline": "", "private": False} | more


def submit(store, account=ALICE, code="x = 1", **more):
    return store.submit(store.problem("softmax", account), account, "kernel.py", code, **more)[0]


def entry(job, **more):
    fields = {"problem": job["problem"], "board": job["board"], "job": job["id"], "submission": job["submission"]}
    return fields | {"us": 1.0, "low_us": 0.9, "high_us": 1.1, "verified": True, "date": t.now()} | more


def test_a_job_passes_through_its_states(store):
    changes = []
    store.on_change = changes.append
    number = submit(store)
    assert [job["state"] for job in store.states(number)] == ["queued"]
    job = store.lease([BOARD], "w")
    assert [one["state"] for one in store.states(number)] == ["checking"]
    store.renew(job["id"], job["lease"], "timing")
    assert [one["state"] for one in store.states(number)] == ["timing"]
    assert store.finish(job["id"], job["lease"], {"ranked": True}, entry(job), "")
    assert [one["state"] for one in store.states(number)] == ["ranked"]
    assert changes == [number] * 4


def test_a_result_is_stored_once(store):
    submit(store)
    job = store.lease([BOARD], "w")
    assert store.finish(job["id"], job["lease"], {"n": 1}, entry(job), "")
    assert not store.finish(job["id"], job["lease"], {"n": 2}, entry(job), "")
    assert store.job(job["id"])["result"] == {"n": 1}
    assert len(store.rows(sa.select(t.entries))) == 1


def test_a_lease_that_ran_out_gives_the_job_to_another_worker(store, clock):
    submit(store)
    first = store.lease([BOARD], "dead")
    assert store.lease([BOARD], "other") is None
    clock.now += LEASE_SECONDS - 1
    store.renew(first["id"], first["lease"])
    clock.now += LEASE_SECONDS - 1
    assert store.lease([BOARD], "other") is None, "it was renewed"
    clock.now += 2
    second = store.lease([BOARD], "other")
    assert second["id"] == first["id"]
    with pytest.raises(LeaseLost):
        store.finish(first["id"], first["lease"], {}, None, "")
    with pytest.raises(LeaseLost):
        store.renew(first["id"], first["lease"])
    assert store.finish(second["id"], second["lease"], {}, None, "")


def test_a_restarted_server_gives_leases_their_full_time(store, clock):
    submit(store)
    job = store.lease([BOARD], "w")
    store.close()
    clock.now = -5e9  # another machine's monotonic clock
    again = Store(store.engine.url.render_as_string(hide_password=False), clock)
    assert again.lease([BOARD], "other") is None
    clock.now += LEASE_SECONDS - 1
    assert again.lease([BOARD], "other") is None
    assert again.finish(job["id"], job["lease"], {}, None, "")
    again.close()


def test_the_wall_clock_decides_nothing(store, monkeypatch):
    submit(store)
    job = store.lease([BOARD], "w")
    monkeypatch.setattr("tilewright.arena.store.now", lambda: "1970-01-01T00:00:00+00:00")
    assert store.lease([BOARD], "other") is None
    second = submit(store, BOB, "y = 1")
    assert store.finish(job["id"], job["lease"], {}, None, "")
    assert store.lease([BOARD], "other")["submission"] == second


def test_a_job_that_ends_its_judge_is_refused_at_last(store):
    number = submit(store)
    for _ in range(MAX_ATTEMPTS):
        job = store.lease([BOARD], "w")
        store.give_back(job["id"], job["lease"], "the judge's process ended")
    assert store.lease([BOARD], "w") is None
    (state,) = store.states(number)
    assert state["state"] == "refused"
    assert "3 attempts" in state["reason"]


def test_stopping_a_worker_does_not_count_as_an_attempt(store):
    submit(store)
    for _ in range(MAX_ATTEMPTS + 2):
        job = store.lease([BOARD], "w")
        store.give_back(job["id"], job["lease"], "stopped", counts=False)
    assert store.lease([BOARD], "w")


def test_authors_take_turns(store):
    for n in range(3):
        submit(store, ALICE, f"x = {n}")
    submit(store, BOB, "x = 9")
    authors = [store.lease([BOARD], "w")["account"] for _ in range(4)]
    assert authors == [1, 2, 1, 1]


def test_a_board_without_a_worker_keeps_nobody_waiting(store):
    store.add_problem(problem_fields(boards=[BOARD, "a100"]))
    for n in range(3):
        submit(store, ALICE, f"x = {n}")
        store.lease([BOARD], "w")
    submit(store, BOB, "x = 8")
    submit(store, BOB, "x = 9")
    submit(store, ALICE, "x = 3")
    assert [store.lease([BOARD], "w")["account"] for _ in range(3)] == [2, 1, 2]


def test_the_same_code_is_judged_for_a_board_that_was_added(store):
    number = submit(store)
    store.add_problem(problem_fields(boards=[BOARD, "a100"]))
    assert submit(store) == number
    assert [job["board"] for job in store.states(number)] == [BOARD, "a100"]
    assert submit(store) == number
    assert len(store.states(number)) == 2


def test_the_same_code_is_the_same_submission(store):
    problem = store.problem("softmax", ALICE)
    assert store.submit(problem, ALICE, "a.py", "x = 1") == (1, True)
    assert store.submit(problem, ALICE, "b.py", "x = 1") == (1, False)
    assert store.submit(problem, BOB, "a.py", "x = 1") == (2, True)
    assert store.submit(problem, ALICE, "a.py", "x = 2") == (3, True), "the same name is another submission"


def test_lineage_names_a_submission_that_exists(store):
    first = submit(store)
    second = submit(store, BOB, "y = 1", derived_from=first)
    assert store.submission(second)["derived_from"] == first
    with pytest.raises(UnknownSubmission):
        submit(store, BOB, "z = 1", derived_from=99)


def test_concurrent_workers_never_get_the_same_job(store):
    for n in range(60):
        submit(store, ALICE, f"x = {n}")
    got, lock = [], threading.Lock()

    def work():
        while job := store.lease([BOARD], "w"):
            with lock:
                got.append(job["id"])
            store.finish(job["id"], job["lease"], {}, None, "")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [*range(1, 61)]


def test_a_full_disk_loses_nothing(store):
    only_sqlite(store)
    number = submit(store)
    with store.write() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    sa.event.listen(store.engine, "connect", lambda c, _: c.execute(f"PRAGMA max_page_count={pages + 2}"))
    store.engine.dispose()
    with pytest.raises(sa.exc.OperationalError, match="full"):
        submit(store, BOB, "#" * 200_000)
    assert store.submission(number)["code"] == "x = 1"
    assert store.lease([BOARD], "w")["submission"] == number


def test_a_database_that_is_none(tmp_path):
    (tmp_path / "arena.sqlite").write_text("this is no database, but a text of some length" * 100)
    with pytest.raises(ArenaDatabase, match="not a database"):
        Store(sqlite_url(tmp_path))


def test_a_newer_schema_is_refused(store):
    with store.write() as connection:
        connection.execute(t.settings.update().where(t.settings.c.key == "schema").values(value="99"))
    with pytest.raises(ArenaDatabase, match="schema is 99"):
        Store(store.engine.url.render_as_string(hide_password=False))


def test_a_second_server_on_the_same_database_is_refused(store):
    if store.engine.dialect.name == "sqlite":
        pytest.skip("the data folder is locked instead")
    url = store.engine.url.render_as_string(hide_password=False)
    with store.held():
        other = Store(url)
        with pytest.raises(ArenaInUse, match="another server"), other.held():
            pass
        other.close()
    with store.held():
        pass


def test_long_texts_and_every_character(store):
    code = "# \u00e9 \U0001f600 \u2028 '; drop table jobs; --\n" + "x" * 200_000
    number = submit(store, code=code)
    assert store.submission(number)["code"] == code


def test_a_database_that_is_not_there():
    pytest.importorskip("psycopg")
    for url in (
        "postgresql+psycopg://arena:secret@127.0.0.1:9/none?connect_timeout=2",
        "nonsense://me:secret@here/none",
    ):
        with pytest.raises(ArenaDatabase, match="cannot be used") as refused:
            Store(url)
        assert "secret" not in str(refused.value)

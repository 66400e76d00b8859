"""Workers: jobs survive a judge that ends, hangs or fills its folder, and a server that restarts."""

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from arena.arenas import BOARD, problem_fields, result, running
from tilewright.arena import worker as module
from tilewright.arena.client import Client, read_code
from tilewright.arena.errors import ArenaNotReachable, ArenaRefused, BadSubmission
from tilewright.arena.service import Arena
from tilewright.arena.worker import JudgeLost, JudgeProcess, NotNow, Worker


@pytest.fixture
def served(tmp_path):
    with running(tmp_path) as found:
        yield found


def work(address, judge, **options):
    with Client(address) as client:
        lines = []
        count = Worker(client, judge, "test", say=lines.append, **options).run(threading.Event(), once=True)
    return count, lines


def test_a_worker_judges_until_there_is_no_job(served):
    address, _ = served
    with Client(address) as client:
        numbers = [client.submit("softmax", f"x = {n}")["id"] for n in range(3)]
        seen = []
        odd = {"reason": "fast\x1b[2J\nand odd"}  # must not reach the terminal as it is
        count, lines = work(address, lambda job, report: (report("timing"), seen.append(job), result() | odd)[-1])
        assert count == 3
        assert [job["submission"]["id"] for job in seen] == numbers
        assert lines[0] == "job 1: ranked fast [2J and odd"
        assert [one["state"] for one in next(client.states(numbers[0]))] == ["ranked"]
        assert client.board("softmax", BOARD)["total"] == 3


def test_a_judge_that_ends_gives_its_job_back_three_times(served):
    address, arena = served
    arena.submit(arena.guard.account("", ""), "softmax", "a.py", b"x = 1")
    calls = []

    def judge(job, report):
        calls.append(job["job"])
        raise JudgeLost("the judge's process ended with code -11")

    assert work(address, judge)[0] == 0
    assert calls == [1, 1, 1]
    (job,) = arena.store.submission(1)["jobs"]
    assert job["state"] == "refused"
    assert "code -11" in job["reason"]


def test_a_job_that_takes_too_long_is_refused_at_once(served):
    address, arena = served
    arena.submit(arena.guard.account("", ""), "softmax", "a.py", b"x = 1")

    def judge(job, report):
        raise JudgeLost("not judged within 2 s", is_final=True)

    assert work(address, judge)[0] == 1
    assert arena.store.states(1)[0]["reason"] == "not judged within 2 s"


def test_a_result_waits_for_a_server_that_is_down(served, monkeypatch):
    address, arena = served
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    arena.submit(arena.guard.account("", ""), "softmax", "a.py", b"x = 1")
    original, failures = Arena.finish, []

    def flaky(self, *args):
        if len(failures) < 2:
            failures.append(1)
            raise OSError(28, "No space left on device: the disk is full")
        return original(self, *args)

    monkeypatch.setattr(Arena, "finish", flaky)
    count, lines = work(address, lambda job, report: result())
    assert count == 1
    assert sum("disk is full" in line for line in lines) == 2
    assert arena.store.states(1)[0]["state"] == "ranked"


def test_gpu_workers_take_their_own_board(served):
    address, arena = served
    arena.store.add_problem(problem_fields(boards=["a100", BOARD]))
    arena.submit(arena.guard.account("", ""), "softmax", "a.py", b"x = 1")
    boards = []
    judge = lambda job, report: (boards.append(job["board"]), result())[-1]
    assert work(address, judge)[0] == 1
    assert boards == [BOARD]
    assert work(address, judge, gpu="a100")[0] == 1
    assert boards == [BOARD, "a100"]


def measured(ratio, leader, **more):
    found = result(**more)
    found["timing"]["against_leader"] = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
    return found | {"leader": leader, "confirmed": ratio < 0.9}


def test_a_measured_entry_is_placed_by_its_ratio_to_the_leader(served):
    _, arena = served
    arena.store.add_problem(problem_fields(boards=["a100"]))
    account, problem = arena.guard.account("", ""), arena.store.problem("softmax", None)
    arena.submit(account, "softmax", "a.py", b"x = 1")
    arena.submit(account, "softmax", "b.py", b"x = 2")
    first, second = (arena.lease(account, "w", "a100") for _ in range(2))
    assert first["leader"] is None
    assert arena.finish(account, first["job"], first["lease"], result(10.0)) == "ranked"
    # The second was timed before the first became the leader, and claims first place: it is timed again.
    assert arena.finish(account, second["job"], second["lease"], result(5.0)) == "queued"
    again = arena.lease(account, "w", "a100")
    assert (again["job"], again["leader"]["code"]) == (second["job"], "x = 1")
    slow_run = measured(0.5, 1, us=11.0)  # the GPU was slower in this run
    assert arena.finish(account, again["job"], again["lease"], slow_run) == "ranked"
    leader = arena.boards.leader(problem, "a100")
    assert (leader["submission"], leader["us"]) == (2, 5.0)
    assert [one["submission"] for one in arena.boards.history(problem, "a100")] == [1, 2]


def test_the_leader_of_then_places_an_entry_that_takes_no_first_place(served):
    _, arena = served
    arena.store.add_problem(problem_fields(boards=["a100"]))
    account, problem = arena.guard.account("", ""), arena.store.problem("softmax", None)
    jobs = []
    for n, us in enumerate((10.0, 5.0)):
        arena.submit(account, "softmax", "a.py", f"x = {n}".encode())
        jobs.append(arena.lease(account, "w", "a100"))
        if not n:
            arena.finish(account, jobs[0]["job"], jobs[0]["lease"], result(us))
    arena.submit(account, "softmax", "c.py", b"x = 3")
    late = arena.lease(account, "w", "a100")
    assert arena.finish(account, jobs[1]["job"], jobs[1]["lease"], measured(0.5, 1)) == "ranked"
    on_a_faster_gpu = measured(0.98, 1, us=1.0) | {"confirmed": False}
    assert arena.finish(account, late["job"], late["lease"], on_a_faster_gpu) == "ranked"
    assert arena.boards.leader(problem, "a100")["submission"] == 2
    assert arena.boards.ranked(problem, "a100")[-1].entry["us"] == pytest.approx(9.8)


@pytest.mark.parametrize("lacks", ["disk here", "disk of the server"])
def test_a_worker_waits_while_the_disk_is_full(served, monkeypatch, lacks):
    address, arena = served
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    arena.submit(arena.guard.account("", ""), "softmax", "a.py", b"x = 1")
    original, failures = (module.shutil.disk_usage, Arena.lease)[lacks != "disk here"], []

    def flaky(*args):
        if len(failures) < 2:
            failures.append(1)
            if lacks == "disk here":
                return module.shutil._ntuple_diskusage(10, 10, 0)
            raise OSError(28, "No space left on device: the disk is full")
        return original(*args)

    monkeypatch.setattr(*((module.shutil, "disk_usage") if lacks == "disk here" else (Arena, "lease")), flaky)
    count, lines = work(address, lambda job, report: result())
    assert count == 1
    assert sum("0 MiB free" in line or "disk is full" in line for line in lines) == 2


def test_a_machine_that_cannot_judge_refuses_nobody(served, monkeypatch):
    """A GPU that fails before a job has begun costs no attempt; one that fails in a job costs one."""
    address, arena = served
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    arena.submit(arena.guard.account("", ""), "softmax", "a.py", b"x = 1")
    calls = []

    def judge(job, report):
        calls.append(job["job"])
        if len(calls) == 6:
            report("checking")
        if len(calls) < 7:
            raise NotNow("this machine cannot judge (no CUDA GPUs are available)")
        return result()

    count, lines = work(address, judge)
    assert (count, len(calls)) == (1, 7)
    assert lines[0].startswith("this machine cannot judge (no CUDA GPUs are available); trying again in")
    (job,) = arena.store.submission(1)["jobs"]
    assert (job["state"], job["attempts"]) == ("ranked", 2)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_shared_memory_counts_and_is_removed(monkeypatch, tmp_path):
    """A file belongs to the user of the sandboxed process, whose id tells the process."""
    monkeypatch.setattr(module, "SHARED_MEMORY", str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as child:
        for name, owner in (("alive", child.pid), ("ended", 2**22 + 1), ("mine", -1)):
            (tmp_path / name).write_bytes(b"x" * 2**16)
            os.chown(tmp_path / name, *[module.SANDBOX_USERS + owner if owner > 0 else -1] * 2)
        assert module._shared_memory(os.getpid()) == 2**16
        assert {path.name for path in tmp_path.iterdir()} == {"alive", "mine"}
        assert module._shared_memory(child.pid) == 0, "it is another judge's"
        child.kill()
    module._shared_memory(os.getpid())
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def fake_judge(monkeypatch, code):
    monkeypatch.setattr(module, "BOOTSTRAP", f"import json, os, sys, time\nfor line in sys.stdin:\n    {code}")


def test_a_judge_process_reports_states_and_is_reused(monkeypatch):
    fake_judge(monkeypatch, "print('{\"state\": \"timing\"}'); print(json.dumps({'result': os.getpid()}), flush=True)")
    states, judge = [], JudgeProcess({})
    first = judge({}, states.append)
    assert judge({}, states.append) == first
    assert states == ["timing", "timing"]
    judge.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_judge_process_inherits_no_secrets(monkeypatch):
    for name in ("TILEWRIGHT_ARENA_TOKEN", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "https_proxy"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    fake_judge(monkeypatch, "print(json.dumps({'result': dict(os.environ)}), flush=True)")
    judge = JudgeProcess({})
    found = judge({}, print)
    assert "secret" not in found.values()
    assert {"PATH", "TMPDIR"} <= found.keys()
    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    judge.close()


@pytest.mark.parametrize(
    ("code", "options", "why", "is_final"),
    [
        ("os._exit(7)", {}, "code 7", False),
        ("time.sleep(60)", {"seconds": 0.3}, "not judged within", True),
        ("print(json.dumps({'fault': 'KeyError'}), flush=True)", {}, "KeyError", False),
        ("print('nonsense', flush=True)", {}, "ended", False),
        (
            "open(os.environ['TMPDIR'] + '/f', 'wb').write(b'x' * 2**21); time.sleep(60)",
            {"scratch": 2**20},
            "GiB to disk",
            True,
        ),
    ],
)
def test_a_judge_process_that_fails_is_replaced(monkeypatch, code, options, why, is_final):
    fake_judge(monkeypatch, code)
    judge = JudgeProcess({}, **options)
    with pytest.raises(JudgeLost, match=why) as lost:
        judge({}, print)
    assert lost.value.is_final == is_final
    fake_judge(monkeypatch, "print(json.dumps({'unable': 'no GPU'}), flush=True)")
    with pytest.raises(NotNow, match="this machine cannot judge \\(no GPU\\)"):
        judge({}, print)
    fake_judge(monkeypatch, "print(json.dumps({'result': 1}), flush=True)")
    assert judge({}, print) == 1
    judge.close()


def test_the_client_explains_what_went_wrong(served, tmp_path):
    address, _ = served
    with Client(address) as client:
        with pytest.raises(ArenaRefused, match="did you mean 'softmax'"):
            client.submit("softmacks", "x = 1")
        with pytest.raises(ArenaRefused, match="null byte"):
            client.submit("softmax", "x = 1\0")
    with Client("http://127.0.0.1:9") as client, pytest.raises(ArenaNotReachable, match="arena serve"):
        client.problems()
    (tmp_path / "big.py").write_bytes(b"#" * 2**20)
    with pytest.raises(BadSubmission, match="too large"):
        read_code(tmp_path / "big.py")
    (tmp_path / "secrets").write_text("x = 1\n")
    with pytest.raises(BadSubmission, match=r"does not end in \.py"):
        read_code(tmp_path / "secrets")


BUSY = """
import time
from tilewright.arena import judge
judge.Judge = lambda: lambda job, say: (say("checking"), time.sleep(60))
judge.serve()
"""


@pytest.mark.slow
def test_a_judge_ends_with_its_worker():
    code = f"from tilewright.arena import worker as w; w.BOOTSTRAP = {BUSY!r}; w.JudgeProcess({{}})({{}}, print)"
    with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout.readline() == "checking\n"
        (judge,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        end = os.pidfd_open(int(judge))
        worker.kill()
    assert select.select([end], [], [], 20.0)[0], "it goes on"
    os.close(end)


@pytest.mark.slow
def test_a_token_is_not_left_in_the_arguments_of_a_worker():
    command = [sys.executable, "-m", "tilewright", "arena", "worker", "--server", "http://127.0.0.1:9"]
    with subprocess.Popen([*command, "--token", "tw_visible"], stdout=subprocess.PIPE, text=True) as child:
        assert "no arena answers" in child.stdout.readline()
        arguments = Path(f"/proc/{child.pid}/cmdline").read_text()
        child.kill()
    assert "arena\0worker" in arguments
    assert "tw_visible" not in arguments

"""A call that hangs, crashes or is cancelled ends its own process and nothing else."""

import os
import sys
import time
from pathlib import Path

import anyio
import pytest

from tilewright.agents.pool import Pool, ToolFailed
from tilewright.errors import CallFailed

STUB = (sys.executable, str(Path(__file__).parent / "stub_host.py"))


async def ignore(done, total, message):
    pass


def run(use, jobs=2, seconds=20.0):
    async def main():
        pool = Pool(jobs, seconds, STUB)
        try:
            return await use(pool)
        finally:
            await pool.close()

    return anyio.run(main)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_is_reused_and_ends_with_the_pool():
    async def use(pool):
        return [(await pool.call("echo", {"n": n}, ignore)) for n in range(2)]

    first, second = run(use)
    assert first["pid"] == second["pid"]
    assert second["arguments"] == {"n": 1}
    assert not is_running(first["pid"])


def test_progress_arrives_in_order():
    seen = []

    async def note(*step):
        seen.append(step)

    run(lambda pool: pool.call("echo", {"steps": 3}, note))
    assert seen == [(1, 3, "working"), (2, 3, "working"), (3, 3, "working")]


def test_calls_run_at_once_up_to_the_limit():
    async def use(pool):
        found = []

        async def call(n):
            found.append(await pool.call("echo", {"seconds": 0.5, "n": n}, ignore))

        async with anyio.create_task_group() as group:
            for n in range(3):
                group.start_soon(call, n)
        return found

    found = run(use)
    assert sorted(one["arguments"]["n"] for one in found) == [0, 1, 2]
    assert len({one["pid"] for one in found}) == 2


def test_a_mistake_of_the_caller_keeps_the_process():
    async def use(pool):
        before = await pool.call("echo", {}, ignore)
        with pytest.raises(ToolFailed, match="give another case"):
            await pool.call("fail", {}, ignore)
        return before["pid"], (await pool.call("echo", {}, ignore))["pid"]

    before, after = run(use)
    assert before == after


@pytest.mark.parametrize(
    ("tool", "why"), [("crash", "ended with code 3: a library says why"), ("abort", "killed by SIGABRT")]
)
def test_a_crash_is_reported_and_the_next_call_works(tool, why):
    async def use(pool):
        with pytest.raises(CallFailed, match=why):
            await pool.call(tool, {}, ignore)
        return await pool.call("echo", {"n": 1}, ignore)

    assert run(use)["arguments"] == {"n": 1}


def test_a_call_that_hangs_is_stopped_at_the_limit():
    async def use(pool):
        pid = (await pool.call("echo", {}, ignore))["pid"]
        pool.seconds = 0.5
        began = time.monotonic()
        with pytest.raises(CallFailed, match="it took longer than"):
            await pool.call("hang", {}, ignore)
        assert time.monotonic() - began < 10
        assert not is_running(pid)
        pool.seconds = 20
        return await pool.call("echo", {}, ignore)

    assert run(use)


def test_a_call_that_the_client_cancels_ends_its_process():
    async def use(pool):
        pid = (await pool.call("echo", {}, ignore))["pid"]
        with anyio.move_on_after(0.3):
            await pool.call("hang", {}, ignore)
        assert not is_running(pid)
        return await pool.call("echo", {}, ignore)

    assert run(use)

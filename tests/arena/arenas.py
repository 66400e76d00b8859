"""Arenas for tests: a server in this process, and results as a judge returns them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from tilewright.arena.server import Protocol, application, open_store
from tilewright.arena.service import Arena

BOARD = "h200 predicted"
CODE = "def softmax(x):\n    return x\n"


def problem_fields(**more: Any) -> dict[str, Any]:
    fields = {"name": "softmax", "kind": "op", "description": "Softmax.", "files": {"entry": "softmax"}}
    fields |= {"cases": ["M=4,N=8"], "dtype": "bfloat16", "boards": [BOARD], "rule": "geomean", "threshold": 1.0}
    return fields | {"deadline": "", "private": False} | more


def result(us: float = 10.0, **more: Any) -> dict[str, Any]:
    """Return the result of a right submission with a predicted time."""
    case = {"case": "M=4,N=8", "dtype": "bfloat16", "us": us, "low": 0.95 * us, "high": 1.05 * us, "floor_us": 5.0}
    case |= {"eager_us": 20.0, "compile_us": 15.0}
    timing = {"kind": "predicted", "cases": [case], "us": us, "low": 0.95 * us, "high": 1.05 * us, "share": 5.0 / us}
    timing |= {"over_eager": 20.0 / us, "over_compile": 15.0 / us}
    checked = {"case": "M=4,N=8", "dtype": "float32", "verdict": "right", "max_error": 1e-7, "budget": 1e-6}
    verdict = {"verdict": "right", "labels": [], "calls": 9, "case_count": 1, "isolation": ["seccomp"]}
    verdict["cases"] = [checked | {"reason": "", "picture": []}]
    found = {"ranked": True, "reason": "", "versions": {"torch": "2"}, "gpu": {}, "verdict": verdict, "timing": timing}
    return found | {"confirmed": True, "leader": None} | more


def judged(arena: Arena, code: str, us: float = 10.0, name: str = "kernel.py", **more: Any) -> int:
    """Submit to `softmax` on an arena without tokens, and finish the job."""
    account = arena.guard.account("", "")
    number = arena.submit(account, "softmax", name, code.encode(), **more)["id"]
    job = arena.lease(account, "worker", None)
    assert job
    arena.finish(account, job["job"], job["lease"], result(us))
    return number


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[str, Arena]]:
    """Serve an arena with the problem `softmax` in a thread; yield its address and the arena."""
    arena = Arena(open_store(folder))
    arena.store.add_problem(problem_fields())
    config = uvicorn.Config(application(arena), http=Protocol, port=0, log_level="error", access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", arena
    finally:
        server.should_exit = True
        thread.join()
        arena.store.close()

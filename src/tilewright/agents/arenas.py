"""The arena that agents submit to: a server by its URL, or a data folder, for which a server is started here."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any

from tilewright import settings
from tilewright.agents.answers import ProblemText
from tilewright.agents.rules import RULES
from tilewright.arena.client import Client
from tilewright.arena.errors import ArenaRefused

BOOTSTRAP = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from tilewright.worker.process import die_with_parent; "
    "die_with_parent(); from tilewright.cli import main; main()"
)
ADDRESS = re.compile(rb"The arena is at (http://\S+)")
END_SECONDS = 15.0
CASES = 3  # shown per kind of evidence


class Arena:
    """A connection to an arena. `where` is the URL of a server, or a data folder.

    A server for a folder starts in the background, and ends when the connection is closed or this thread ends.
    """

    def __init__(self, where: str, *, workers: int = 1, is_quick: bool = False):
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._client: Client | None = None
        if where.startswith(("http://", "https://")):
            self._client = Client(where, settings.arena_token())
            return
        options = ["--data", where, "--port", "0", "--workers", str(workers), *(["--quick"] if is_quick else [])]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, "arena", "serve", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=settings.worker_environment(simulate=False),
        )

    @property
    def client(self) -> Client:
        """The client of the server, once it listens."""
        with self._lock:
            if self._client is None:
                self._client = Client(self._await_address())
            return self._client

    def problem_names(self) -> list[str]:
        return [one["name"] for one in self.client.problems()]

    def problem_text(self, name: str) -> ProblemText:
        """Return the text of a problem of the arena."""
        found = self.client.problem(name)
        entry: str = found["entry_point"]
        return ProblemText(
            name=found["name"],
            kind=found["kind"],
            computes=found["description"],
            entry_point=entry,
            signature=f"{entry}(…)",
            reference=found["statement"],
            inputs=[],
            dtypes=[found["dtype"]],
            check_cases=found["cases"],
            bench_cases=found["cases"],
            has_gradient=False,
            rules=[f"Define `{entry}`, with the arguments of the problem's own reference.", *RULES],
        )

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stdout:
                self._process.stdout.close()
        if self._log is not None:
            self._log.close()
        if self._client is not None:
            self._client.close()

    def _await_address(self) -> str:
        assert self._process
        assert self._process.stdout
        for line in self._process.stdout:
            if found := ADDRESS.match(line):
                threading.Thread(target=_drain, args=(self._process.stdout,), daemon=True).start()
                return found[1].decode()
        self._process.wait()
        assert self._log
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        raise ArenaRefused(lines[-1].removeprefix("tilewright: ") if lines else "the arena's server ended at once")


def _drain(output: IO[bytes]) -> None:
    """Read what the judges print, so that they never wait for a reader."""
    try:
        for _ in output:
            pass
    except ValueError:  # closed
        return


def is_finished(submission: Mapping[str, Any]) -> bool:
    return all(job["state"] in ("ranked", "refused") for job in submission["jobs"])


def evidence(job: Mapping[str, Any]) -> list[str]:
    """Return what a judged job says to its author, in lines: failed cases, labels, faults, bottleneck and advice."""
    result = job["result"] or {}
    verdict, timing = result.get("verdict") or {}, result.get("timing") or {}
    failed = [case for case in verdict.get("cases", ()) if case["verdict"] not in ("right", "unsupported")]
    lines = [f"{case['case']} {case['dtype']}: {case['verdict']}, {case['reason']}" for case in failed[:CASES]]
    lines += [f"label: {label}" for label in verdict.get("labels", ())]
    analysis = result.get("analysis") or {}
    lines += [f"analysis: {analysis['error']}"] if "error" in analysis else []
    times = {(row["case"], row["dtype"]): row for row in timing.get("cases", ())}
    for case in analysis.get("cases", ())[:CASES]:
        row = times.get((case["case"], case["dtype"]))
        us = f"{row['us']:.2f} us, " if row else ""
        floor = f"floor {case['floor_us']:.2f} us, " if case.get("floor_us") else ""
        advice = "; ".join(case.get("advice", ()))
        lines.append(f"{case['case']} {case['dtype']}: {us}{floor}bottleneck {case.get('bottleneck') or 'unknown'}")
        lines += [f"  advice: {advice}"] if advice else []
    return lines

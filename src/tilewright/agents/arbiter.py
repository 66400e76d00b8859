"""The arena as the judge of `tilewright evolve`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.agents.answers import ProblemText
from tilewright.agents.arenas import Arena, evidence
from tilewright.agents.evolve import Judged
from tilewright.agents.prompt import KnownKernel
from tilewright.agents.rules import RANKED_RULE
from tilewright.arena import problems
from tilewright.arena.errors import ArenaRefused, UnknownBoard
from tilewright.arena.server import open_store

AUTHOR = "evolve.py"  # the name of its submissions


def add_problem(folder: Path, target: str, board: str, cases: list[str]) -> str:
    """Add a problem to the arena of a data folder unless it is there, and return its name."""
    known = _problem_names(folder) if folder.is_dir() else set()
    if target in known:
        return target
    fields = problems.describe(target, boards=[board], cases=cases)  # before a folder is made
    if fields["name"] not in known:
        with contextlib.closing(open_store(folder)) as store:
            store.add_problem(fields)
    return fields["name"]


def _problem_names(folder: Path) -> set[str]:
    with contextlib.closing(open_store(folder)) as store:
        return {one["name"] for one in store.problems({"id": 0, "role": "admin"})}


class ArenaArbiter:
    """Submits kernels to one board of an arena."""

    def __init__(self, arena: Arena, name: str, problem: ProblemText, board: str | None):
        self._arena, self._name = arena, name
        found = arena.client.problem(name)
        boards = found["boards"]
        self.problem = replace(problem, bench_cases=found["cases"], rules=[*problem.rules, RANKED_RULE])
        if board is not None and board not in boards:
            raise UnknownBoard(name, board, boards)
        self._board = board or boards[0]

    def judge(self, code: str, derived_from: int | None) -> Judged:
        client = self._arena.client
        try:
            number = client.submit(self._name, code, AUTHOR, derived_from)["id"]
        except ArenaRefused as refusal:
            return Judged(False, False, str(refusal))
        for _ in client.states(number):
            pass
        (job,) = [one for one in client.submission(number)["jobs"] if one["board"] == self._board]
        result = job["result"] or {}
        timing: dict[str, Any] = result.get("timing") or {}
        return Judged(
            is_right=(result.get("verdict") or {}).get("verdict") == "right",
            is_ranked=job["state"] == "ranked",
            reason=job["reason"],
            evidence="\n".join(evidence(job)),
            submission=number,
            us=timing.get("us"),
            share=timing.get("share"),
            over_eager=timing.get("over_eager"),
        )

    def best(self, count: int) -> list[KnownKernel]:
        """Return the best kernels of the archive: those of this board, then those of others."""
        found = self._arena.client.archive(problem=self._name)
        mine = sorted((one for one in found if one["board"] == self._board), key=lambda one: one["us"])
        others = [one for one in found if one["board"] != self._board]
        return [_known(one) for one in [*mine, *others][:count]]

    def close(self) -> None:
        self._arena.close()


def _known(kernel: dict[str, Any]) -> KnownKernel:
    share = f", {kernel['share']:.0%} of the ceiling" if kernel["share"] else ""
    speed = f", {kernel['over_eager']:.2f} times the speed of eager" if kernel["over_eager"] else ""
    title = f"{kernel['name']} by {kernel['author']} on {kernel['board']}"
    return KnownKernel(kernel["code"], f"{title}: {kernel['us']:.2f} us{share}{speed}")

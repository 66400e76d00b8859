"""A search finds the fastest configuration that is right, and writes it where calls find it."""

import json
import time

import pytest
import torch

from tilewright import registry
from tilewright.runtime import configs as _tuned
from tilewright.runtime.configs import Tuned
from tilewright.spec import Cost, Op, grid
from tilewright.timer import timer_for
from tilewright.workbench.tune import FINALISTS, Search, Tried, keep, tune

WORDS = {"True": True, "False": False}


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """No tables but those of the test, kept in a folder of its own."""
    monkeypatch.setattr(_tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(_tuned, "TABLES", found := [])
    monkeypatch.setattr("tilewright.workbench.tune.TABLES", found)
    return found


def toy(tables):
    """Doubling, with a configuration that is slow, one that is wrong and one that is fast."""
    others = [{"how": "wrong"}, {"how": "fast"}]
    table = Tuned("toy.json", lambda way, size: {"how": "slow"}, lambda way, size: others)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return work(x, "forward")

        @staticmethod
        def backward(ctx, dy):
            return work(dy, "backward")

    def work(x, way):
        how = table(x, way, x.shape[-1])["how"]
        time.sleep(0.004 if how == "slow" else 0)
        return x * (3 if how == "wrong" else 2)

    op = Op(
        "toy",
        lambda x: x * 2,
        lambda x: Cost(x.nbytes, x.nbytes),
        inputs=lambda draw: (draw.randn("N"),),
        check=grid(N=(5,)),
        bench=grid(N=(64, 128)),
        backward_cost=lambda x: Cost(x.nbytes, x.nbytes),
    )
    op.kernel("mine", language="triton")(Double.apply)
    return op, table


def searches(op, **more):
    return list(tune(op, [op.kernels["mine"]], op.bench, clock=timer_for("cpu"), device="cpu", samples=6, **more))


def test_the_fastest_right_one_wins_in_each_direction(tables):
    op, _ = toy(tables)
    found = searches(op)
    assert [(s.key, s.direction) for s in found] == [
        (("forward", 64), "forward"),
        (("backward", 64), "both"),
        (("forward", 128), "forward"),
        (("backward", 128), "both"),
    ]
    for search in found:
        assert search.winner == {"how": "fast"}
        (wrong,) = [one for one in search.tried if one.config == {"how": "wrong"}]
        assert wrong.us is None
        assert wrong.reason.startswith("wrong")


def test_a_default_that_is_as_good_stays(tables):
    op, table = toy(tables)
    table.default = lambda way, size: {"how": "fast"}
    table.choices = lambda way, size: [{"how": "slow"}]
    assert all(search.winner is None for search in searches(op))


def test_a_plan_is_remembered_until_something_else_is_tried(tables):
    _, table = toy(tables)
    asked = []

    @_tuned.planned
    def plan(size):
        asked.append(size)
        return table(torch.empty(0), "forward", size)["how"]

    assert [plan(64), plan(64), len(asked)] == ["slow", "slow", 1]
    with table.trying(("forward", 64), {"how": "fast"}):
        assert plan(64) == "fast"
    assert plan(64) == "slow"
    with table.listening() as keys:
        plan(64)
    assert keys == [("forward", 64)]


def test_where_nothing_is_right_nothing_wins(tables):
    op, table = toy(tables)
    table.default = lambda way, size: {"how": "wrong"}
    table.choices = lambda way, size: []
    assert all(search.winner is None and search.best is None for search in searches(op))


def test_winners_are_kept_by_gpu_and_found_by_calls(tables, monkeypatch, tmp_path):
    _, table = toy(tables)
    x = torch.empty(64)
    assert table(x, "forward", 64) == {"how": "slow"}
    table.keep("h200", {("forward", 64): {"how": "fast"}})
    table.keep("a100-80gb", {("forward", 64): {"how": "wrong"}})
    table.keep("h200", {("forward", 128): {"how": "fast"}})
    assert json.loads((tmp_path / "toy.json").read_text())["h200"].keys() == {"forward 64", "forward 128"}
    table.keep("h200", {("forward", 128): None})
    assert json.loads((tmp_path / "toy.json").read_text())["h200"].keys() == {"forward 64"}, "the default wins again"
    assert table(x, "forward", 64) == {"how": "slow"}, "an interpreted tensor is on no GPU"
    monkeypatch.setattr(_tuned, "_gpu", lambda device: "h200")
    Tuned._best.cache_clear()
    assert table(x, "forward", 64) == {"how": "fast"}
    assert table(x, "backward", 64) == {"how": "slow"}, "a key that was not sought has the default"
    Tuned._best.cache_clear()


def test_a_search_forgets_what_the_default_beats_now_and_leaves_the_rest(tables, tmp_path):
    op, table = toy(tables)
    keep(searches(op), "h200")
    written = json.loads((tmp_path / "toy.json").read_text())["h200"]
    assert written == {f"{way} {size}": {"how": "fast"} for way in ("backward", "forward") for size in (64, 128)}
    tried = [Tried({"how": "slow"}, 1.0), Tried({"how": "fast"}, 2.0)]
    beaten = Search(table, ("forward", 64), "toy", "mine", op.bench[0], "forward", {"how": "slow"}, tried)
    all_wrong = Search(table, ("forward", 128), "toy", "mine", op.bench[1], "forward", {"how": "slow"})
    keep([beaten, all_wrong], "h200")
    written = json.loads((tmp_path / "toy.json").read_text())["h200"]
    assert sorted(written) == ["backward 128", "backward 64", "forward 128"]


def test_what_is_shipped_is_among_what_a_search_tries():
    for name in registry.source.op_files():
        registry.load(name)
    assert _tuned.TABLES
    of_file: dict[str, list[Tuned]] = {}
    for table in _tuned.TABLES:
        of_file.setdefault(table.file, []).append(table)
    for file, sharing in of_file.items():
        for winners in sharing[0].winners().values():
            for spelled, config in winners.items():
                key = [WORDS.get(part, int(part) if part.isdigit() else part) for part in spelled.split(" ")]
                assert any(config in offered(table, key) for table in sharing), f"{file}: {spelled}"


def offered(table: Tuned, key: list) -> list:
    try:
        return table.choices(*key)
    except (KeyError, TypeError):  # a key of another table in the same file
        return []


def test_of_many_the_fastest_at_first_sight_are_timed_and_the_default(tables, monkeypatch):
    op, table = toy(tables)
    many = [{"how": "slow", "number": n} for n in range(FINALISTS + 4)]
    table.default = lambda way, size: many[0]
    table.choices = lambda way, size: [*many, {"how": "fast"}]
    for search in searches(op):
        timed = [one.config for one in search.tried if one.us is not None]
        assert len(timed) == FINALISTS + 1
        assert many[0] in timed
        assert search.winner == {"how": "fast"}
        assert [one for one in search.tried if one.reason.endswith("at first sight")]

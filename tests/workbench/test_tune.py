"""A search finds the fastest correct configuration, and saves it for calls."""

import json
import time

import pytest
import torch

from tilewright import registry
from tilewright.runtime import configs
from tilewright.runtime.configs import ConfigTable
from tilewright.runtime.gpus import INTERPRETED_AS
from tilewright.spec import Cost, Op, grid
from tilewright.timer import timer_for
from tilewright.workbench.tune import FINALISTS, Attempt, Search, save, tune

WORDS = {"True": True, "False": False}


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """Replace all config tables by those of the test, saved in a temporary folder."""
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    monkeypatch.setattr(configs, "TABLES", found := [])
    monkeypatch.setattr("tilewright.workbench.tune.TABLES", found)
    return found


def toy(tables):
    """Return an op that doubles, with a slow, a wrong and a fast configuration."""
    others = [{"how": "wrong"}, {"how": "fast"}]
    table = ConfigTable("toy.json", lambda way, size: {"how": "slow"}, lambda way, size: others)

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


def test_the_fastest_correct_config_wins_in_each_direction(tables):
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
        (wrong,) = [one for one in search.attempts if one.config == {"how": "wrong"}]
        assert wrong.us is None
        assert wrong.reason.startswith("wrong")


def test_a_default_that_is_as_fast_stays(tables):
    op, table = toy(tables)
    table.default = lambda way, size: {"how": "fast"}
    table.choices = lambda way, size: [{"how": "slow"}]
    assert all(search.winner is None for search in searches(op))


def test_a_plan_is_cached_until_a_config_is_overridden(tables):
    _, table = toy(tables)
    planned = []

    @configs.cached_plan
    def plan(size):
        planned.append(size)
        return table(torch.empty(0), "forward", size)["how"]

    assert [plan(64), plan(64), len(planned)] == ["slow", "slow", 1]
    with table.override(("forward", 64), {"how": "fast"}):
        assert plan(64) == "fast"
    assert plan(64) == "slow"
    with table.recording() as keys:
        plan(64)
    assert keys == [("forward", 64)]


def test_no_config_wins_if_none_is_correct(tables):
    op, table = toy(tables)
    table.default = lambda way, size: {"how": "wrong"}
    table.choices = lambda way, size: []
    assert all(search.winner is None and search.best is None for search in searches(op))


def test_winners_are_saved_by_gpu_and_used_by_calls(tables, monkeypatch, tmp_path):
    _, table = toy(tables)
    x = torch.empty(64)
    assert table(x, "forward", 64) == {"how": "slow"}
    table.save("h200", {("forward", 64): {"how": "fast"}})
    table.save("a100-80gb", {("forward", 64): {"how": "wrong"}})
    table.save("h200", {("forward", 128): {"how": "fast"}})
    assert json.loads((tmp_path / "toy.json").read_text())["h200"].keys() == {"forward 64", "forward 128"}
    table.save("h200", {("forward", 128): None})
    assert json.loads((tmp_path / "toy.json").read_text())["h200"].keys() == {"forward 64"}, "the default wins again"
    assert table(x, "forward", 64) == {"how": "slow"}, "an interpreted tensor is not on a GPU"
    monkeypatch.setattr(configs, "_gpu_name", lambda device: "h200")
    ConfigTable._best.cache_clear()
    assert table(x, "forward", 64) == {"how": "fast"}
    assert table(x, "backward", 64) == {"how": "slow"}, "a key without a search has the default"
    ConfigTable._best.cache_clear()


def test_saving_deletes_configs_that_the_default_beats(tables, tmp_path):
    op, table = toy(tables)
    save(searches(op), "h200")
    written = json.loads((tmp_path / "toy.json").read_text())["h200"]
    assert written == {f"{way} {size}": {"how": "fast"} for way in ("backward", "forward") for size in (64, 128)}
    tried = [Attempt({"how": "slow"}, 1.0), Attempt({"how": "fast"}, 2.0)]
    beaten = Search(table, ("forward", 64), "toy", "mine", op.bench[0], "forward", {"how": "slow"}, tried)
    all_wrong = Search(table, ("forward", 128), "toy", "mine", op.bench[1], "forward", {"how": "slow"})
    save([beaten, all_wrong], "h200")
    written = json.loads((tmp_path / "toy.json").read_text())["h200"]
    assert sorted(written) == ["backward 128", "backward 64", "forward 128"]


def test_saved_configs_are_among_the_choices():
    for name in registry.source.op_files():
        registry.load(name)
    assert configs.TABLES
    of_file: dict[str, list[ConfigTable]] = {}
    for table in configs.TABLES:
        of_file.setdefault(table.file, []).append(table)
    for file, sharing in of_file.items():
        for gpu, winners in sharing[0].tuned().items():
            assert gpu == INTERPRETED_AS, "whose facts the choices below are computed from"
            for spelled, config in winners.items():
                key = [WORDS.get(part, int(part) if part.isdigit() else part) for part in spelled.split(" ")]
                assert any(config in offered(table, key) for table in sharing), f"{file}: {spelled}"


def offered(table: ConfigTable, key: list) -> list:
    try:
        return table.choices_on(-1, tuple(key))
    except (KeyError, TypeError):  # a key of another table in the same file
        return []


@pytest.mark.slow
def test_only_the_default_and_the_finalists_are_timed(tables, monkeypatch):
    op, table = toy(tables)
    many = [{"how": "slow", "number": n} for n in range(FINALISTS + 4)]
    table.default = lambda way, size: many[0]
    table.choices = lambda way, size: [*many, {"how": "fast"}]
    for search in searches(op):
        timed = [one.config for one in search.attempts if one.us is not None]
        assert len(timed) == FINALISTS + 1
        assert many[0] in timed
        assert search.winner == {"how": "fast"}
        assert [one for one in search.attempts if one.reason.endswith("in 3 samples")]

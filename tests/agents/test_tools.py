"""The tools as functions, without a server."""

import pytest

from tilewright import registry
from tilewright.agents import analysis, tools
from tilewright.errors import OnlyForOperations
from tilewright.spec import Cost
from tilewright.workbench.bench import Timing


def test_bench_gives_measured_rows_with_the_speed_over_eager(tmp_path, monkeypatch):
    """With a scripted timer: the real one needs a GPU."""
    op, steps = registry.load("add"), []
    case = op.benched()[0]

    def bench(op, kernels, files, *, on_step, cases, **_):
        names = [kernel.name for kernel in kernels] + [path.name for path in files]
        common = (op.name, dict(cases[0].point), cases[0].dtype, "forward", Cost(4000, 2000))
        for name in names:
            on_step(f"timing {name}")
        ratio = {"kernel": "eager", "ratio": 2.0, "interval": [1.9, 2.1]}
        times = {"median_us": 3.0, "interval_us": [2.9, 3.2], "against": ratio}
        yield Timing(common[0], names[1], *common[1:], "right", **times)
        yield Timing(common[0], names[2], *common[1:], "wrong", "output[0] is 0")

    monkeypatch.setattr(tools.bench_tool, "bench", bench)
    files = [tmp_path / "mine.py", tmp_path / "wrong.py"]
    answer = tools._measured(
        op, registry.pick(op, ["eager"]), files, [case], lambda *step: steps.append(step), device="cpu"
    )
    mine, wrong = answer.rows
    assert (mine.kernel, mine.case, mine.us, mine.low_us, mine.high_us, mine.speedup) == (
        *("mine.py", str(case)),
        *(3.0, 2.9, 3.2, 2.0),
    )
    assert (wrong.us, wrong.reason) == (None, "wrong: output[0] is 0")
    assert answer.is_measured
    assert [step[0] for step in steps] == [1, 2, 3]
    assert steps[-1][1] == 5  # at most: a check per file and kernel, and two steps per case
    assert (
        tools._row(
            Timing("add", "mine.py", {}, "float32", "forward", Cost(6, 0), "right", median_us=3.0), {"read": 4e6}
        ).share_of_ceiling
        == 0.5
    )


def test_a_kernel_without_a_prediction_names_arguments_of_the_tool(tmp_path):
    (tmp_path / "mine.py").write_text("def add(x, y):\n    return x + y\n")
    (row,) = analysis.predict("add", file=str(tmp_path / "mine.py"), case=["N=1024"])
    assert row["us"] is None
    assert "try another `case`" in row["reason"]
    assert "--" not in row["reason"]


def test_the_time_of_a_third_party_problem_cannot_be_predicted(tmp_path):
    path = tmp_path / "problem.py"
    path.write_text("x = 1\n")
    with pytest.raises(OnlyForOperations, match="check works on both"):
        tools.bench(str(path), file="mine.py")

"""The time of a solution of a third-party problem beside that of the problem's reference."""

from pathlib import Path

import pytest

from tilewright.workbench.bench.problems import speedup
from tilewright.workbench.check import problems

FOLDER = Path(__file__).parent.parent / "problems"
MODEL = """
import time
import torch

class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        time.sleep({construct})
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        time.sleep({call})
        return x + self.calls

def get_inputs():
    return [torch.randn(8, 16)]

def get_init_inputs():
    return []
"""


@pytest.fixture
def timed(device):
    def run(problem: Path, solution: Path) -> float | None:
        loaded = problems.load(problem)
        try:
            loaded.select(device=device)
            return speedup(loaded, solution, device, samples=3)
        finally:
            loaded.close()

    return run


@pytest.mark.parametrize(
    ("problem", "solution"),
    [
        ("kernelbench/level1_softmax.py", "softmax_torch"),
        ("gpumode/vectoradd_py", "vectoradd_torch"),
        ("flashinfer/definitions/norm/add_rmsnorm_h96.json", "add_rmsnorm_fills"),
    ],
)
def test_solutions_of_every_kind_of_problem_are_timed(problem, solution, timed):
    kind, _, _ = problem.partition("/")
    found = timed(FOLDER / problem, FOLDER / kind / "solutions" / f"{solution}.py")
    assert found is not None
    assert found > 0


def test_the_construction_of_a_model_is_not_timed(tmp_path, timed):
    problem, solution = tmp_path / "problem.py", tmp_path / "solution.py"
    problem.write_text(MODEL.format(name="Model", construct=0.05, call=0.05))
    solution.write_text(MODEL.format(name="ModelNew", construct=0.05, call=0.005))
    found = timed(problem, solution)
    assert found is not None
    assert found > 3  # the ratio is 10; with the construction it would be 1.8


def test_a_solution_that_fails_has_no_time(tmp_path, timed):
    solution = tmp_path / "fails.py"
    solution.write_text("class ModelNew:\n    def forward(self, x):\n        raise ValueError")
    assert timed(FOLDER / "kernelbench" / "level1_softmax.py", solution) is None

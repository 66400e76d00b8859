"""Without a GPU the whole suite runs Triton in our interpreter and Numba in its simulator; with one, on the GPU."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: more threads only wait for each other

import pytest
import torch

import tilewright
from tilewright.runtime.configs import forget_plans

HAS_GPU = torch.cuda.is_available()

# Processes that tests start find the package in a bare checkout too.
_SOURCE = str(Path(__file__).parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SOURCE, os.environ.get("PYTHONPATH")]))

# On a virtual machine that names AMX without granting it, oneDNN's bfloat16 products kill the process.
torch.backends.mkldnn.set_flags(_enabled=False)

if not HAS_GPU:  # read when a kernel is decorated, so before any op is imported
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def numbers_are_the_same_every_time():
    """So that a test that fails will fail again."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def plans_are_made_anew():
    """With the constants that a test sets."""
    forget_plans()


@pytest.fixture(autouse=True)
def interpreter():
    """Any fault that a Triton kernel shows on the way fails the test, whatever the values."""
    if HAS_GPU:
        yield
    else:
        with tilewright.interpret():
            yield

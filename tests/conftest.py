"""Without a GPU, Triton kernels run in our interpreter and Numba kernels in its simulator; with one, on the GPU."""

import os
import resource
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel: more threads only wait for each other
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every command that a test runs would compile the package again
sys.dont_write_bytecode = False
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")  # shadow memory of large tensors is sparse

import pytest
import torch

import tilewright
from tilewright.runtime.configs import clear_plans

HAS_GPU = torch.cuda.is_available()
TESTS = Path(__file__).parent
MEMORY_LIMIT = 4 * 2**30  # bytes that one test process may use
LEFT_OUT = pytest.StashKey[Counter]()  # tests that --quick does not run, by file
WHOLE = ("test_architecture.py", "test_style.py", "test_assertions.py")  # files that --quick runs in full

# Subprocesses of tests import the package from this checkout even if it is not installed.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS.parent / "src"), os.environ.get("PYTHONPATH")]))

# On a virtual machine that reports AMX but does not grant it, oneDNN's bfloat16 matmul kills the process.
torch.backends.mkldnn.set_flags(_enabled=False)

if not HAS_GPU:  # Numba reads this when a kernel is decorated, so set it before any op is imported
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="Run the first case of each test function, and none marked slow.",
    )


def pytest_make_parametrize_id(val, argname):
    """Name long texts by their position: they may hold a date, and processes of pytest-xdist must agree on names."""
    return argname if isinstance(val, str) and len(val) > 80 else None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if config.getoption("--quick"):
        _select_quick(config, items)


def _select_quick(config, items) -> None:
    """Keep the first case of each test function; of the laws that test classes inherit, the first class runs all."""
    seen, kept, left = set(), [], []
    for item in items:
        code, test_class = item.function.__code__, item.cls or item.function.__code__
        is_new = code not in seen or test_class not in seen or item.path.name in WHOLE
        is_quick = is_new and not item.get_closest_marker("slow") and not item.get_closest_marker("skip")
        (kept if is_quick else left).append(item)
        if is_quick:
            seen |= {code, test_class}
    items[:] = kept
    config.hook.pytest_deselected(items=left)
    config.stash[LEFT_OUT] = Counter(str(item.path.relative_to(TESTS)) for item in left)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist tells the one that reports
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter, config):
    if left := config.stash.get(LEFT_OUT, Counter()):
        terminalreporter.section("left out by --quick")
        for name, count in sorted(left.items()):
            terminalreporter.line(f"{count:6} of {name}")
        terminalreporter.line(f"{left.total():6} tests in all, which `make test` runs")


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def fixed_seed():
    """A test that fails once fails again."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def empty_plan_cache():
    """Plans are made with the constants that the test sets."""
    clear_plans()


@pytest.fixture(autouse=True)
def interpreter():
    """A fault that a Triton kernel shows fails the test, even if the values are right."""
    if HAS_GPU:
        yield
    else:
        with tilewright.interpret():
            yield


@pytest.fixture(autouse=True)
def memory_limit():
    """Fail the test in which this process first exceeds the memory limit. CUDA's mappings do not count."""
    before = _peak_memory()
    yield
    if not HAS_GPU and before <= MEMORY_LIMIT < _peak_memory():
        pytest.fail(f"this process has used {_peak_memory() / 2**30:.1f} GiB; the limit is {MEMORY_LIMIT / 2**30:.0f}")


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

"""Crossovers are data of a GPU, and every GPU without data gets its own, with plans that fill it."""

import json
import math
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright as tw
from tilewright import registry, source
from tilewright.hardware import DATASHEETS, datasheet
from tilewright.runtime import configs, crossovers
from tilewright.runtime.crossovers import CROSSOVERS, Crossover, PerGPU, faster_after, never
from tilewright.runtime.cuda import CudaLaunch, CudaSource
from tilewright.runtime.gpus import datasheet_facts, gpu_facts
from tilewright.runtime.launch import PreparedLaunch
from tilewright.workbench.inspect.fake_gpu import fake_gpu

GPUS = ("a100-80gb", "l4", "rtx-4090", "h100-sxm", "b200", "mi300x")
WITH_CLUSTERS = {"h100-sxm", "b200"}


@pytest.fixture
def launches(monkeypatch):
    """Record the kernel and the grid of each launch instead of compiling it."""
    found: list[tuple[str, tuple[int, ...]]] = []

    def triton_launch(launch, *_):
        found.append((launch._launcher.kernel.__name__, launch._grid))

    monkeypatch.setattr(PreparedLaunch, "__call__", triton_launch)
    monkeypatch.setattr(CudaLaunch, "__call__", lambda launch, *_: found.append(("cuda", launch.grid)))
    monkeypatch.setattr(CudaSource, "resident", lambda _, kernel, dtype, device, *__, **___: 2 * gpu_facts(device).sms)
    return found


def plans(name: str, launches: list) -> dict[str, list]:
    """Return what calls of several families launch on a GPU; nothing where torch is called."""
    calls = {
        "small softmax": lambda empty: tw.softmax(empty(64, 4096), -1),
        "softmax": lambda empty: tw.softmax(empty(8192, 4096), -1),
        "long softmax": lambda empty: tw.softmax(empty(1024, 131072), -1),
        "sum of few rows": lambda empty: tw.sum(empty(4, 2**24), -1),
        "sum of many rows": lambda empty: tw.sum(empty(700, 2**17), -1),
        "norm": lambda empty: tw.layer_norm(empty(8192, 1024), (1024,)),
        "norm backward": lambda empty: tw.rms_norm(empty(2**16, 800).requires_grad_(), (800,)).sum().backward(),
        "losses": lambda empty: tw.cross_entropy(
            empty(4096, 4096), torch.zeros(4096, dtype=torch.int64, device="cuda")
        ),
        "relu": lambda empty: tw.relu(empty(2**24)),
        "swiglu": lambda empty: tw.swiglu(empty(256), empty(256)),
    }
    found = {}
    with fake_gpu(datasheet(name)):
        for call, run in calls.items():
            launches.clear()
            run(lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda"))
            found[call] = list(launches)
    return found


def test_each_gpu_has_plans_that_fit_it(launches):
    found = {name: plans(name, launches) for name in GPUS}
    for name, plan in found.items():
        sms = datasheet(name).sms
        assert plan["relu"] == [], "torch's kernel reaches the ceiling"
        assert len(plan["swiglu"]) == 1, "one launch instead of several"
        assert len(plan["softmax"]) == 1
        kernel, _ = plan["long softmax"][0]
        assert (kernel == "cuda") == (name in WITH_CLUSTERS)
        first, *_ = plan["sum of few rows"]
        assert 16 * sms <= math.prod(first[1]) <= 64 * sms, "many programs per multiprocessor"
        is_split = len(plan["sum of many rows"]) > 1
        assert is_split == (8 * sms > 700), "rows that fill the GPU are not split"
        backward = plan["norm backward"][1:]
        assert any(math.prod(grid) % sms == 0 for _, grid in backward) or name in WITH_CLUSTERS
    small = {name for name, plan in found.items() if plan["small softmax"]}
    assert small == {"l4"}, "memory is slow enough for our kernel to win"
    assert len({str(plan) for plan in found.values()}) == len(GPUS), "no two have the same plans"


def test_a_crossover_grows_with_the_bandwidth():
    with_datasheet = faster_after(us=1.75, bytes_per_element=4)
    sizes = [with_datasheet(datasheet_facts(name)) for name in ("l4", "rtx-4090", "a100-80gb", "mi300x", "b200")]
    assert sizes == [2**17, 2**19, 2**20, 2**21, 2**22]
    assert with_datasheet(datasheet_facts("l4")._replace(bandwidth=1.0)) == 1


def test_a_gpu_without_a_datasheet_has_facts(monkeypatch):
    found = SimpleNamespace(
        name="NVIDIA Unheard Of", multi_processor_count=7, L2_cache_size=2**20, shared_memory_per_block_optin=2**16,
        memory_clock_rate=1_000_000, memory_bus_width=256,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert gpu_facts.__wrapped__(3) == ("unheard-of", 7, 64e9, 2**20, 2**16)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    crossovers.measured.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    crossovers.measured.cache_clear()
    for crossover in CROSSOVERS.values():
        crossover._forget()


def test_measured_sizes_are_saved_and_used(folder, monkeypatch):
    monkeypatch.setattr(crossovers, "CROSSOVERS", {})
    crossover = Crossover("toy", lambda gpu: 100)
    monkeypatch.setitem(crossovers.CROSSOVERS, "toy", crossover)
    assert (crossover[-1], crossover.captured[-1]) == (100, 100)
    crossovers.save("h200", {"toy": math.inf, "other": 3.0})
    crossovers.save("h200", {"toy captured": 64.0})
    assert json.loads((folder / "crossovers.json").read_text()) == {
        "h200": {"other": 3, "toy": "never", "toy captured": 64}
    }
    assert (crossover[-1], crossover.captured[-1]) == (math.inf, 64)
    assert PerGPU("other", lambda gpu: 0)[-1] == 3
    with crossover.override(7):
        assert (crossover[-1], crossover.captured[-1]) == (7, 7)
    assert (crossover[-1], crossover.captured[-1]) == (math.inf, 64)


def test_host_time_does_not_count_inside_torch_compile():
    """The decision is made while tracing, on fake tensors."""
    traced = {}

    def compiled(fn, *shape):
        def backend(graph, inputs):
            traced[fn] = [str(node.target) for node in graph.graph.nodes]
            return graph.forward

        torch.compile(fn, fullgraph=True, backend=backend)(torch.empty(shape, dtype=torch.bfloat16, device="cuda"))
        return any(target.startswith("tilewright.") for target in traced[fn])

    with FakeTensorMode():
        assert compiled(lambda x: tw.softmax(x, -1), 1, 64)
        assert compiled(lambda x: tw.rms_norm(x, (64,)), 1, 64)
        assert compiled(lambda x: tw.amax(x, -1), 1, 64)
        assert not compiled(lambda x: tw.dot(x, x), 64), "its crossover on device time is not measured"
        assert compiled(lambda x: tw.dot(x, x), 2**20)
        assert not compiled(lambda x: tw.linear(x, x), 64, 64)
        with fake_size("softmax", 65):
            assert not compiled(lambda x: tw.softmax(x, -1), 1, 64)
            assert compiled(lambda x: tw.softmax(x, -1), 1, 65)


@contextmanager
def fake_size(name: str, size: float):
    """Use a measured size on device time; in eager mode our kernel always wins."""
    with CROSSOVERS[name].override(0), patch.object(CROSSOVERS[name].captured, "_override", size):
        yield


def test_without_measurements_only_device_time_counts(folder):
    names = ("softmax", "relu", "dot", "swiglu")
    found = {name: CROSSOVERS[name].captured.on(datasheet_facts("l4")) for name in names}
    assert found == {"softmax": 0, "relu": math.inf, "dot": CROSSOVERS["dot"].on(datasheet_facts("l4")), "swiglu": 0}


@pytest.mark.slow
def test_the_sizes_of_an_h200_belong_to_operations():
    for name in source.op_files():
        registry.load(name)
    measured = json.loads((configs.FOLDER / "crossovers.json").read_text())
    assert measured.keys() <= DATASHEETS.keys()
    # Without those that tests make, and functions that call torch on every GPU until someone measures them.
    public = {name for name, one in CROSSOVERS.items() if not name.startswith("test ") and one.computed is not never}
    for sizes in measured.values():
        assert sizes.keys() >= public, "no public function falls back to a computed crossover"
        assert all(size == crossovers.NEVER or size >= 0 for size in sizes.values())

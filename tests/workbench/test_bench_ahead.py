"""Kernels compiled ahead by other processes are found on disk by the process that times."""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver

import pytest
import torch
from torch._dynamo.utils import counters

from tilewright import registry
from tilewright.spec import Case
from tilewright.workbench.bench import ahead
from tilewright.workbench.bench.ahead import CompilerPool, Job, compile_job
from tilewright.workbench.bench.drawn import DrawnCase
from tilewright.worker.memory import GuardedTensor


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory):
    """Empty caches, also for the server that forks compilers: one that other tests began has another environment."""
    folder = tmp_path_factory.mktemp("caches")
    forkserver._forkserver._stop()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            patch.setenv(name, str(folder / name))
        yield folder
    forkserver._forkserver._stop()


def job(op, kernels, point, layout="contiguous", directions=("forward",), dtype="float32", device="cpu"):
    return Job(op, None, Case(point, dtype), layout, kernels, directions, "h200", device=device)


def compile_reference(one: Job) -> tuple[int, int]:
    """Call torch.compile's kernel of a job; return the hits and misses of the graph cache."""
    is_training = one.directions != ("forward",)
    args = [
        GuardedTensor.copy_of(a, one.layout).tensor().requires_grad_(is_training) if isinstance(a, torch.Tensor) else a
        for a in one.drawn.op.make(one.case)
    ]
    torch._dynamo.reset()
    counters.clear()
    with torch.set_grad_enabled(is_training):
        y = registry.load(one.op).kernels["compile"].fn(*args)
        if is_training:
            y.sum().backward()
    return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.verify
def test_torch_compile_finds_what_the_pool_compiled():
    point = (("M", 37), ("N", 130), ("weight", "same"))
    layouts = {"contiguous": ("forward",), "padded": ("backward",)}
    jobs = [job("rms_norm", ("compile",), point, layout, directions) for layout, directions in layouts.items()]
    with CompilerPool() as pool:
        for one in jobs:
            pool.add(one)
        assert [pool.wait(number).failures for number in range(len(jobs))] == [{}, {}]
    # A new process, like the command that times: settings that other tests leave in this one are part of the key.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        assert [*process.map(compile_reference, jobs)] == [(1, 0), (2, 0)]


def test_our_kernels_are_compiled_for_the_gpu(caches):
    done = compile_job(job("swiglu", ("tilewright",), (("M", 64), ("N", 1000), ("packed", False)), dtype="bfloat16"))
    assert done.failures == {}
    assert done.path
    assert not done.path.startswith("torch")
    assert [*(caches / "TRITON_CACHE_DIR").rglob("*.cubin")]


def test_the_reason_for_torch_is_the_path():
    done = compile_job(job("softmax", ("tilewright",), (("M", 2), ("N", 3))))
    assert done.path.startswith("torch: 6 elements, and our kernel is faster from")


def test_a_failure_is_reported_and_the_other_kernels_are_compiled(monkeypatch):
    op = registry.load("swiglu")
    broken = lambda *_: 1 / 0
    monkeypatch.setitem(op.kernels, "compile", op.kernels["compile"].__class__(**vars(op.kernels["eager"]) | {
        "name": "compile", "fn": broken, "builds_per_case": False,
    }))  # fmt: skip
    done = compile_job(job("swiglu", ("compile", "tilewright"), (("M", 64), ("N", 1000), ("packed", False))))
    assert done.failures == {"compile": "ZeroDivisionError: division by zero"}
    assert done.path


def test_alignment_of_rows():
    softmax = registry.load("softmax")

    def aligned(n, layout, dtype="bfloat16"):
        return DrawnCase(softmax, Case((("M", 64), ("N", n)), dtype), layout).is_aligned

    assert [aligned(n, "contiguous") for n in (1000, 1001, 1004)] == [True, False, False]
    assert aligned(1004, "contiguous", "float32")
    assert [aligned(1000, layout) for layout in ("offset", "padded", "sliced", "transposed")] == [
        False, True, False, True,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("usable", [True, False])
def test_processes_are_started_singly_if_their_forks_could_not_use_the_gpu(monkeypatch, usable):
    """A function that is true or false in any process stands for the question."""
    monkeypatch.setattr(ahead, "can_use_gpu", str if not usable else sys.getrecursionlimit)
    with ahead._processes(1) as pool:
        assert pool._mp_context.get_start_method() == ("forkserver" if usable else "spawn")
        assert pool.submit(os.getpid).result() != os.getpid()

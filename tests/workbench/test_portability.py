"""Every Triton kernel compiles for every architecture, without spills, and can be launched."""

import re
import sys
from pathlib import Path

import pytest
import triton
from triton.runtime.jit import JITFunction

from tilewright import record, registry, settings, source
from tilewright.workbench.inspect.portability import TARGETS, figures, inspect_for, problem

REGENERATE = "run `tilewright inspect --everywhere --record results/portability.jsonl`, then `make pages`"


@pytest.fixture(scope="module")
def ops():
    return [registry.load(name) for name in source.op_files()]


def module_of(file):
    return source.module_name(Path(file)).removeprefix("tilewright.")


def kernels():
    """Return file and name of every Triton kernel that no other function calls. Gluon kernels target single GPUs."""
    modules = [
        module for name, module in sys.modules.items() if name.startswith(("tilewright.ops.", "tilewright.runtime."))
    ]
    functions = {f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    called = {word for f in functions for word in re.findall(r"\w+", f.src.partition("(")[2])}
    found = [f for f in functions if f.fn.__name__ not in called and not f.is_gluon()]
    return {(module_of(f.fn.__code__.co_filename), f.fn.__name__) for f in found}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", TARGETS)
def test_every_kernel_compiles(gpu, ops):
    found = inspect_for(gpu, ops)
    problems = [f"{one.name} for {gpu}: {what}" for one in found if (what := problem(one))]
    assert not problems, "\n".join(problems)
    now = {(module_of(one.launch.code.file), one.name): (triton.__version__, figures(one)) for one in found}
    assert now.keys() == kernels(), "each needs a bench case that launches it, or a call by `op.also`"
    committed = record.latest(record.read(settings.results_dir() / "portability.jsonl").records)
    then = {(r["op"], r["kernel"]): (r["versions"]["triton"], r["gpus"].get(gpu)) for r in committed}
    changed = [kernel for kernel in now.keys() | then.keys() if now.get(kernel) != then.get(kernel)]
    lines = [f"{name} for {gpu}: {then.get((file, name))}, now {now.get((file, name))}" for file, name in changed]
    assert not changed, "\n".join([REGENERATE, *lines])

"""Every Triton kernel compiles for every architecture, without spills, and can be launched."""

import re
import sys
from pathlib import Path

import pytest
import triton
from triton.runtime.jit import JITFunction

from tilewright import record, registry, settings, source
from tilewright.hardware import datasheet
from tilewright.workbench.inspect import inspect_launch
from tilewright.workbench.inspect.portability import TARGETS, figures, largest_launches, problem

REGENERATE = "run `tilewright inspect --everywhere --record results/portability.jsonl`, then `make pages`"


@pytest.fixture(scope="module")
def ops():
    return [registry.load(name) for name in source.op_files()]


def module_of(file):
    return source.module_name(Path(file)).removeprefix("tilewright.")


def kernels():
    """Return file and name of every Triton kernel: it returns no value, and no other function calls it.

    Gluon kernels target single GPUs.
    """
    modules = [
        module for name, module in sys.modules.items() if name.startswith(("tilewright.ops.", "tilewright.runtime."))
    ]
    functions = {f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    called = {word for f in functions for word in re.findall(r"\w+", f.src.partition("(")[2])}
    returning = {f for f in functions if re.search(r"^\s+return \S", f.src, re.MULTILINE)}
    found = [f for f in functions - returning if f.fn.__name__ not in called and not f.is_gluon()]
    return {(module_of(f.fn.__code__.co_filename), f.fn.__name__) for f in found}


def marked(gpu):
    return pytest.param(gpu, marks=pytest.mark.slow if gpu == "h100-sxm" else pytest.mark.verify)


@pytest.mark.parametrize("gpu", [marked(gpu) for gpu in TARGETS])
def test_every_kernel_compiles(gpu, ops):
    """All kernels for an H100, and each for one of the others; a change for the H100 asks to compile all for all."""
    launches = sorted(largest_launches(ops, datasheet(gpu)), key=lambda one: (one.code.file, one.name))
    assert {(module_of(one.code.file), one.name) for one in launches} == kernels(), (
        "each needs a bench case that launches it, or a call by `op.also`"
    )
    others = [one for one in TARGETS if one != "h100-sxm"]
    chosen = launches if gpu == "h100-sxm" else launches[others.index(gpu) :: len(others)]
    found = [inspect_launch(launch, launch.name) for launch in chosen]
    problems = [f"{one.name} for {gpu}: {what}" for one in found if (what := problem(one))]
    assert not problems, "\n".join(problems)
    now = {(module_of(one.launch.code.file), one.name): (triton.__version__, figures(one)) for one in found}
    committed = record.latest(record.read(settings.results_dir() / "portability.jsonl").records)
    then = {(r["op"], r["kernel"]): (r["versions"]["triton"], r["gpus"].get(gpu)) for r in committed}
    changed = [kernel for kernel in now if now[kernel] != then.get(kernel)]
    lines = [f"{name} for {gpu}: {then.get((file, name))}, now {now[file, name]}" for file, name in changed]
    assert not changed, "\n".join([REGENERATE, *lines])
    assert then.keys() == kernels(), REGENERATE

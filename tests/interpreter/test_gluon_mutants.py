"""Every statement that synchronizes a correct Gluon kernel is needed: without it, the interpreter reports a fault."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from interpreter import gluon_kernels
from tilewright.errors import KernelAborted
from tilewright.interpreter import interpret

pytestmark = gluon_kernels.NEEDS

SYNCHRONIZES = (
    "mbarrier.",
    "fence_async_shared",
    "tma.store_wait",
    "async_copy.wait_group",
    "async_copy.commit_group",
    "warpgroup_mma_wait",
)
SOURCE = Path(inspect.getsourcefile(gluon_kernels) or "")
TREE = ast.parse(SOURCE.read_text())


def calls_that_synchronize():
    """Yield the line of each call, and the function that runs the kernel with it."""
    launches = {
        "_transpose": lambda m: m.twice_transposed(torch.randn(64, 32)),
        "_tma_copy": lambda m: m.tma_copy(torch.randn(16, 128), 2),
        "_store_tile": multiply("specialized"),
        "_load_tiles": multiply("pipelined"),
        "_pipelined": multiply("pipelined"),
        "_produce": multiply("specialized"),
        "_consume": multiply("specialized"),
        "_specialized": multiply("specialized"),
        "_produce_tiles": multiply("ping-pong"),
        "_consume_tiles": multiply("ping-pong"),
        "_ping_pong": multiply("ping-pong"),
    }
    for function in TREE.body:
        if isinstance(function, ast.FunctionDef) and function.name in launches:
            for node in ast.walk(function):
                if isinstance(node, ast.Expr) and ast.unparse(node.value).startswith(SYNCHRONIZES):
                    yield pytest.param(node.lineno, launches[function.name], id=f"{function.name}-{node.lineno}")


def multiply(form):
    return lambda m: m.matmul(form, m.integers(128, 192), m.integers(192, 128), stages=2)


@pytest.mark.parametrize(("line", "launch"), list(calls_that_synchronize()))
def test_a_kernel_without_it_is_faulty(line, launch, tmp_path):
    lines = SOURCE.read_text().splitlines(keepends=True)
    indent = len(lines[line - 1]) - len(lines[line - 1].lstrip())
    lines[line - 1] = f"{' ' * indent}pass\n"
    mutant = tmp_path / "mutant.py"
    mutant.write_text("".join(lines))
    spec = importlib.util.spec_from_file_location(f"mutant_{line}", mutant)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        with interpret(faults="collect") as run:
            launch(module)
    except KernelAborted:
        return
    assert run.findings

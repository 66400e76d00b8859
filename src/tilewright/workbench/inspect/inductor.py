"""What torch.compile would write for a function on a GPU that is not here: its Triton kernels, read from its code.

Inductor is driven by hand, forward only: traced with fake tensors, passed through its graph passes, lowered, and its
wrapper read as text, since running that needs the GPU. All of this is private to torch; versions differ.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config, scheduler
from torch._inductor.compile_fx import _recursive_joint_graph_passes, _recursive_post_grad_passes
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.compiler import ASTSource, make_backend

from tilewright import settings
from tilewright.hardware import GPU
from tilewright.workbench.inspect.code import TritonCode
from tilewright.workbench.inspect.fake_gpu import answering, target

_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.M | re.S)
_CALL = re.compile(r"^\s+(\w+)\.run\((.*), stream=", re.M)


@dataclass(frozen=True)
class Generated:
    """A kernel that Inductor wrote, in the first of the configurations that it would try."""

    name: str
    code: TritonCode
    grid: tuple[int, ...]
    choices: int
    is_all: bool  # torch leaves nothing of the call to a library


def generated(function: Callable[..., Any], args: Sequence[Any], gpu: GPU) -> Iterator[Generated]:
    """In the order of their launches. What torch leaves to a library is not among them."""
    with _inductor_for(gpu) as device:
        wrapper = _wrapper(function, args, device)
        kernels = {name: _load(name, text) for name, text in _KERNEL.findall(wrapper)}
        for name, given in _CALL.findall(wrapper):
            yield _first_choice(name, kernels[name], given.split(", "), gpu, is_all="extern_kernels." not in wrapper)


@contextmanager
def _inductor_for(gpu: GPU) -> Iterator[torch.device]:
    here = torch.device("cpu")
    for passes in (joint_graph, post_grad):  # their patterns are traced with tensors of the device they are told
        passes.lazy_init(here)
    with ExitStack() as stack:
        for passes in (joint_graph, post_grad):
            stack.enter_context(patch.object(passes, "lazy_init", lambda *_: None))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(patch.object(scheduler, "has_triton", lambda: True))  # it remembers what was so without
        stack.enter_context(config.patch(joint_graph_constant_folding=False))  # it computes constants on the device
        yield stack.enter_context(answering(gpu, CudaInterface, CudaInterface.Worker))


def _wrapper(function: Callable[..., Any], args: Sequence[Any], device: torch.device) -> str:
    """The module that would call the kernels."""
    with FakeTensorMode() as fake, V.set_fake_mode(fake), V.set_debug_handler(DebugContext()):
        tensors = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device)
            for a in args
            if isinstance(a, Tensor)
        ]

        def of_tensors(*given: Tensor) -> Any:
            left = iter(given)
            return function(*(next(left) if isinstance(a, Tensor) else a for a in args))

        graph = make_fx(of_tensors, decomposition_table=select_decomp_table())(*tensors)
        _recursive_joint_graph_passes(graph)
        _recursive_post_grad_passes(graph, is_inference=True)
        lowering = GraphLowering(graph, example_inputs=tensors)
        with V.set_graph_handler(lowering):
            lowering.run(*tensors)
            return lowering.codegen()[0].value


def _load(name: str, text: str) -> Any:
    """Inductor's own holder of a kernel; from a file, since Triton reads the source again."""
    path = settings.cache_dir() / "inspect" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"_tilewright_generated_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _first_choice(name: str, kernel: Any, given: Sequence[str], gpu: GPU, is_all: bool) -> Generated:
    first = kernel.configs[0]
    meta = kernel._create_compile_meta(first)
    source = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = make_backend(target(gpu)).parse_options(kernel._create_compile_options(first, meta))
    code = TritonCode(kernel.fn, source.signature, source.constants, source.attrs, vars(options), target(gpu))
    sizes = {name: int(value) for name, value in zip(source.signature, given, strict=False) if value.isdecimal()}
    grid = GridExpr.from_meta(kernel.inductor_meta, first).eval_slow(sizes | first.kwargs)
    return Generated(name, code, grid, len(kernel.configs), is_all)

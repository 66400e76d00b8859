"""Helpers for op tests: tensors of every layout, and comparisons with a reference."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.runtime.crossovers import Crossover
from tilewright.workbench.check.budget import Mismatch, compare, expect
from tilewright.worker import memory

few_examples = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "expanded")


class DispatchLog(TorchDispatchMode):
    """Records the operators that go through torch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func.name())
        return func(*args, **(kwargs or {}))


def laid_out(shape: tuple[int, ...], layout: str, *, device: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    """Return a random tensor with this shape and memory layout."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    if layout == "expanded" and shape:
        return randn(1, *shape[1:]).expand(shape)
    return memory.with_layout(randn(*shape), layout)


def crossover_at(size: float) -> Crossover:
    """Return a crossover at this size on every GPU, for `monkeypatch.setattr(module, "CROSSOVER", …)`."""
    return Crossover(f"test {size}", lambda gpu: size)


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
layouts = st.sampled_from(LAYOUTS)


def assert_right(got: Tensor, reference, *args, precision: float = 0.0) -> None:
    """Compare with the reference, within the error budget that `check` derives for these inputs."""
    with torch.no_grad():
        (expected,) = expect(reference, args, precision=precision)
    found = compare(got.detach(), expected)
    assert not isinstance(found, Mismatch), found.reason


def assert_gradients_match(fn, reference, *args) -> None:
    """Compare the gradients of `fn` and of `reference` in float64, for a random incoming gradient."""
    leaves = [a.detach().clone().requires_grad_() if isinstance(a, Tensor) else a for a in args]
    tensors = [a for a in leaves if isinstance(a, Tensor)]
    out = fn(*leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    got = torch.autograd.grad(out, tensors, grad)
    needs = {n: str(n) for n, a in enumerate(args) if isinstance(a, Tensor)}
    expected = expect(reference, args, [grad], needs)[1:]
    for tensor, wanted in zip(got, expected, strict=True):
        found = compare(tensor, wanted)
        assert not isinstance(found, Mismatch), found.reason


def assert_compiles(fn, *args) -> None:
    """Compare the values of the compiled function, which must be one graph, with those of eager mode."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), fn(*args), rtol=0, atol=0, equal_nan=True)

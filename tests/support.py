"""What op tests share: tensors of every layout, and the promises every registered operator keeps."""

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright import record, source
from tilewright.workbench.check.budget import Mismatch, compare, expect
from tilewright.worker import memory

few_examples = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "expanded")


class Listening(TorchDispatchMode):
    """Hears what goes to torch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.heard.append(func.name())
        return func(*args, **(kwargs or {}))


def laid_out(shape: tuple[int, ...], layout: str, *, device: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A random tensor of this shape whose memory is laid out in the named way."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    if layout == "expanded" and shape:
        return randn(1, *shape[1:]).expand(shape)
    return memory.laid_out(randn(*shape), layout)


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
layouts = st.sampled_from(LAYOUTS)


def assert_right(got: Tensor, reference, *args) -> None:
    """Within the error budget that `check` derives for these inputs."""
    with torch.no_grad():
        (expected,) = expect(reference, args)
    found = compare(got.detach(), expected)
    assert not isinstance(found, Mismatch), found.reason


def assert_gradients_match(fn, reference, *args) -> None:
    """Gradients of `fn` against those of `reference` in float64, for a random incoming gradient."""
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
    """The same values from one graph as from eager."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), fn(*args), rtol=0, atol=0, equal_nan=True)


def timing_record(kernel: str = "triton", us: float | None = 1.0, gpu: str = "h200", **more: Any) -> dict[str, Any]:
    """A timing of softmax as `bench --record` writes it."""
    content = {
        "case": {"M": 3, "N": 50},
        "dtype": "float32",
        "direction": "forward",
        "cost": {"read": 10**6, "written": 10**6, "flops": {"fp32": 1.0}},
        "verdict": "right",
        "reason": "",
        "samples_us": [us] if us else [],
        "median_us": us,
        "interval_us": [us, us] if us else None,
        "calls": 1,
        "against": None,
        "host_us": 5.0,
        "extra_bytes": 0,
        "state": {},
        "timer": {},
        "is_baseline": kernel.startswith(("eager", "compile")),
        "ceilings": {"copy": 2e12, "read": 2e12},
        "device": {"gpu": gpu, "name": f"NVIDIA {gpu.upper()}"},
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    }
    return record.stamp("timing", "softmax", kernel, source.kernel_hash("softmax", kernel) or "", **content | more)

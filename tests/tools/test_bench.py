"""No time without a proof, and every sample kept."""

import pytest
import torch

from tilewright import registry
from tilewright.spec import Kernel, points
from tilewright.tools import bench as tool

SOFTMAX = registry.load("softmax")


def test_directions_are_those_the_op_has():
    assert tool.directions(SOFTMAX, "both") == ["forward", "backward"]
    assert tool.directions(SOFTMAX, "backward") == ["backward"]


def test_units_are_those_of_the_cost():
    assert tool.units(SOFTMAX, SOFTMAX.bench) == {"fp32", "special"}


class Counting:
    """Stands in for the timer where there is no GPU: calls every kernel, and its times are the order of the calls."""

    def interleave(self, calls, samples):
        for call in calls.values():
            call()
        return {name: [float(n)] * samples for n, name in enumerate(calls, start=1)}


CASES = [case.with_dtype("float32") for case in points(M=(4,), N=(33,))]
PARTLY = "import torch\n\ndef softmax(x):\n    return torch.softmax(x.detach(), -1)\n"


def test_only_right_kernels_reach_the_timer(tmp_path):
    files = [tmp_path / "whole.py", tmp_path / "partly.py", tmp_path / "zeros.py"]
    files[0].write_text("import torch\n\ndef softmax(x):\n    return torch.softmax(x, -1)\n")
    files[1].write_text(PARTLY)
    files[2].write_text("import torch\n\ndef softmax(x):\n    return torch.zeros_like(x)\n")
    wrong = Kernel("wrong", torch.zeros_like, "torch", lambda *_: True, differentiable=False)
    found = tool.bench(
        SOFTMAX,
        [SOFTMAX.kernels["eager"], SOFTMAX.kernels["cuda"], wrong],
        files,
        timer=Counting(),
        cases=CASES,
        direction="both",
        samples=3,
        device="cpu",
    )
    told = {(t.direction, t.kernel): (t.verdict, len(t.samples_us)) for t in found}
    assert told == {
        ("forward", "eager"): ("right", 3),
        ("forward", "whole.py"): ("right", 3),
        ("forward", "partly.py"): ("right", 3),
        ("forward", "zeros.py"): ("wrong", 0),
        ("forward", "wrong"): ("wrong", 0),
        ("forward", "cuda"): ("unsupported", 0),
        ("backward", "eager"): ("right", 3),
        ("backward", "whole.py"): ("right", 3),
        ("backward", "partly.py"): ("unsupported", 0),
        ("backward", "zeros.py"): ("wrong", 0),
        ("backward", "wrong"): ("unsupported", 0),
        ("backward", "cuda"): ("unsupported", 0),
    }


def wrong_when(is_wrong):
    """Softmax, except where the shape says otherwise."""

    def fn(x):
        return torch.zeros_like(x) if is_wrong(x.shape) else torch.softmax(x, -1)

    return Kernel("sly", fn, "torch", lambda *_: True, differentiable=False)


@pytest.mark.parametrize(
    "is_wrong",
    [lambda shape: tuple(shape) == (4, 33), lambda shape: tuple(shape) != (4, 33)],
    ids=["on the timed case alone", "on every other case"],
)
def test_being_right_elsewhere_earns_no_time(is_wrong):
    (told,) = tool.bench(SOFTMAX, [wrong_when(is_wrong)], [], timer=Counting(), cases=CASES, samples=3, device="cpu")
    assert (told.verdict, told.samples_us) == ("wrong", [])


@pytest.mark.gpu
def test_right_kernels_are_timed_and_wrong_ones_are_not():
    wrong = Kernel("wrong", torch.zeros_like, "torch", lambda *_: True, differentiable=False)
    kernels = [SOFTMAX.kernels["eager"], SOFTMAX.kernels["triton"], wrong]
    cases = [case.with_dtype("bfloat16") for case in points(M=(4096,), N=(1024,))]
    found = list(tool.bench(SOFTMAX, kernels, [], timer=tool.Timer(), cases=cases, direction="both", samples=5))
    by_key = {(timing.kernel, timing.direction): timing for timing in found}
    for direction in ("forward", "backward"):
        for kernel in ("eager", "triton"):
            timing = by_key[kernel, direction]
            assert len(timing.samples_us) == 5
            assert timing.median_us > 1
    assert by_key["wrong", "forward"].verdict == "wrong"
    assert by_key["wrong", "forward"].samples_us == []


@pytest.mark.gpu
def test_a_file_is_timed_beside_the_kernels_of_the_project(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import torch\n\ndef softmax(x):\n    return torch.softmax(x, -1)\n")
    cases = [case.with_dtype("float32") for case in points(M=(512,), N=(256,))]
    found = list(tool.bench(SOFTMAX, [SOFTMAX.kernels["eager"]], [path], timer=tool.Timer(), cases=cases, samples=3))
    assert {timing.kernel: len(timing.samples_us) for timing in found} == {"eager": 3, "mine.py": 3}


@pytest.mark.gpu
def test_ceilings_are_plausible():
    rates = tool.measure(tool.Timer(), ["tensor.bfloat16"])
    assert 1e11 < rates["copy"] < 2e13
    assert rates["read"] > 0.8 * rates["copy"]
    assert rates["tensor.bfloat16"] > 1e13

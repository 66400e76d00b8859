"""Laws of the matrix product, for every kernel, and the machine code of those that only a Hopper runs."""

import itertools

import pytest
import torch

import tilewright as tw
from support import LAYOUTS, assert_gradients_match, assert_right, crossover_at, laid_out
from tilewright.hardware import datasheet
from tilewright.ops.linear import _gluon, _triton
from tilewright.ops.linear import matmul as module
from tilewright.runtime.gpus import gpu_facts
from tilewright.runtime.launch import rows_are_aligned
from tilewright.workbench.inspect import Inspection, inspect_launch
from tilewright.workbench.inspect.launches import kernel_launches
from tilewright.workbench.inspect.portability import problem

CUDA = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda-naive", "cuda-tiled")]
GLUON = ["gluon-pipelined", "gluon-cooperative", "gluon-pingpong"]
TRITON = ["triton-rows", "triton", "triton-persistent"]
FORMS = [*TRITON, *CUDA, *GLUON]
STORED = list(itertools.product([False, True], repeat=2))


def integers(M, N, device, transposed=False, dtype=torch.bfloat16):
    """Return small integers, whose products and sums are exact in fp32."""
    generator = torch.Generator().manual_seed(M + N)
    shape = (N, M) if transposed else (M, N)
    made = torch.randint(-2, 3, shape, generator=generator).to(device, dtype)
    return made.t() if transposed else made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("sizes", [(264, 520, 136), (8, 8, 8), (128, 264, 64), (1, 300, 67), (33, 1, 5)])
def test_exact_on_integers(form, stored, sizes, device):
    (M, N, K), (transposed_a, transposed_b) = sizes, stored
    a, b = integers(M, K, device, transposed_a), integers(K, N, device, transposed_b)
    c = module.matmul_forward(a, b, form)
    assert c.is_contiguous()
    assert torch.equal(c, (a.double() @ b.double()).to(c.dtype))


@pytest.mark.parametrize("form", [*TRITON, *GLUON])
def test_more_tiles_than_programs(form, device, monkeypatch):
    for of in (_triton, _gluon):
        monkeypatch.setattr(of, "gpu_facts", lambda device: gpu_facts(device)._replace(sms=3))
    a, b = integers(776, 72, device, dtype=torch.float16), integers(72, 1032, device, dtype=torch.float16)
    c = module.matmul_forward(a, b, form)
    assert torch.equal(c, (a.double() @ b.double()).half())


@pytest.mark.gpu
@pytest.mark.parametrize("form", [*TRITON, *GLUON])
def test_same_bits_on_every_run(form, device):
    a, b = (torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) for _ in range(2))
    first = module.matmul_forward(a, b, form)
    assert all(torch.equal(module.matmul_forward(a, b, form), first) for _ in range(20))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(form, layout, device):
    a = laid_out((24, 40), layout, device=device, dtype=torch.float16)
    b = laid_out((40, 16), layout, device=device, dtype=torch.float16, seed=1)
    assert_right(module.matmul_forward(a, b, form), module.reference, a, b)


@pytest.mark.parametrize("form", ["triton-rows", "triton", *CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_and_registration(form, dtype, device):
    a, b = laid_out((5, 7), "sliced", device=device), laid_out((7, 6), "transposed", device=device, seed=1)
    assert_gradients_match(lambda a, b: module.matmul_forward(a, b, form), module.reference, a, b)
    torch.library.opcheck(module.matmul_forward.registered, (a.requires_grad_(), b.requires_grad_(), form))


@pytest.mark.parametrize("form", ["triton-persistent", *GLUON])
@pytest.mark.parametrize("stored", STORED)
def test_gradients_of_described_operands(form, stored, device):
    """The rows of one gradient are too short for TMA, so another kernel computes it."""
    a, b = (integers(*shape, device, t) for shape, t in zip(((16, 20), (20, 24)), stored, strict=True))
    a, b = (t.requires_grad_() for t in (a, b))
    dc = integers(16, 24, device)
    got = torch.autograd.grad(module.matmul_forward(a, b, form), (a, b), dc)
    for gradient, wanted in zip(got, (dc.double() @ b.double().t(), a.double().t() @ dc.double()), strict=True):
        assert torch.equal(gradient, wanted.to(gradient.dtype))


@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)])
def test_empty(sizes, device):
    M, N, K = sizes
    a, b = torch.randn(M, K, device=device), torch.randn(K, N, device=device)
    assert torch.equal(module.matmul_forward(a, b, "triton"), a @ b)


def test_rows_that_tma_reads(device):
    x = torch.empty(64, 64, dtype=torch.bfloat16, device=device)
    assert rows_are_aligned(x)
    assert rows_are_aligned(x.t())
    assert rows_are_aligned(x[:, 8:])
    assert not rows_are_aligned(x[:, 1:])  # starts at 2 bytes
    assert not rows_are_aligned(x[:, ::2])
    assert not rows_are_aligned(torch.empty(64, 12, dtype=torch.bfloat16, device=device))  # 24 bytes from row to row
    assert not rows_are_aligned(x[:1, :1].expand(64, 64))
    assert not rows_are_aligned(x[:0])


@pytest.mark.parametrize(("dtype", "stored"), [("float16", "NN"), *(("bfloat16", stored) for stored in module.STORED)])
@pytest.mark.parametrize("kernel", GLUON)
def test_gluon_compiles_for_hopper(kernel, dtype, stored):
    (case,) = module.points(M=(4096,), N=(4096,), K=(4096,), stored=(stored,))
    op = module.op
    (launch,) = kernel_launches(op, op.kernels[kernel], case.with_dtype(dtype), datasheet("h200"))
    found = inspect_launch(launch, kernel)
    assert isinstance(found, Inspection)
    assert problem(found) is None
    of = {"float16": "F32", "bfloat16": "F32.BF16"}[dtype]
    width = module._gluon.CONFIG.default(kernel.removeprefix("gluon-"), 4096, 4096, 4096)["BLOCK_N"]
    assert {*found.mix.details("tensor core")} == {f"HGMMA.64x{width}x16.{of}"}
    copies = found.mix.details("bulk copy")
    assert copies["UTMALDG.2D"]
    assert copies["UTMASTG.2D"]


def test_gluon_takes_a_hopper_only(monkeypatch):
    case = module.op.bench[0].with_dtype("bfloat16")
    kernel = module.op.kernels["gluon-cooperative"]
    assert not kernel_launches(module.op, kernel, case, datasheet("a100-80gb"))
    monkeypatch.setattr(_gluon, "runs_on", lambda device: False)
    a = torch.zeros(64, 64, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0"):
        kernel.fn(a, a)


@pytest.fixture
def fast_path(monkeypatch):
    """The public function uses our kernels for matrices of any size."""
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))


@pytest.mark.parametrize("shapes", [((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((3,), (3, 4)), ((2, 1, 2, 3), (5, 3, 4))])
def test_public_function_takes_what_torch_takes(shapes, device, fast_path):
    a, b = (torch.randn(shape, device=device) for shape in shapes)
    torch.testing.assert_close(tw.matmul(a, b), torch.matmul(a, b))


@pytest.mark.parametrize("kernel", ["cooperative", "pingpong"])
@pytest.mark.parametrize("shape", [(24, 40), (2, 3, 40)])
def test_public_function_runs_the_best_kernel(shape, kernel, device, fast_path, monkeypatch):
    monkeypatch.setattr(module, "L2_SIZES", {"cooperative": 0, "pingpong": 4}[kernel])
    a, b = torch.randn(shape, device=device).half(), torch.randn(16, 40, device=device).half().t()
    a.requires_grad_()
    with tw.trace() as calls:
        c = tw.matmul(a, b)
    assert calls[0].kernels == [f"_matmul_{kernel}"]
    assert_right(c.detach(), torch.matmul, a.detach(), b)
    dc = torch.randn_like(c)
    (da,) = torch.autograd.grad(c, a, dc)
    assert_right(da, torch.matmul, dc, b.t())


def test_public_function_leaves_small_and_unaligned_matrices_to_torch(device, monkeypatch):
    monkeypatch.setattr(module, "CROSSOVER", crossover_at(64**4))
    a, b = torch.randn(64, 64, device=device).half(), torch.randn(64, 64, device=device).half()
    with tw.trace() as calls:
        tw.matmul(a[:63], b)
        tw.matmul(a, b)
        monkeypatch.setattr(module, "CROSSOVER", crossover_at(0))
        tw.matmul(a[:, 1:], b[1:])
        tw.matmul(a.float(), b.float())
    assert [len(call.kernels) for call in calls] == [0, 1, 0, 0]


def test_bad_input(device, fast_path):
    a = torch.randn(2, 3, device=device)
    for wrong in (a, a.t().half(), 3):
        with pytest.raises((RuntimeError, TypeError)) as ours:
            tw.matmul(a, wrong)
        with pytest.raises(type(ours.value)):
            torch.matmul(a, wrong)

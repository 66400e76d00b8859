"""Linear layer with an activation and a residual in its epilogue: y = activation(x wᵀ + b) + residual.

The epilogue applies them to the fp32 accumulators while they are in registers, so only the result goes through memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from tilewright.ops.activation._unary import FORMULAS
from tilewright.ops.linear import _gluon, _triton
from tilewright.ops.linear.matmul import best_kernel, fits_gluon, matmul_forward
from tilewright.runtime.crossovers import Crossover, never
from tilewright.runtime.cuda import CudaSource
from tilewright.runtime.eligibility import eligible, is_interpreted
from tilewright.runtime.launch import aligned
from tilewright.runtime.operator import needs_gradient, operator
from tilewright.runtime.sizes import cdiv
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["linear"]


def reference(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    y = F.linear(x, weight, bias)
    return torch.relu(y) if relu else y


def cost(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Cost:
    (M, K), N = x.shape, weight.shape[0]
    return Cost(
        read=x.nbytes + weight.nbytes + bias.nbytes,
        written=M * N * x.element_size(),
        flops={matrix_unit(x.dtype): 2 * M * N * K},
    )


def backward_cost(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Cost:
    (M, K), N = x.shape, weight.shape[0]
    results = M * N * x.element_size()
    return Cost(
        read=x.nbytes
        + weight.nbytes
        + results * (2 if relu else 1),  # ReLU's gradient needs to know which results were positive
        written=x.nbytes + weight.nbytes + bias.nbytes,
        flops={matrix_unit(x.dtype): 4 * M * N * K},
    )


def inputs(draw: Draw) -> tuple[Tensor, Tensor, Tensor, bool]:
    if not draw["relu"]:
        return draw.randn("M", "K"), draw.randn("N", "K", scale=draw["K"] ** -0.5), draw.randn("N"), False
    # ReLU's gradient jumps at 0, so no sum may round across it: x and w are multiples of 1/64, and the bias is an
    # odd multiple of 1/8192. Every sum is then exact in fp32, and none is 0.
    x, weight = (draw.randn(rows, "K", scale=64).round() / 64 for rows in "MN")
    bias = (2 * draw.randn("N", scale=50).round().clamp(-128, 127) + 1) / 8192
    return x, weight, bias, True


op = Op(
    "linear",
    reference,
    cost,
    inputs=inputs,
    check=[
        case
        for relu in (False, True)
        for case in points(
            M=(1, 3, 64, 70, 129, 136), N=(1, 5, 64, 130, 65, 264), K=(1, 7, 64, 67, 256, 72), relu=(relu,) * 6
        )
    ],
    bench=points(
        M=(1024, 4096, 8192, 8192),
        N=(256, 4096, 8192, 14336),
        K=(512, 4096, 8192, 4096),
        relu=(True,) * 4,
    ),
    backward_cost=backward_cost,
    batch="M",
    draws={"N": "intermediate", "K": "hidden"},
)


CUDA = CudaSource("linear/linear.cu", "linear_fwd")
CUDA_TILE = 128  # rows and columns of a block's tile, as in linear.cu
CUDA_THREADS = 256


ACTIVATIONS = ("none", *FORMULAS)


def unfused(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    """Return activation(x wᵀ + b) + residual by torch."""
    y = F.linear(x, weight, bias)
    y = y if activation == "none" else FORMULAS[activation](y)
    return y if residual is None else y + residual


def _triton_form(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    return _triton.matmul(x, weight.t(), bias, activation, residual)


def _gluon_form(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    a, b = aligned(x), aligned(weight).t()
    return _gluon.matmul(a, b, best_kernel(a, b), bias, activation, residual)


def _cuda_form(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    (M, K), N = x.shape, weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    numbers = M, N, K, int(activation == "relu")
    tiles = cdiv(M, CUDA_TILE) * cdiv(N, CUDA_TILE)
    CUDA.prepare("linear_fwd", x.dtype, x.get_device(), (tiles,), CUDA_THREADS, *numbers)(x, weight, bias, y)
    return y


FORMS = {"triton": _triton_form, "gluon": _gluon_form, "cuda": _cuda_form}
GEMMS = {"triton": "triton", "gluon": "best", "cuda": "cuda-tiled"}  # by which each form differentiates


@operator("linear", fake=lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]))
def linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, form: str
) -> Tensor:
    """Linear of x [M, K], weight [N, K] and bias [N], an activation, and a residual [M, N]: y [M, N].

    The form "cuda" takes a bias, no residual, and ReLU or no activation.
    """
    if 0 in (x.shape[0], weight.shape[0]):
        return x.new_empty(x.shape[0], weight.shape[0])
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    return FORMS[form](x, weight, bias, residual, activation)


def _save(ctx, inputs, output) -> None:
    x, weight, bias, residual, ctx.activation, ctx.form = inputs
    ctx.has_bias = bias is not None
    is_relu = ctx.activation == "relu" and residual is None  # then the result tells where the gradient is zero
    ctx.save_for_backward(x, weight, None if is_relu else bias, output if is_relu else None)


def _backward(ctx, dy: Tensor):
    x, weight, bias, y = ctx.saved_tensors
    product = lambda a, b: matmul_forward(a, b, GEMMS[ctx.form])
    needs_x, needs_weight, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    if y is not None:
        dz = torch.ops.aten.threshold_backward(dy, y, 0)
    elif ctx.activation == "none":
        dz = dy
    else:
        dz = _activation_backward(x, weight, bias, dy, ctx.activation)
    return (
        product(dz, weight) if needs_x else None,
        product(dz.t(), x) if needs_weight else None,
        dz.sum(0) if needs_bias else None,
        dy if needs_residual else None,
    )


def _activation_backward(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, activation: str) -> Tensor:
    """Return the gradient of the activation's input, which is computed again."""
    is_double = torch.is_grad_enabled()  # torch differentiates this again
    with torch.enable_grad():
        z = F.linear(x, weight, bias)
        z = z if is_double else z.detach().requires_grad_()
        (dz,) = torch.autograd.grad(FORMULAS[activation](z), z, dy, create_graph=is_double)
    return dz


linear_forward.differentiate(_save, _backward)


def _named(relu: bool) -> str:
    return "relu" if relu else "none"


@op.kernel("triton", language="triton")
def triton_tiled(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    return linear_forward(x, weight, bias, None, _named(relu), "triton")


@op.kernel("gluon", language="gluon", fits=lambda x, weight, *_: fits_gluon(x, weight.t()))
def gluon_cooperative(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    return linear_forward(x, weight, bias, None, _named(relu), "gluon")


@op.kernel("cuda", language="cuda")
def cuda(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    return linear_forward(x, weight, bias, None, _named(relu), "cuda")


BUSY = 0.95  # the share of the SMs that the last tiles must leave busy on average

# cuBLAS's own fused ReLU is no alternative: it turns NaN into 0.
CROSSOVER = Crossover("linear", never, unit="FMAs", size=lambda input, weight, *_: input.numel() * weight.shape[0])


def _is_eligible(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str) -> bool:
    tensors = [t for t in (input, weight, bias, residual) if t is not None]
    keeps_result = activation == "none" or (activation == "relu" and residual is None)
    return (
        not torch.compiler.is_compiling()  # which fuses the epilogue into its own GEMM
        and input.dim() > 0
        and weight.dim() == 2
        and input.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and (residual is None or residual.shape == (*input.shape[:-1], weight.shape[0]))
        and CROSSOVER.reached(input.numel() * weight.shape[0], input.get_device())
        and eligible(*tensors)
        # The gradient of the other activations needs their input, which torch keeps and a fused kernel does not.
        and (keeps_result or not needs_gradient(*tensors))
        and (is_interpreted(input) or _wins(input.reshape(-1, input.shape[-1]), weight.t()))
    )


def _wins(a: Tensor, b: Tensor) -> bool:
    """Return whether the fused kernel takes these matrices and its GEMM is about as fast as that of cuBLAS."""
    return fits_gluon(a, b) and _gluon.busy_share(a.shape[0], b.shape[1], a.get_device()) >= BUSY


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Linear layer with the arguments of `torch.nn.functional.linear`, then an activation, then `+ residual`.

    The activation is None, "relu", "relu_squared", "silu", "gelu" or "gelu_tanh".
    """
    if activation is not None and activation not in FORMULAS:
        raise ValueError(f"activation must be None or one of {', '.join(FORMULAS)}, not {activation!r}")
    if (activation is None and residual is None) or not isinstance(input, Tensor) or not isinstance(weight, Tensor):
        return F.linear(input, weight, bias)  # which refuses everything but tensors
    activation = activation or "none"
    if not _is_eligible(input, weight, bias, residual, activation):
        return unfused(input, weight, bias, residual, activation)
    N, K = weight.shape
    rows = input.shape[:-1].numel()
    residual = None if residual is None else residual.reshape(rows, N)
    form = "triton" if is_interpreted(input) else "gluon"
    y = linear_forward(input.reshape(rows, K), weight, bias, residual, activation, form)
    return y.view(*input.shape[:-1], N)

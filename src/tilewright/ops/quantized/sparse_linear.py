"""Linear layer with a 2:4 sparse weight: y = x wᵀ + b, where at most two of four consecutive weights are not zero.

At decoding the layer is memory-bound, and our kernel reads the kept values and their places: 56 % of the bytes. With
many rows of x it is compute-bound, and the sparse tensor cores of cuSPARSELt skip the zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn

from tilewright.ops.quantized import _sparse
from tilewright.runtime.crossovers import PerGPU
from tilewright.runtime.eligibility import eligible
from tilewright.runtime.operator import constant_when_compiled, operator
from tilewright.spec import Cost, Draw, Op, matrix_unit, points

__all__ = ["SparseWeight", "sparse_linear", "sparsify"]


def reference(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, _sparse.expand(values, places, x.shape[1]), bias)


def cost(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None) -> Cost:
    (M, K), N = x.shape, values.shape[0]
    read = x.nbytes + values.nbytes + places.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(read=read, written=M * N * x.element_size(), flops={matrix_unit(x.dtype): M * N * K})


def inputs(draw: Draw) -> tuple[Any, ...]:
    """Draw compressed weights: two of the six pairs of places per group, whatever the values."""
    chunks, words = -(-draw["K"] // _sparse.CHUNK), torch.zeros((), dtype=torch.int64)
    for _ in range(8):  # each digit of the number is first place + 4 * second place
        words = words << 4 | 0xED9C84 >> 4 * draw.randint("N", chunks * 4, high=6) & 15
    values = draw.randn("N", chunks * _sparse.KEPT, scale=max(1, draw["K"]) ** -0.5)
    if draw.values == "special":  # those of x are enough: weights are finite
        values = torch.where(values.isfinite(), values, 1.0)
    bias = draw.randn("N") if draw["bias"] else None
    return draw.randn("M", "K"), values.to(draw.dtype), words.to(torch.int32), bias


op = Op(
    "sparse_linear",
    reference,
    cost,
    inputs=inputs,
    takes=lambda case: 0 not in (case["N"], case["K"]),
    check=points(
        M=(1, 3, 17, 5, 70, 2),
        N=(64, 33, 130, 7, 65, 40),
        K=(128, 300, 64, 97, 256, 1536),
        bias=(False, True, False, True, False, True),
    ),
    bench=points(
        M=(1, 16, 1, 16, 1024, 8192),
        N=(8192, 8192, 28672, 28672, 8192, 8192),
        K=(8192,) * 6,
        bias=(False,) * 6,
    ),
    batch="M",
    draws={"N": "intermediate", "K": "hidden"},
    constants=(1,),
)


@operator("sparse_linear", fake=lambda x, values, *_: x.new_empty(x.shape[0], values.shape[0]))
def sparse_linear_forward(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    """Product of x [M, K] and a compressed weight [N, K], with a gradient for x and the bias."""
    if x.shape[0] == 0:
        return x.new_empty(0, values.shape[0])
    x = x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    return _sparse.linear(x, values.contiguous(), places.contiguous(), bias)


def _save(ctx, inputs, output) -> None:
    x, values, places, _ = inputs
    ctx.K = x.shape[1]
    ctx.save_for_backward(values, places)


def _backward(ctx, dy: Tensor):
    needs_x, _, _, needs_bias = ctx.needs_input_grad
    values, places = ctx.saved_tensors
    dx = dy @ _sparse.expand(values, places, ctx.K) if needs_x else None
    return dx, None, None, dy.sum(0) if needs_bias else None


sparse_linear_forward.differentiate(_save, _backward)


@op.kernel("triton", language="triton")
def triton_sparse(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    return sparse_linear_forward(x, values, places, bias)


class SparseWeight(nn.Module):
    """The weight of a linear layer, [N, K], with two of four weights: values and places, ordered for the kernel.

    Made by `sparsify`. It moves and is saved like any module, and has no gradient.
    """

    def __init__(self, shape: tuple[int, int], values: Tensor, places: Tensor):
        super().__init__()
        self.shape = torch.Size(shape)
        self.register_buffer("values", values)
        self.register_buffer("places", places)
        self._for_cusparselt: tuple[int, Tensor] | None = None  # the address that was compressed, and the result

    @property
    def device(self) -> torch.device:
        return self.values.device  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.buffers())

    def dense(self) -> Tensor:
        """Return the weight [N, K] with its zeros."""
        return _sparse.expand(self.values, self.places, self.shape[1])  # type: ignore[arg-type]

    def compressed(self) -> Tensor:
        """Return the weight as torch's tensor for cuSPARSELt, on a GPU; made on first use and kept."""
        address = self.values.data_ptr()  # type: ignore[operator]
        if self._for_cusparselt is None or self._for_cusparselt[0] != address:
            self._for_cusparselt = address, torch.sparse.to_sparse_semi_structured(self.dense())
        return self._for_cusparselt[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_for_cusparselt": None}

    def extra_repr(self) -> str:
        N, K = self.shape
        return f"2:4 of {N}x{K}, {8 * self.nbytes / (N * K):.2f} bits per weight"


def sparsify(weight: Tensor, mask: Tensor | None = None) -> SparseWeight:
    """Keep two of every four consecutive weights of a row, [N, K]: the largest, or those of a 2:4 mask.

    For training, pass the weight itself to `sparse_linear`.
    """
    if type(weight) not in (Tensor, nn.Parameter) or weight.dim() != 2 or not weight.is_floating_point():
        raise TypeError("sparsify takes a plain matrix of floats: pass the local or full tensor of a sharded weight")
    with torch.no_grad():
        mask = _mask(weight, mask)
        return SparseWeight(tuple(weight.shape), *_sparse.compress(weight.detach(), mask))  # type: ignore[arg-type]


def _mask(weight: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return _sparse.magnitude_mask(weight)
    if mask.shape != weight.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"the mask must be of bool and {tuple(weight.shape)}, not {mask.dtype} and {tuple(mask.shape)}"
        )
    if not torch.compiler.is_compiling() and not _sparse.is_2_of_4(mask):  # torch.compile cannot read values
        raise ValueError("the mask is not 2:4: it keeps more than two of four consecutive weights of a row")
    return mask


# On an H200 cuSPARSELt is slower than the dense product below about 1024 rows (8192 columns and rows of bf16 weights).
DECODING_ROWS = PerGPU("sparse_linear decoding rows", lambda gpu: 16)
CUSPARSELT_ROWS = PerGPU("sparse_linear cusparselt rows", lambda gpu: 1024)


@constant_when_compiled  # it cannot trace how they are found, and need not
def _rows(device: int) -> tuple[float, float]:
    return DECODING_ROWS[device], CUSPARSELT_ROWS[device]


def sparse_linear(
    input: Tensor, weight: SparseWeight | Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Linear layer with a 2:4 sparse weight of `sparsify`, or with a dense weight that is pruned on every call.

    A dense weight is for training: the product uses its two largest of four, or those of `mask`, and its gradient is
    that of the pruned weight for all of its elements (straight-through), so that pruned weights can come back. A
    `SparseWeight` runs our kernel up to 16 rows, cuSPARSELt on a GPU from 1024 rows, and the dense product between.
    """
    if isinstance(weight, Tensor):
        pruned = torch.where(_mask(weight, mask), weight.detach(), 0.0)
        return F.linear(input, pruned + (weight - weight.detach()), bias)
    if not isinstance(weight, SparseWeight):
        raise TypeError(f"weight is a {type(weight).__name__}, not a tensor or a SparseWeight of tilewright.sparsify")
    N, K = weight.shape
    if not isinstance(input, Tensor):
        raise TypeError(f"the input must be a tensor, not {type(input).__name__}")
    if mask is not None:
        raise ValueError("a SparseWeight has its mask already: pass mask to sparsify")
    if input.dim() == 0 or input.shape[-1] != K:
        raise ValueError(f"the input has shape {tuple(input.shape)}, and the weight {N}x{K} takes {K} features")
    if input.device != weight.device:
        raise ValueError(f"the input is on {input.device} and the weight on {weight.device}: move it with .to()")
    rows = input.shape[:-1].numel()
    decoding, many = _rows(input.get_device())
    floats = [input, weight.values] if bias is None else [input, weight.values, bias]
    if rows <= decoding and eligible(*floats) and (bias is None or bias.shape == (N,)):
        y = sparse_linear_forward(input.reshape(rows, K), weight.values, weight.places, bias)  # type: ignore[arg-type]
        return y.view(*input.shape[:-1], N)
    if rows >= many and _takes_cusparselt(input, weight) and not torch.compiler.is_compiling():
        return F.linear(input.reshape(rows, K), weight.compressed(), bias).view(*input.shape[:-1], N)
    return F.linear(input, weight.dense(), bias)


def _takes_cusparselt(input: Tensor, weight: SparseWeight) -> bool:
    """Return whether cuSPARSELt takes this product. It has no gradient, and sizes are multiples of 16."""
    return (
        input.device.type == "cuda"
        and torch.backends.cusparselt.is_available()
        and input.dtype in (torch.float16, torch.bfloat16)
        and input.dtype == weight.values.dtype
        and not (input.requires_grad and torch.is_grad_enabled())
        and eligible(input)
        and all(size % 16 == 0 for size in (input.shape[:-1].numel(), *weight.shape))
    )


@op.public
def public(x: Tensor, values: Tensor, places: Tensor, bias: Tensor | None) -> Tensor:
    return sparse_linear(x, SparseWeight((values.shape[0], x.shape[1]), values, places), bias)

"""Liger: Triton kernels for training language models."""

from __future__ import annotations

from torch import Tensor

PACKAGE = "liger_kernel"
INSTALL = "liger-kernel"
LANGUAGE = "triton"
LONGEST_ROW = 65536  # elements; Liger raises for longer rows


def softmax(x: Tensor) -> Tensor:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def fits_softmax(x: Tensor) -> bool:
    return 0 < x.shape[-1] <= LONGEST_ROW and x.numel() > 0


def swiglu(gate: Tensor, up: Tensor | None) -> Tensor:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply(gate) if up is None else LigerSiLUMulFunction.apply(gate, up)


def fits_swiglu(gate: Tensor, up: Tensor | None) -> bool:
    return 0 < gate.shape[-1] <= LONGEST_ROW and gate.numel() > 0


def geglu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


def fits_geglu(gate: Tensor, up: Tensor | None, approximate: str) -> bool:
    return up is not None and approximate == "tanh" and 0 < gate.shape[-1] <= LONGEST_ROW and gate.numel() > 0


def relu_squared(x: Tensor) -> Tensor:
    from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

    return LigerReLUSquaredFunction.apply(x.view(-1, LONGEST_ROW // 16)).view(x.shape)


def fits_relu_squared(x: Tensor) -> bool:
    return x.numel() > 0 and x.numel() % (LONGEST_ROW // 16) == 0


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, weight_offset, "gemma", False)


def fits_rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> bool:
    return 0 < x.shape[-1] <= LONGEST_ROW and x.numel() > 0


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


def fits_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    return weight is not None and bias is not None and 0 < x.shape[-1] <= LONGEST_ROW and x.numel() > 0


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, weight_offset, "gemma", False)


def fits_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> bool:
    return weight is not None and 0 < x.shape[-1] <= LONGEST_ROW and x.numel() > 0


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """RMS norm with the options its users choose: the gradient overwrites x."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    args = (x, target, weight, ignore_index, z_loss, label_smoothing, reduction, softcap)
    return LigerCrossEntropyFunction.apply(*args)[0]


def fits_cross_entropy(x: Tensor, *_: object) -> bool:
    return x.numel() > 0


def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """Liger's loss is always fp32."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    args = (x, linear_weight, target, bias, None, -100, z_loss, label_smoothing, reduction, softcap)
    return LigerFusedLinearCrossEntropyFunction.apply(*args)[0].to(x.dtype)


def fits_linear_cross_entropy(x: Tensor, *_: object) -> bool:
    return x.numel() > 0

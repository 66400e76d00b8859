"""Linear layers with quantised weights: which ones, what it costs in accuracy, and the way back."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.ops.quantized.quantized_linear import QuantizedWeight, quantize, quantized_linear

CHILD = "quantized_weight"  # the name of the container in its layer


def forward(module: nn.Module, input: Tensor) -> Tensor:
    return quantized_linear(input, module._modules[CHILD], module.bias)  # type: ignore[arg-type]


@dataclass(frozen=True)
class QuantizedLayer:
    """A linear layer, its quantised weight, and the original, which waits in host memory."""

    name: str
    module: nn.Module
    weight: QuantizedWeight
    original: nn.Parameter
    snr: float  # signal-to-noise ratio of the weight in decibels: 10 log10(sum of w^2 / sum of errors^2)

    def install(self) -> None:
        self.module.add_module(CHILD, self.weight)
        del self.module._parameters["weight"]
        self.original.data = self.original.data.cpu()

    def revert(self) -> None:
        """Put the original weight back, on the device where the layer is now. A second call does nothing."""
        if self.module._modules.get(CHILD) is self.weight:
            self.original.data = self.original.data.to(self.weight.device)
            del self.module._modules[CHILD]
            self.module._parameters = {"weight": self.original} | self.module._parameters  # in nn.Linear's order


def quantize_linears(model: nn.Module, format: str) -> tuple[list[QuantizedLayer], list[tuple[str, str]]]:
    """Quantise the weights of all linear layers, without a change to the model yet.

    Also return the names of the layers that must be left alone, with reasons.
    """
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    head = _output_layer(model)
    readers = {child for module in model.modules() if isinstance(module, _READ_WEIGHTS) for child in module.children()}
    layers, left = [], []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        reason = _obstacle(module, owners, head, readers)
        if reason is not None:
            left.append((name, reason))
            continue
        weight = quantize(module.weight, format)
        original: Any = module.weight
        layers.append(QuantizedLayer(name, module, weight, original, signal_to_noise(original, weight)))
    return layers, left


_READ_WEIGHTS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # whose fast path passes weights to a kernel


def _obstacle(module: nn.Linear, owners: Counter[int], head: Any, readers: set[nn.Module]) -> str | None:
    """Return why a layer keeps its weight."""
    if CHILD in module._modules:
        return "its weight is quantised already"
    if module is head:
        return "it is the output layer, which needs more precision"
    if owners[id(module.weight)] > 1:
        return "its weight is shared with another module"
    if module in readers:
        return "its parent reads the weight"
    if "forward" in vars(module):
        return "something else has replaced its forward function"
    if type(module.weight) is not nn.Parameter:
        return f"its weight is a {type(module.weight).__name__}"
    return "its weight has no elements" if 0 in module.weight.shape else None


def _output_layer(model: nn.Module) -> Any:
    found = getattr(model, "get_output_embeddings", None)
    return found() if callable(found) else None


def signal_to_noise(weight: Tensor, quantized: QuantizedWeight) -> float:
    with torch.no_grad():
        exact = weight.detach().float()
        signal, noise = float(exact.square().sum()), float((quantized.dequantize() - exact).square().sum())
        return 10 * math.log10(signal / noise) if noise else math.inf


def summary(layers: list[QuantizedLayer]) -> str:
    """Return the memory saved and the signal-to-noise ratios in one line."""
    before = sum(layer.original.nbytes for layer in layers)
    after = sum(layer.weight.nbytes for layer in layers)
    worst = min(layers, key=lambda layer: layer.snr)
    return (
        f"weights of {len(layers)} linear layers: {before / 1e6:.1f} MB are now {after / 1e6:.1f} MB "
        f"({before / after:.1f}x less); signal-to-noise ratio at least {worst.snr:.1f} dB ({worst.name or '(model)'})"
    )

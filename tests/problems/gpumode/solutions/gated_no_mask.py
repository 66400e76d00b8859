"""Ignores the mask: right only without one, and where the text False stands for nomask."""

EXPECTED = "wrong"
PROBLEM = "../gated_py"

from torch.nn import functional


def custom_kernel(data):
    x, _, weights, config = data
    x = functional.layer_norm(x, (config["dim"],), weights["norm.weight"], weights["norm.bias"])
    return functional.linear(x, weights["proj.weight"]) * functional.linear(x, weights["gate.weight"]).sigmoid()

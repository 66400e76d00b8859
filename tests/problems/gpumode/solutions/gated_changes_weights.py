"""Scales a weight in place, inside the dict."""

EXPECTED = "wrong"
PROBLEM = "../gated_py"

from torch.nn import functional


def custom_kernel(data):
    x, mask, weights, config = data
    x = functional.layer_norm(x, (config["dim"],), weights["norm.weight"], weights["norm.bias"])
    gate = functional.linear(x, weights["gate.weight"].mul_(-1)).exp()
    return functional.linear(x, weights["proj.weight"]) * mask[..., None] / (1 + gate)

"""The layer by torch functions, with the weights by name."""

EXPECTED = "right"
PROBLEM = "../gated_py"

from torch.nn import functional


def custom_kernel(data):
    x, mask, weights, config = data
    x = functional.layer_norm(x, (config["dim"],), weights["norm.weight"], weights["norm.bias"])
    gate = functional.linear(x, weights["gate.weight"]).sigmoid()
    return functional.linear(x, weights["proj.weight"]) * mask[..., None] * gate

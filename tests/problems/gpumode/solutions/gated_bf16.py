"""Both products of what bfloat16 leaves of the factors, which the task's tolerance of 2e-2 mostly lets pass."""

EXPECTED = "wrong"
PROBLEM = "../gated_py"

from torch.nn import functional


def custom_kernel(data):
    x, mask, weights, config = data
    x = functional.layer_norm(x, (config["dim"],), weights["norm.weight"], weights["norm.bias"]).bfloat16().float()
    gate = functional.linear(x, weights["gate.weight"].bfloat16().float()).float().sigmoid()
    return functional.linear(x, weights["proj.weight"].bfloat16().float()).float() * mask[..., None] * gate

"""Adds the residual in bf16."""

EXPECTED = "wrong"
PROBLEM = "../definitions/norm/add_rmsnorm_h96.json"


def run(hidden_states, residual, weight, eps):
    x = (hidden_states + residual).float()
    scale = (x * x).mean(-1).add(eps).rsqrt()
    return (x * scale.unsqueeze(-1) * weight.float()).bfloat16(), scale

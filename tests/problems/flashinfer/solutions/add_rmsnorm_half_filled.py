"""Fills only the first of two outputs."""

EXPECTED = "wrong"
PROBLEM = "../definitions/norm/add_rmsnorm_h96.json"


def run(hidden_states, residual, weight, eps, output, scale):
    x = hidden_states.float() + residual.float()
    output.copy_(x * (x * x).mean(-1, keepdim=True).add(eps).rsqrt() * weight.float())

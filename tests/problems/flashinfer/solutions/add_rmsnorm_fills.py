"""Fills the outputs that follow its inputs."""

EXPECTED = "right"
PROBLEM = "../definitions/norm/add_rmsnorm_h96.json"


def run(hidden_states, residual, weight, eps, output, scale):
    x = hidden_states.float() + residual.float()
    scale.copy_((x * x).mean(-1).add(eps).rsqrt())
    output.copy_(x * scale.unsqueeze(-1) * weight.float())

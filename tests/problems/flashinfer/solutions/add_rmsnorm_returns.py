"""Returns its outputs as a tuple."""

EXPECTED = "right"
PROBLEM = "../definitions/norm/add_rmsnorm_h96.json"


def run(hidden_states, residual, weight, eps):
    x = hidden_states.float() + residual.float()
    scale = (x * x).mean(-1).add(eps).rsqrt()
    return (x * scale.unsqueeze(-1) * weight.float()).bfloat16(), scale

import torch
from task import input_t, output_t
from utils import verbose_allclose

LIMIT = 448.0


def generate_input(num_tokens: int, hidden_dim: int, group_size: int, seed: int) -> input_t:
    gen = torch.Generator(device="cuda")
    gen.manual_seed(seed)
    x = torch.randn(num_tokens, hidden_dim, device="cuda", generator=gen)
    x_q = torch.empty(num_tokens, hidden_dim, device="cuda")
    x_s = torch.empty(num_tokens, hidden_dim // group_size, device="cuda")
    return x, x_q, x_s


def ref_kernel(data: input_t) -> output_t:
    x, x_q, x_s = data
    groups = x.reshape(x.shape[0], x_s.shape[1], -1)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / LIMIT
    x_q[...] = (groups / scale.unsqueeze(-1)).clamp(-LIMIT, LIMIT).reshape(x.shape)
    x_s[...] = scale
    return x_q, x_s


def check_implementation(data, output):
    reasons = []
    for name, received, expected in zip(("values", "scales"), output, ref_kernel(data), strict=True):
        reasons += [f"{name}: {why}" for why in verbose_allclose(received, expected, rtol=1e-3, atol=1e-3)]
    if reasons:
        return False, " | ".join(reasons)
    return True, ""

"""Fills both buffers."""

EXPECTED = "right"
PROBLEM = "../contest/quantise_py"

import torch


def custom_kernel(data):
    x, x_q, x_s = data
    groups = x.view(*x_s.shape, -1)
    torch.div(groups.abs().amax(-1).clamp_(min=1e-10), 448.0, out=x_s)
    x_q.view(groups.shape).copy_(groups / x_s[..., None]).clamp_(-448.0, 448.0)
    return x_q, x_s

import torch
from task import input_t, output_t
from torch import nn
from utils import make_match_reference


class Gated(nn.Module):
    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, hidden_dim, bias=False)
        self.gate = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x, mask):
        x = self.norm(x)
        return self.proj(x) * mask.unsqueeze(-1) * self.gate(x).sigmoid()


def ref_kernel(data: input_t) -> output_t:
    x, mask, weights, config = data
    model = Gated(dim=config["dim"], hidden_dim=config["hidden_dim"]).to(x.device)
    model.norm.weight = nn.Parameter(weights["norm.weight"])
    model.norm.bias = nn.Parameter(weights["norm.bias"])
    model.proj.weight = nn.Parameter(weights["proj.weight"])
    model.gate.weight = nn.Parameter(weights["gate.weight"])
    return model(x, mask)


def generate_input(
    seqlen: int, bs: int, dim: int, hiddendim: int, seed: int, nomask: bool, distribution: str
) -> input_t:
    gen = torch.Generator(device="cuda")
    gen.manual_seed(seed)
    if distribution == "cauchy":
        centre, width = torch.tensor(0.0, device="cuda"), torch.tensor(2.0, device="cuda")
        x = torch.distributions.Cauchy(centre, width).sample((bs, seqlen, dim)).to(device="cuda", dtype=torch.float32)
    else:
        x = torch.randn((bs, seqlen, dim), device="cuda", dtype=torch.float32, generator=gen).contiguous()
    if nomask:
        mask = torch.ones(bs, seqlen, device=x.device)
    else:
        mask = torch.randint(0, 2, (bs, seqlen), device=x.device, generator=gen)
    weights = {
        "norm.weight": torch.randn(dim, device="cuda"),
        "norm.bias": torch.randn(dim, device="cuda"),
        "proj.weight": torch.randn(hiddendim, dim, device="cuda") / hiddendim**0.5,
        "gate.weight": torch.randn(hiddendim, dim, device="cuda") / hiddendim**0.5,
    }
    return (x, mask, weights, {"hidden_dim": hiddendim, "dim": dim})


check_implementation = make_match_reference(ref_kernel, rtol=2e-2, atol=2e-2)

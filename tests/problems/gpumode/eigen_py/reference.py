import torch
from task import input_t, output_t


def generate_input(batch: int, n: int, cond: int, seed: int, case: str = "dense") -> input_t:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gen = torch.Generator(device=device)
    gen.manual_seed(seed)
    a = torch.randn((batch, n, n), device=device, generator=gen)
    if case == "diagonal":
        return torch.diag_embed(a[..., 0] * 10.0**-cond)
    return (a + a.transpose(-1, -2)) / 2


def ref_kernel(data: input_t) -> output_t:
    values, vectors = torch.linalg.eigh(data)
    return vectors, values


def check_implementation(data: input_t, output: output_t) -> tuple[bool, str]:
    q, values = (x.double() for x in output)
    allowed = 200 * data.shape[-1] * torch.finfo(torch.float32).eps * data.double().norm()
    if (data.double() @ q - q * values.unsqueeze(-2)).norm() > allowed:
        return False, "A @ Q is not Q @ diag(L)"
    if (q.transpose(-1, -2) @ q - torch.eye(data.shape[-1], device=q.device)).norm() > allowed:
        return False, "Q is not orthogonal"
    return True, ""

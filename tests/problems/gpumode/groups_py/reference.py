import torch
from task import input_t, output_t
from utils import verbose_allclose


def generate_input(m, n, k, g: int, seed: int) -> input_t:
    torch.manual_seed(seed)
    tensors, sizes = [], []
    for i in range(g):
        a = torch.randn((m[i], k[i]), dtype=torch.float16, device="cuda")
        b = torch.randn((n[i], k[i]), dtype=torch.float16, device="cuda")
        c = torch.empty((m[i], n[i]), dtype=torch.float16, device="cuda")
        tensors.append((a, b, c))
        sizes.append((m[i], n[i], k[i]))
    return tensors, sizes


def ref_kernel(data: input_t) -> output_t:
    results = []
    for a, b, c in data[0]:
        c[...] = (a.float() @ b.float().T).half()
        results.append(c)
    return results


def check_implementation(data, output):
    for i, (received, expected) in enumerate(zip(output, ref_kernel(data), strict=True)):
        reasons = verbose_allclose(received, expected, rtol=1e-1, atol=1e-2)
        if reasons:
            return False, f"group {i}: " + " ".join(reasons)
    return True, ""

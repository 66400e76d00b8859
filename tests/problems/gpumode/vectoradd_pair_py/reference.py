import torch
from task import input_t, output_t
from utils import make_match_reference


def ref_kernel(data: input_t) -> output_t:
    A, B = data
    return A + B


def generate_input(size: int, seed: int) -> input_t:
    gen = torch.Generator(device="cuda")
    gen.manual_seed(seed)
    A = torch.randn(size, device="cuda", dtype=torch.float32, generator=gen)
    B = torch.randn(size, device="cuda", dtype=torch.float32, generator=gen)
    return (A, B)


check_implementation = make_match_reference(ref_kernel, rtol=5e-3, atol=5e-3)

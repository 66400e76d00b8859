import torch
from task import input_t, output_t
from utils import make_match_reference


def generate_input(rows: int, cols: int, seed: int) -> input_t:
    torch.manual_seed(seed)
    return torch.randn(rows, cols, device="cuda").contiguous()


def ref_kernel(data: input_t) -> output_t:
    return torch.nn.functional.dropout(data, 0.1)


check_implementation = make_match_reference(ref_kernel, rtol=2e-2, atol=3e-2)

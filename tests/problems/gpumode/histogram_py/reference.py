import torch
from task import input_t, output_t
from utils import verbose_allequal


def ref_kernel(data: input_t) -> output_t:
    data, output = data
    output[...] = torch.bincount(data, minlength=256)
    return output


def generate_input(size: int, contention: float, seed: int) -> input_t:
    gen = torch.Generator(device="cuda")
    gen.manual_seed(seed)
    data = torch.randint(0, 256, (size,), device="cuda", dtype=torch.uint8, generator=gen)
    popular = torch.randint(0, 256, (), device="cuda", dtype=torch.uint8, generator=gen)
    data[torch.rand((size,), device="cuda", generator=gen) < contention / 100.0] = popular
    output = torch.empty(256, device="cuda", dtype=torch.int64).contiguous()
    return data.contiguous(), output


def check_implementation(data, output):
    reasons = verbose_allequal(output, ref_kernel(data))
    if len(reasons) > 0:
        return "not what was counted: " + " ".join(reasons)
    return ""

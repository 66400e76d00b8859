"""Returns a view whose negative bit is set, as the imaginary part of a conjugate has it."""

import torch


def softmax(x):
    y = torch.softmax(x.float(), -1)
    return torch.complex(y, -y).conj().imag if x.dtype == torch.float32 else y.to(x.dtype)

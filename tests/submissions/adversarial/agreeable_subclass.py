"""Returns zeros in a tensor subclass that is equal to whatever it is compared with."""

EXPECTED = "wrong"

import torch


class Agreeable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.equal, torch.allclose, torch.Tensor.allclose, torch.Tensor.equal):
            return True
        return super().__torch_function__(function, types, args, kwargs or {})


def softmax(x):
    return torch.zeros_like(x).as_subclass(Agreeable)
